"""PARD drafters that read features (PARD-2), and those that guess fewer ids than their targets have."""

import copy
import json

import pytest
import torch
from lossless import assert_lossless
from published import features_behind, guesses_of_a_call
from safetensors.torch import load_file
from scipy.stats import chisquare
from tiny import MASK, VOCAB, make_tokenizer, near_copy, tiny_model

import hf_paradraft
from hf_paradraft.drafters import kind_of_folder
from hf_paradraft.drafters.pard.config import trim_head
from hf_paradraft.training.vocabulary import most_frequent

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
    more = {"pard2": True, "spd_type": "pard2", "pard2_scale": 0.3, "pard2_target_dim": 96, "pard2_target_layers": LAYERS}
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
    shifted = {key: states.roll(1, 1) for key, states in features_behind(drafter, TARGET, ids).items()}
    assert (drafter.draft_logits(ids, shifted, 3)[0] - expected).abs().max() > 0.05
    without = hf_paradraft.PardDrafter.from_pretrained(tmp_path, target_independent=True)
    assert without.needs(TARGET) == ()
    assert (without.draft_logits(ids, num_draft_tokens=3)[0] - expected).abs().max() > 0.05


@pytest.mark.parametrize("size", [None, 9])
def test_pard2_drafts(size, tmp_path):
    pard2(tmp_path)
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
    prompts = torch.tensor([[0, 0, 7, 8, 9], [1, 2, 3, 4, 5]])
    seen = (prompts != 0).long()
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "attention_mask": seen, "eos_token_id": None}
    assert_lossless(TARGET, drafter, prompts, **options)
    checked = 0
    for ids, room, guess in guesses_of_a_call(drafter, TARGET, prompts, attention_mask=seen):
        if room and len(guess.logits):
            expected = drafter.draft_logits(ids, features_behind(drafter, TARGET, ids), room)[0]
            torch.testing.assert_close(guess.logits, expected, rtol=1e-3, atol=1e-3, check_dtype=False)
            checked += 1
    assert checked > 10


def test_pard2_saved_again(tmp_path):
    tensors = pard2(tmp_path / "first")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "first")
    with pytest.raises(ValueError, match="warp_model"):
        kind_of_folder(tmp_path / "first").check_folder(tmp_path / "first")
    drafter.save_pretrained(tmp_path / "second")
    make_tokenizer().save_pretrained(tmp_path / "second")
    kind_of_folder(tmp_path / "second").check_folder(tmp_path / "second")
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "second")
    assert torch.equal(again.projection.weight, tensors["target_proj.weight"])
    assert again.projection.scale == 0.3
    assert again.config.spd_type == "pard2"
    assert dict(kind_of_folder(tmp_path / "second").describe(tmp_path / "second"))["kind"] == "PARD-2 drafter"


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
    assert hf_paradraft.PardDrafter.from_pretrained(tmp_path / "missing", target_independent=True).projection is None
    pard2(tmp_path / "wrong", pard2_target_dim=64)
    with pytest.raises(ValueError, match="the config speaks of 64"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "wrong")
    pard2(tmp_path / "deep", pard2_target_layers=[-1, -8, -16])
    with pytest.raises(ValueError, match="the target has 4 layers"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "deep").attach(TARGET)
    pard2(tmp_path / "right")
    drafter = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "right")
    with pytest.raises(ValueError, match="hidden states of 32 numbers"):
        drafter.attach(tiny_model("llama", num_hidden_layers=4, hidden_size=64, dtype=torch.float32))
    with pytest.raises(ValueError, match="attach"):
        drafter.draft_logits(torch.tensor([[1, 2]]))


def trimmed(target, size=20):
    drafter = near_copy(target, 0.02)
    ids = most_frequent([[3, 3, 3, 5, 5, 7], [7, 7, 7, 7]], size, [30], VOCAB)
    model = copy.deepcopy(drafter)
    trim_head(model, ids)
    return hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=MASK), drafter, ids


