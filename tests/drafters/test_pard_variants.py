"""PARD drafters that read features (PARD-2), and those that guess fewer ids than their targets
have.
"""

import json

import pytest
import torch
from lossless import assert_lossless
from published import features_behind, guesses_of_a_call
from tiny import MASK, VOCAB, make_tokenizer, near_copy, pard_folder, tiny_model
from transformers import OPTConfig, OPTForCausalLM

import hf_paradraft
from hf_paradraft.drafters import kind_of
from hf_paradraft.drafters.formats.folder import DrafterFolder
from hf_paradraft.drafters.pard.pard2 import Projection
from hf_paradraft.integration.publish import describe_kind
from hf_paradraft.training.target_training import answer_vocabulary

TARGET = tiny_model("llama", num_hidden_layers=4, dtype=torch.float32)
LAYERS = [-1, -3, 1]


def pard2(folder, pickled=True, **config):
    """A folder as AMD publishes it."""
    drafter = near_copy(tiny_model("qwen3", seed=4, dtype=torch.float32))
    drafter.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(5)
    tensors = {"target_proj.weight": torch.randn(32, 96) * 2, "target_proj.bias": torch.randn(32)}
    if pickled:
        torch.save(tensors, folder / "warp_model.bin")
    file = folder / "config.json"
    more = {
        "pard2": True,
        "spd_type": "pard2",
        "pard2_scale": 0.3,
        "pard2_target_dim": 96,
        "pard2_target_layers": LAYERS,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **more, **config}))
    return tensors


@torch.no_grad()
def test_pard2_is_its_formula(tmp_path):
    tensors = pard2(tmp_path)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    drafter.attach(TARGET)
    assert drafter.needs(TARGET) == ("normed", 1, 0)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    states = TARGET(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[4], states[2], states[1]], dim=-1)[0, :-1]
    added = 0.3 * (features @ tensors["target_proj.weight"].T + tensors["target_proj.bias"])
    rows = torch.cat([torch.zeros(1, 32), added, added[-1:].expand(2, -1)])
    embedded = drafter.get_input_embeddings()(torch.tensor([*ids[0].tolist(), MASK, MASK])) + rows
    expected = drafter(inputs_embeds=embedded[None], use_cache=False).logits[0, -3:]
    logits = drafter.draft_logits(ids, features_behind(drafter, TARGET, ids), 3)[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4, check_dtype=False)
    shifted = {
        key: states.roll(1, 1) for key, states in features_behind(drafter, TARGET, ids).items()
    }
    assert (drafter.draft_logits(ids, shifted, 3)[0] - expected).abs().max() > 0.05
    without = hf_paradraft.PardDrafter.from_pretrained(tmp_path, target_independent=True)
    assert without.needs(TARGET) == ()
    assert (without.draft_logits(ids, num_draft_tokens=3)[0] - expected).abs().max() > 0.05


def test_pard2_may_have_embeddings_narrower_than_its_layers():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=32,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
    )
    model = OPTForCausalLM(config).eval()
    drafter = hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=31)
    drafter.projection = Projection(0.1 * torch.randn(16, 32), None, 1.0, [-1])
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    assert_lossless(TARGET, drafter, torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=12)


@pytest.mark.parametrize("size", [None, 9])
def test_pard2_drafts(size, tmp_path):
    pard2(tmp_path)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    prompts = torch.tensor([[0, 0, 7, 8, 9], [1, 2, 3, 4, 5]])
    seen = (prompts != 0).long()
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "attention_mask": seen,
        "eos_token_id": None,
    }
    assert_lossless(TARGET, drafter, prompts, **options)
    checked = 0
    for ids, room, guess in guesses_of_a_call(drafter, TARGET, prompts, attention_mask=seen):
        if room and len(guess.logits):
            expected = drafter.draft_logits(ids, features_behind(drafter, TARGET, ids), room)[0]
            torch.testing.assert_close(
                guess.logits, expected, rtol=1e-3, atol=1e-3, check_dtype=False
            )
            checked += 1
    assert checked > 10


def test_pard2_saved_again(tmp_path):
    tensors = pard2(tmp_path / "first")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "first")
    with pytest.raises(ValueError, match="warp_model"):
        kind_of(saved := DrafterFolder(tmp_path / "first")).check_folder(saved)
    drafter.save_pretrained(tmp_path / "second")
    make_tokenizer().save_pretrained(tmp_path / "second")
    kind_of(saved := DrafterFolder(tmp_path / "second")).check_folder(saved)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "second")
    assert torch.equal(again.projection.weight, tensors["target_proj.weight"])
    assert again.projection.scale == 0.3
    assert again.config.spd_type == "pard2"
    assert dict(describe_kind(kind_of(saved), saved))["kind"] == "PARD-2 drafter"


def test_pard2_on_the_hub(hub, tmp_path):
    tensors = pard2(tmp_path)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    drafter.push_to_hub("user/pard2", tokenizer=make_tokenizer())
    again = hf_paradraft.AutoDrafter.from_pretrained("user/pard2")
    assert torch.equal(again.projection.weight, tensors["target_proj.weight"])


def test_pard2_folders_that_do_not_fit_are_refused(tmp_path):
    pard2(tmp_path / "missing", pickled=False)
    with pytest.raises(ValueError, match="without its projection"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "missing")
    assert (
        hf_paradraft.PardDrafter.from_pretrained(
            tmp_path / "missing", target_independent=True
        ).projection
        is None
    )
    pard2(tmp_path / "wrong", pard2_target_dim=64)
    with pytest.raises(ValueError, match="the config speaks of 64"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "wrong")
    pard2(tmp_path / "deep", pard2_target_layers=[-1, -8, -16])
    with pytest.raises(ValueError, match="the target has 4 layers"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "deep").attach(TARGET)
    pard2(tmp_path / "right")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "right")
    with pytest.raises(ValueError, match="hidden states of 32 numbers"):
        drafter.attach(
            tiny_model("llama", num_hidden_layers=4, hidden_size=64, dtype=torch.float32)
        )
    with pytest.raises(ValueError, match="attach"):
        drafter.draft_logits(torch.tensor([[1, 2]]))


def test_the_most_frequent_ids():
    tokenizer = make_tokenizer()  # its ends and its mask are 30 and 31
    rows = [{"labels": [-100, 9, 9, 4]}, {"labels": [-100, 4, 9, 2]}]
    assert answer_vocabulary(rows, 4, tokenizer, TARGET).tolist() == [4, 9, 30, 31]
    assert answer_vocabulary([{"labels": [9]}], 4, tokenizer, TARGET).tolist() == [0, 9, 30, 31]
    for size in (1, 2, VOCAB + 1):
        with pytest.raises(ValueError, match="special ones"):
            answer_vocabulary([{"labels": [1]}], size, tokenizer, TARGET)


def test_a_drafter_of_some_tokens_alone_is_refused(tmp_path):
    folder = pard_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 12}))
    with pytest.raises(ValueError, match="train an MTP layer"):
        hf_paradraft.AutoDrafter.from_pretrained(folder)
