"""Feature drafters go to the Hub and come back; and the way from a chat model to a drafter, as its
page has it.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from layouts import LAYOUTS, write
from lossless import assert_lossless
from tiny import make_tokenizer, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.cli.options import open_target
from hf_paradraft.integration.publish import describe, push_folder

TARGET = tiny_model("llama", num_hidden_layers=8)
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["z-lab", "DeepSpec DSpark", "speculators EAGLE-3", "SpecForge P-EAGLE"]
)
def test_pushed_layouts_are_pulled_and_stay_lossless(name, hub, tmp_path):
    folder = write(tmp_path / "drafter", *LAYOUTS[name]())
    push_folder(folder, "user/drafter")
    drafter = hf_paradraft.AutoDrafter.from_pretrained("user/drafter")
    assert type(drafter) is type(hf_paradraft.AutoDrafter.from_pretrained(folder))
    said = dict(describe("user/drafter"))
    assert said["kind"].startswith(("DFlash", "DSpark", "EAGLE-3", "P-EAGLE"))
    drafter.attach(TARGET)
    drafter.push_to_hub("user/again")
    again = hf_paradraft.AutoDrafter.from_pretrained("user/again")
    ids = torch.tensor([[1, 2, 3]])
    options = {"do_sample": False, "max_new_tokens": 12}
    assert_lossless(TARGET, again, ids, **options)


@pytest.mark.parametrize("name", ["SpecForge DSpark", "speculators P-EAGLE", "z-lab"])
def test_info_reads_names_of_tensors_and_fetches_none(name, hub, tmp_path):
    """What its architecture does not say, its tensors do."""
    config, tensors = LAYOUTS[name]()
    folder = write(tmp_path / "drafter", {**config, "architectures": ["DFlashDraftModel"]}, tensors)
    push_folder(folder, "user/named")
    assert describe("user/named") == describe(str(folder))
    assert try_to_load_from_cache("user/named", "config.json")
    assert try_to_load_from_cache("user/named", "model.safetensors") is None


def test_a_pickle_on_the_hub_is_found(hub, tmp_path):
    from huggingface_hub import HfApi

    folder = write(tmp_path / "drafter", *LAYOUTS["SafeAI"](), pickled=True)
    HfApi().create_repo("user/pickled")
    HfApi().upload_folder(repo_id="user/pickled", folder_path=folder)
    assert isinstance(
        hf_paradraft.AutoDrafter.from_pretrained("user/pickled"), hf_paradraft.Eagle3Drafter
    )


def test_parallelspec_on_the_hub(hub):
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(
        TARGET, "eagle", 2, vocabulary=torch.arange(20)
    )
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, 6)
    drafter.push_to_hub("user/parallelspec")
    again = hf_paradraft.AutoDrafter.from_pretrained("user/parallelspec")
    assert again.speculation_config == hf_paradraft.SpeculationConfig(3, 6)
    assert dict(describe("user/parallelspec"))["style"] == "eagle"
    ids = torch.tensor([[1, 2, 3]])
    options = {"do_sample": False, "max_new_tokens": 12}
    assert_lossless(TARGET, again, ids, **options)


def test_a_parallelspec_drafter_of_another_target(caplog):
    drafter = hf_paradraft.ParallelSpecDrafter.from_target(TARGET, "medusa", 2)
    drafter.attach(tiny_model("llama", seed=5, num_hidden_layers=8))
    assert "another target" in caplog.text
    with pytest.raises(ValueError, match="made for a vocabulary of 32, and the target's has 2000"):
        drafter.attach(tiny_model("llama", vocab_size=2000))
    drafter.speculation_config.num_draft_tokens = 4
    with pytest.raises(ValueError, match="guesses 3 tokens at most"):
        drafter.attach(TARGET)
    with pytest.raises(ValueError, match="3 tokens at most"):
        drafter.draft_logits(torch.tensor([[1]]), num_draft_tokens=4)
    mixture = LlamaForCausalLM(LlamaConfig(**{**TARGET.config.to_dict(), "num_hidden_layers": 1}))
    assert hf_paradraft.ParallelSpecDrafter.from_target(mixture, num_masks=1).most_drafts == 2
    with pytest.raises(ValueError, match="a mask at least"):
        hf_paradraft.ParallelSpecDrafter.from_target(TARGET, num_masks=0)


@pytest.mark.slow
def test_every_command_of_the_public_model_page_runs(tmp_path, monkeypatch):
    """Every command of docs/public-model.md, in order, on a tiny model of the same architecture."""
    monkeypatch.chdir(tmp_path)
    target = "build/public/SmolLM2-135M-Instruct"
    tiny_model(
        "llama", num_hidden_layers=8, initializer_range=0.1, max_position_embeddings=1024
    ).save_pretrained(target)
    tokenizer = make_tokenizer("u a b c d e f g")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    tokenizer.save_pretrained(target)
    rows = [
        {"messages": [{"role": "user", "content": text}]}
        for text in ("b c", "d e f", "g g b c", "e")
    ]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("questions.jsonl").write_text(json.dumps({"category": "one", "turns": ["b c d"]}) + "\n")
    page = (ROOT / "docs" / "public-model.md").read_text()
    smaller = {
        "--invent 5000": "--invent 3",
        "--max-new-tokens 160": "--max-new-tokens 12",
        "--vocab 16000": "--vocab 16 --max-length 64 --max-steps 2",
        "--learning-rate 1e-3": "--learning-rate 1e-3 --max-length 64 --max-steps 2",
        "-k 5 -n auto": "-k 3 -n 4 --repeats 1 --max-new-tokens 8",
    }
    ran, written = 0, []
    for line in re.search(r"```bash\n(.*?)```", page, re.S)[1].splitlines():
        if line.startswith("paradraft "):
            for long, short in smaller.items():
                line = line.replace(long, short)
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)
            ran += 1
            written += [len(list(Path("states").glob("*.safetensors")))]
    assert ran == 5
    assert 3 < written[1] == written[-1]  # the trainings found the states of all texts
    measured = json.loads(Path("results.json").read_text())
    assert {"plain", "prompt-lookup", "eagle3-chain-k3", "eagle3-tree-k3-n4-lookup"} <= {
        row["method"] for row in measured
    }
    assert all(row["matches_reference"] in (True, 1.0) for row in measured)


def test_packed_targets_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(OSError, match="There is no file"):
        open_target(str(tmp_path / "none.gguf"), {})
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match="damaged"):
        open_target(str(tmp_path / "bad.gguf"), {})


@pytest.mark.nightly
def test_overlap_is_a_case_of_the_benchmark(tmp_path):
    arguments = [
        "bench",
        "--case",
        "overlap",
        "--per-category",
        "1",
        "-k",
        "4",
        "--repeats",
        "1",
        "--max-new-tokens",
        "8",
    ]
    result = CliRunner().invoke(
        app, [*arguments, "--no-equality", "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    methods = [row["method"] for row in json.loads((tmp_path / "out.json").read_text())]
    assert methods[:5] == [
        "plain",
        "pard-chain-k4-one-core",
        "pearl-pard-k4",
        "pearl-process-pard-k4",
        "pard-chain-k4",
    ]
    assert {"pearl-autoregressive-k5", "pearl-process-autoregressive-k5"} <= set(methods)
