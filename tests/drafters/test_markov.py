"""A head on the token before, for drafters that came without one: what it adds, what it learns, where it is kept."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_tokenizer, near_copy, tiny_model
from typer.testing import CliRunner

import hf_paradraft as pd
from hf_paradraft.cli import app
from hf_paradraft.drafters.kinds import kind_of_folder
from hf_paradraft.drafters.markov import FILE, MarkovHead
from hf_paradraft.drafters.markov_training import train_markov
from hf_paradraft.drafters.parallelspec.training import train_parallelspec
from hf_paradraft.drafters.pard.run import train_pard
from hf_paradraft.integration.export import Engine, export

TARGET = tiny_model("llama", num_hidden_layers=4)
OPTIONS = {"per_device_train_batch_size": 4, "use_cpu": True, "max_length": 64}


def head_of(rank=4, guesses=32):
    torch.manual_seed(6)
    head = MarkovHead(32, guesses, rank, 0)
    torch.nn.init.normal_(head.before.weight)
    torch.nn.init.normal_(head.after.weight)
    return head.eval()


def with_head(drafter, head):
    drafter.__dict__["markov"] = head
    return drafter


def parallelspec():
    drafter = pd.ParallelSpecDrafter.from_target(TARGET, "eagle", 3)
    drafter.add_head(4).load_state_dict(head_of().state_dict())
    return drafter


DRAFTERS = {"pard": lambda: with_head(near_copy(TARGET, 0.1), head_of()), "parallelspec": parallelspec}


@torch.no_grad()
def test_it_adds_what_the_token_before_says():
    drafter, head = near_copy(TARGET, 0.1), head_of()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    base = drafter.draft_logits(ids, num_draft_tokens=3)
    found = with_head(drafter, head).draft_logits(ids, num_draft_tokens=3)
    for row in range(2):
        token = int(ids[row, -1])
        for depth in range(3):
            wanted = base[row, depth] + head.after.weight @ head.before.weight[token]
            torch.testing.assert_close(found[row, depth], wanted)
            token = int(wanted.argmax())
    assert (found.argmax(-1) != base.argmax(-1)).any()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("size", [None, 9, pytest.param("auto", marks=pytest.mark.slow)])
def test_outputs_stay_what_they_are(name, size):
    drafter = DRAFTERS[name]()
    drafter.speculation_config = pd.SpeculationConfig(4, size, never_slower=False)
    prompts = torch.tensor([[0, 0, 7, 8, 9], [1, 2, 3, 4, 5]])
    options = {"max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
    batch = {**options, "attention_mask": (prompts != 0).long(), "do_sample": False}
    assert torch.equal(TARGET.generate(prompts, **batch), TARGET.generate(prompts, **batch, assistant_model=drafter))
    torch.manual_seed(1)
    plain = TARGET.generate(prompts[1:], **options, do_sample=True)
    torch.manual_seed(1)
    assert torch.equal(plain, TARGET.generate(prompts[1:], **options, do_sample=True, assistant_model=drafter))


def test_a_chain_is_that_of_draft_logits():
    drafter = DRAFTERS["pard"]()
    drafter.speculation_config = pd.SpeculationConfig(4, None, never_slower=False, trace=True)
    prompt = torch.tensor([[1, 2, 3, 4]])
    out = TARGET.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, assistant_model=drafter)
    length, checked = 4, 0
    for step in drafter.last_stats.trace:
        if step.drafted:
            wanted = drafter.draft_logits(out[:, :length], num_draft_tokens=len(step.drafted))[0].argmax(-1)
            assert wanted.tolist() == list(step.drafted)
            checked += 1
        length += len(step.emitted)
    assert checked > 4


def test_it_is_kept_beside_the_weights(tmp_path):
    drafter = DRAFTERS["pard"]()
    drafter.save_pretrained(tmp_path / "one")
    make_tokenizer().save_pretrained(tmp_path / "one")
    again = pd.AutoDrafter.from_pretrained(tmp_path / "one")
    ids = torch.tensor([[3, 1, 4]])
    assert torch.equal(again.draft_logits(ids), drafter.draft_logits(ids))
    assert not any("markov" in name for name in again.state_dict())
    kind = kind_of_folder(tmp_path / "one")
    kind.check(tmp_path / "one")
    tiny_model(vocab_size=40).save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match="not padded"):
        export(tmp_path / "one", tmp_path / "padded", Engine.transformers, str(tmp_path / "wider"), pad=True)
    export(tmp_path / "one", tmp_path / "engine", Engine.vllm, target=str(tmp_path / "one"))
    assert not (tmp_path / "engine" / FILE).exists()
    with_head(drafter, None).save_pretrained(tmp_path / "one")
    assert not (tmp_path / "one" / FILE).exists()
    save_file(head_of(guesses=20).state_dict(), tmp_path / "one" / FILE)
    with pytest.raises(ValueError, match="head for 20 guesses, and the drafter has 32"):
        pd.AutoDrafter.from_pretrained(tmp_path / "one")
    (tmp_path / "one" / FILE).write_bytes(b"junk")
    with pytest.raises(OSError, match="damaged"):
        pd.AutoDrafter.from_pretrained(tmp_path / "one")
    save_file({"before.weight": torch.zeros(3)}, tmp_path / "one" / FILE)
    with pytest.raises(ValueError, match="no head on the token before"):
        pd.AutoDrafter.from_pretrained(tmp_path / "one")


def test_it_goes_to_the_hub(hub, tmp_path):
    drafter = DRAFTERS["pard"]()
    drafter.push_to_hub("user/headed", tokenizer=make_tokenizer())
    ids = torch.tensor([[3, 1, 4]])
    assert torch.equal(pd.AutoDrafter.from_pretrained("user/headed").draft_logits(ids), drafter.draft_logits(ids))
    with_head(drafter, None).push_to_hub("user/headed", tokenizer=make_tokenizer())
    assert FILE not in hub.files("user/headed")
    assert pd.AutoDrafter.from_pretrained("user/headed", force_download=True).markov is None
    own = parallelspec()
    own.push_to_hub("user/layer")
    again = pd.AutoDrafter.from_pretrained("user/layer")
    torch.testing.assert_close(again.markov.after.weight, own.markov.after.weight)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pard", "parallelspec"])
def test_it_learns(what, folder):
    rows = folder / "rows.jsonl"
    if what == "pard":
        tiny_model("llama", seed=3, initializer_range=0.05).save_pretrained(folder / "small")
        make_tokenizer().save_pretrained(folder / "small")
        train_pard(folder / "small", rows, folder / "drafter", max_steps=2, num_depths=3, **OPTIONS)
    else:
        train_parallelspec(folder / "target", rows, folder / "drafter", "eagle", 2, max_steps=2, **OPTIONS)
    options = {"target": folder / "target", "eval_file": folder / "some.jsonl", "rank": 8, "num_depths": 3, **OPTIONS}
    options |= {"lr_scheduler_type": "constant", "learning_rate": 3e-2}
    drafter = train_markov(folder / "drafter", rows, folder / "out", max_steps=30, **options)
    record = drafter.paradraft["markov"]
    assert record["steps"] == 30
    assert record["acceptance"]["mean_emitted"] > record["acceptance_without"]["mean_emitted"] + 0.1
    again = pd.AutoDrafter.from_pretrained(folder / "out")
    assert again.paradraft["markov"]["rank"] == 8
    torch.testing.assert_close(again.markov.after.weight, drafter.markov.after.weight)
    assert dict(kind_of_folder(folder / "out").describe(folder / "out"))["head on the token before"] == "of rank 8"
    own, before = again.state_dict(), pd.AutoDrafter.from_pretrained(folder / "drafter").state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in before.items())  # the drafter itself is as it was
    options.pop("eval_file")
    if what == "pard":
        with pytest.raises(ValueError, match="evaluation file too"):
            train_markov(folder / "drafter", rows, folder / "parts", **options)
        options.pop("target")
    train_markov(folder / "drafter", rows, folder / "parts", max_steps=15, save_steps=15, **options)
    parts = train_markov(folder / "drafter", rows, folder / "parts", max_steps=30, resume=True, **options)
    if what == "pard":
        taught = train_pard(folder / "out", rows, folder / "taught", max_steps=1, num_depths=3, **OPTIONS)
        assert taught.markov is None  # it was fitted to other weights
        assert "markov" not in taught.paradraft
    torch.testing.assert_close(parts.markov.after.weight, drafter.markov.after.weight)


def test_the_command_and_what_it_refuses(folder, tmp_path):
    near_copy(tiny_model()).save_pretrained(folder / "pard")
    make_tokenizer().save_pretrained(folder / "pard")
    pd.ParallelSpecDrafter.from_target(TARGET, "medusa", 2).save_pretrained(folder / "layer")
    common = ["--train-file", str(folder / "rows.jsonl"), "--max-steps", "2", "--max-length", "64"]
    words = ["train", "markov", "--drafter", str(folder / "pard"), *common, "--output-dir", str(folder / "out")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert json.loads((folder / "out" / "config.json").read_text())["paradraft"]["markov"]["rank"] == 64
    assert (folder / "out" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="already has files"):
        train_markov(folder / "pard", folder / "rows.jsonl", folder / "out")
    with pytest.raises(ValueError, match="stands on its target"):
        train_markov(folder / "layer", folder / "rows.jsonl", folder / "new")
    with pytest.raises(ValueError, match="rank of at least 1"):
        train_markov(folder / "pard", folder / "rows.jsonl", folder / "new", rank=0)
    pd.AutoregressiveDrafter(tiny_model()).save_pretrained(folder / "small")
    with pytest.raises(ValueError, match="autoregressive drafter"):
        train_markov(folder / "small", folder / "rows.jsonl", folder / "new")
    with pytest.raises(ValueError, match="longer than the drafter's context"):
        train_markov(folder / "pard", folder / "rows.jsonl", folder / "new", max_length=4096)
    assert not (folder / "new").exists()
