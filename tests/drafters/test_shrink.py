"""A small model out of a target's own layers."""

import json

import pytest
import torch
from lossless import assert_lossless
from tiny import ARCHITECTURES, make_tokenizer, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_paradraft
from hf_paradraft.cli import app
from hf_paradraft.drafters.pard.shrink import chosen_layers, shrink, with_layers


def test_layers_are_chosen_evenly_or_from_the_first():
    assert chosen_layers(3, 30) == [0, 10, 20]
    assert chosen_layers(3, 30, "first") == [0, 1, 2]
    assert chosen_layers(4, 4) == [0, 1, 2, 3]
    for count in (0, 5):
        with pytest.raises(ValueError, match="has 4 layers"):
            chosen_layers(count, 4)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_layers_are_the_targets(name):
    """All layers kept give the target; and the first one alone gives what the target has behind its first layer."""
    target = tiny_model(name)
    count = target.config.num_hidden_layers
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(with_layers(target, list(range(count)))(ids).logits, target(ids).logits)
    small = with_layers(target, [0])
    states = target(ids, output_hidden_states=True).hidden_states[1]
    embedded = small(ids, output_hidden_states=True).hidden_states[0]
    assert torch.allclose(embedded, target.get_input_embeddings()(ids)) or name == "gpt2"
    decoder = small.get_decoder()
    norm = decoder.ln_f if name == "gpt2" else decoder.norm
    torch.testing.assert_close(small(ids).logits, small.lm_head(norm(states)))
    assert small.num_parameters() < target.num_parameters()


@pytest.fixture
def folder(tmp_path):
    tiny_model(num_hidden_layers=4).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "a b c d w9 w9 w11"}) + "\n" for _ in range(8)))
    return tmp_path


def test_from_a_target_to_a_drafter(folder):
    """`shrink`, then `train pard`, then `generate`."""
    target, rows = str(folder / "target"), str(folder / "rows.jsonl")
    made = [
        "shrink",
        "--target",
        target,
        "--output-dir",
        str(folder / "small"),
        "--layers",
        "2",
        "--vocab",
        "12",
        "--train-file",
        rows,
    ]
    result = CliRunner().invoke(app, made)
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "small" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["draft_vocab_size"] == 12
    train = ["train", "pard", "--model", str(folder / "small"), "--train-file", rows, "--output-dir", str(folder / "out")]
    result = CliRunner().invoke(
        app, [*train, "--mask-token-id", "29", "--max-steps", "3", "--num-depths", "3", "--max-length", "9"]
    )
    assert result.exit_code == 0, result.output
    drafter = hf_paradraft.AutoDrafter.from_pretrained(folder / "out")
    assert {9, 11, 30} <= set(drafter.vocabulary.tolist())
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([[0, 1, 2]])
    options = {"do_sample": False, "max_new_tokens": 20}
    assert_lossless(model, drafter, ids, **options)


def test_a_model_with_a_trimmed_head_is_only_a_pard_drafter(folder):
    """As what drafts are compared with, as another kind of drafter, as a target."""
    target, rows, small = folder / "target", folder / "rows.jsonl", folder / "small"
    shrink(target, small, 2, 12, rows)
    drafter = hf_paradraft.PardDrafter.from_causal_lm(small, mask_token_id=29)
    for refused in (small, drafter):
        with pytest.raises(ValueError, match="guesses 12 of its target's tokens"):
            hf_paradraft.AutoregressiveDrafter.from_causal_lm(refused)
    drafter.save_pretrained(folder / "pard")
    trained = ["--train-file", rows, "--max-steps", 1, "--max-length", 9, "--output-dir", folder / "out"]
    for command in (
        ["bench", "--target", target, "--drafter", folder / "pard", "--parent", small],
        ["generate", "a b", "--target", small, "--drafter", folder / "pard"],
        ["shrink", "--target", small, "--output-dir", folder / "out", "--layers", 1],
        ["train", "ppd", "--model", small, *trained],
        ["train", "pard", "--model", small, "--target", small, "--eval-file", rows, *trained],
        ["train", "parallelspec", "--target", small, *trained],
    ):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert "small guesses 12 of its target's tokens" in str(result.exception)
    assert not (folder / "out").exists()


def test_without_a_vocabulary_it_is_a_plain_model(folder):
    shrink(folder / "target", folder / "plain", 1, which="first")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain")
    assert model.config.num_hidden_layers == 1
    drafter = hf_paradraft.AutoregressiveDrafter.from_causal_lm(folder / "plain")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = torch.tensor([[0, 1, 2]])
    assert_lossless(target, drafter, ids, max_new_tokens=9)


def test_bad_input_is_refused_before_anything_is_written(folder):
    with pytest.raises(ValueError, match="go together"):
        shrink(folder / "target", folder / "out", 2, vocab=12)
    with pytest.raises(ValueError, match="special ones"):
        shrink(folder / "target", folder / "out", 2, vocab=2, data=folder / "rows.jsonl")
    with pytest.raises(ValueError, match="has 4 layers"):
        shrink(folder / "target", folder / "out", 9)
    assert not (folder / "out").exists()
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("kept")
    with pytest.raises(ValueError, match="already has files"):
        shrink(folder / "target", folder / "full", 2)
    assert (folder / "full" / "file").read_text() == "kept"


def test_a_target_is_never_written_over(folder):
    before = {file.name: file.read_bytes() for file in (folder / "target").iterdir()}
    for output in (folder / "target", folder / "target" / "small", folder, folder / "small" / ".." / "target"):
        with pytest.raises(ValueError, match="name another folder"):
            shrink(folder / "target", output, 2, overwrite=True)
    assert {file.name: file.read_bytes() for file in (folder / "target").iterdir()} == before


def test_overwriting_replaces_the_model_alone(folder, monkeypatch):
    old = folder / "old"
    shrink(folder / "target", old, 2)
    (old / "notes.txt").write_text("kept")
    (old / "warp_model.safetensors").write_text("of a drafter that was here")
    before = {file.name: file.read_bytes() for file in old.iterdir()}

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", stopped)
        with pytest.raises(KeyboardInterrupt):
            shrink(folder / "target", old, 1, overwrite=True)
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    shrink(folder / "target", old, 1, overwrite=True)
    assert AutoModelForCausalLM.from_pretrained(old).config.num_hidden_layers == 1
    assert {file.name for file in old.iterdir()} == set(before) - {"warp_model.safetensors"} | {"former"}
    assert {file.name for file in folder.iterdir()} == {"target", "old", "rows.jsonl"}
    with pytest.raises(ValueError, match="is a file"):
        shrink(folder / "target", folder / "rows.jsonl", 1, overwrite=True)