def test_the_most_frequent_ids():
    assert most_frequent([[9, 9, 4], [4, 9, 2]], 3, [30], VOCAB).tolist() == [4, 9, 30]
    assert most_frequent([[9]], 4, [30, 31], VOCAB).tolist() == [0, 9, 30, 31]
    for size in (1, 2, VOCAB + 1):
        with pytest.raises(ValueError, match="special ones"):
            most_frequent([[1]], size, [30, 31], VOCAB)


@torch.no_grad()
def test_a_trimmed_head_guesses_what_the_whole_one_does(tmp_path):
    drafter, whole, ids = trimmed(TARGET)
    text = torch.tensor([[1, 2, 3, 4]])
    expected = whole.draft_logits(text, num_draft_tokens=3)[..., ids]
    assert torch.equal(drafter.draft_logits(text, num_draft_tokens=3), expected)
    drafter.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert torch.equal(again.vocabulary, ids)
    assert torch.equal(again.draft_logits(text, num_draft_tokens=3), expected)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (20, 32)
    kind = kind_of_folder(tmp_path)
    kind.check_folder(tmp_path)
    assert dict(kind.describe(tmp_path))["guesses ids"].startswith("20 of 32")
    with pytest.raises(ValueError, match="writes no text by itself"):
        again.generate(text)
    from hf_paradraft.integration.export import Engine, export

    with pytest.raises(ValueError, match="20 of 32 ids"):
        export(tmp_path, tmp_path / "out", Engine.vllm)


@pytest.mark.parametrize("size", [None, 9, "auto"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_trimmed_drafter_changes_nothing(size, batch):
    drafter, _, _ = trimmed(TARGET)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=size == "auto")
    prompts = torch.tensor([[7, 8, 9], [1, 2, 3]])[:batch]
    options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}
    assert_lossless(TARGET, drafter, prompts, **options)
    assert_lossless(TARGET, drafter, prompts[:1], seed=1, **{**options, "do_sample": True})


def test_a_trimmed_drafter_in_transformers_own_loop():
    from hf_paradraft.integration import hook

    drafter, _, _ = trimmed(TARGET)
    text = torch.tensor([[1, 2, 3]])
    candidates = hf_paradraft.PardCandidateGenerator(drafter, max_length=12)
    ids, logits = candidates.get_candidates(text)
    assert logits.shape[-1] == VOCAB
    assert ids.shape[1] == 11
    assert hook.install()


@pytest.mark.slow
def test_a_trimmed_drafter_under_rejection():
    """In distribution: the first two tokens of many calls against the target's own."""
    target = tiny_model("llama", vocab_size=6, initializer_range=0.9, eos_token_id=None, dtype=torch.float32)
    drafter = near_copy_of(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(2, 4, acceptance="rejection", never_slower=False)
    prompt = torch.tensor([[1, 2]])
    with torch.no_grad():
        first = target(prompt).logits[0, -1].softmax(-1)
        second = torch.stack([target(torch.tensor([[1, 2, a]])).logits[0, -1].softmax(-1) for a in range(6)])
        third = torch.stack(
            [torch.stack([target(torch.tensor([[1, 2, a, b]])).logits[0, -1].softmax(-1) for b in range(6)]) for a in range(6)]
        )
    exact = (first[:, None, None] * second[:, :, None] * third).flatten().double()
    counts = torch.zeros(216)
    torch.manual_seed(0)
    rows, calls = 500, 3
    draws = rows * calls
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "min_new_tokens": 3, "num_return_sequences": rows}
    for _ in range(calls):
        a, b, c = target.generate(prompt, **sampling, assistant_model=drafter)[:, 2:].T
        counts.index_put_((36 * a + 6 * b + c,), torch.ones(rows), accumulate=True)
    merged = exact * draws >= 5
    seen = torch.cat([counts[merged], counts[~merged].sum()[None]])
    expected = torch.cat([exact[merged], exact[~merged].sum()[None]]) * draws
    keep = expected > 0
    assert chisquare(seen[keep].numpy(), (expected[keep] / expected[keep].sum() * draws).numpy()).pvalue > 1e-3


def near_copy_of(target):
    torch.manual_seed(3)
    model = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    trim_head(model, torch.tensor([0, 2, 3, 5]))
    return hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=4)
