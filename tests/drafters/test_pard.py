"""PARD drafters: made from any causal LM, saved as one, loaded from any engine's format, refused
where they cannot work.
"""

import json
import pickle
import threading

import pytest
import torch
from tiny import ARCHITECTURES, EOS, MASK, VOCAB, near_copy, tiny_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import hf_paradraft
from hf_paradraft.protocol import Prefix
from hf_paradraft.training.rows import parallel_draft_rows


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_drafter_is_a_plain_causal_lm(architecture, tmp_path):
    model = tiny_model(architecture)
    drafter = hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=MASK)
    drafter.speculation_config.num_draft_tokens = 7
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert "auto_map" not in config
    assert [config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")] == [MASK] * 3
    assert config["spd_type"] == "pard"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(stock) is type(model)
    ids = torch.arange(10)[None]
    # Gemma 4 scales in float32
    torch.testing.assert_close(stock(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path)
    assert isinstance(again, hf_paradraft.PardDrafter)
    assert again.mask_token_id == MASK
    assert again.speculation_config.num_draft_tokens == 7
    torch.testing.assert_close(again.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_from_causal_lm_shares_weights_and_leaves_the_model_alone(target):
    drafter = hf_paradraft.PardDrafter.from_causal_lm(target, mask_token_id=MASK)
    assert drafter.get_input_embeddings().weight is target.get_input_embeddings().weight
    assert not isinstance(target, hf_paradraft.PardDrafter)
    assert not hasattr(target.config, "pard_token")


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_any_engines_key_is_read(folder, key):
    others = dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), ...)
    edit_config(folder, **{**others, key: 29})
    assert hf_paradraft.AutoDrafter.from_pretrained(folder).mask_token_id == 29


def test_plain_generate_of_a_drafter_is_ordinary(target, drafter, prompt):
    stock = type(target)(drafter.config).eval()
    stock.load_state_dict(drafter.state_dict())
    expected = stock.generate(prompt, max_new_tokens=10, do_sample=False)
    assert torch.equal(drafter.generate(prompt, max_new_tokens=10, do_sample=False), expected)


def test_a_drafter_can_be_pickled(drafter):
    again = pickle.loads(pickle.dumps(drafter))
    assert isinstance(again, hf_paradraft.PardDrafter)
    assert again.mask_token_id == drafter.mask_token_id


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_forward_drafts_what_training_rows_say(architecture):
    """Inference and training must mean the same: the logits of K drafts are those of the training
    rows of each depth.
    """
    model = tiny_model(
        architecture, **({} if architecture == "gpt2" else {"attn_implementation": "eager"})
    )
    drafter = hf_paradraft.PardDrafter.from_causal_lm(model, mask_token_id=MASK)
    ids = torch.randint(0, EOS, (10,), generator=torch.Generator().manual_seed(0))
    depths = 5
    rows = parallel_draft_rows(ids, ids, MASK, torch.ones(depths, 10, dtype=torch.bool))
    mask = rows["attention_mask"]
    if architecture == "mistral-sliding":
        window = model.config.sliding_window
        mask = mask & (rows["position_ids"][:, None] - rows["position_ids"] < window)
    with torch.no_grad():
        trained = model(
            rows["input_ids"][None],
            position_ids=rows["position_ids"][None],
            attention_mask=torch.zeros(mask.shape, dtype=model.dtype).masked_fill(
                ~mask, torch.finfo(model.dtype).min
            )[None, None],
            use_cache=False,
        ).logits[0]
        drafted = drafter.draft_logits(ids[None, :6], num_draft_tokens=depths)[0]
    for depth in range(depths):
        row = depth * 10 + 5 + depth
        if row < len(trained) and 5 + depth < 10:
            torch.testing.assert_close(
                drafted[depth], trained[row], rtol=1e-4, atol=1e-4, check_dtype=False
            )


def test_the_cache_never_keeps_masks(target, drafter):
    ids, drafting = torch.arange(12)[None], drafter.start_drafting(target, 40)
    drafting.propose([Prefix(ids[:, :5], 6, 0)])
    assert drafting.cache.lengths == [5]
    later = drafting.propose([Prefix(ids, 3, 5)])[0].logits
    with torch.no_grad():
        fresh = drafter.draft_logits(ids, num_draft_tokens=3)[0]
    torch.testing.assert_close(later, fresh, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_two_threads_share_a_drafter():
    targets = [tiny_model(seed=seed) for seed in (0, 5)]
    drafter = near_copy(targets[0])
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[9, 8, 7, 6]])]
    plain = [
        t.generate(p, max_new_tokens=40, do_sample=False)
        for t, p in zip(targets, prompts, strict=True)
    ]
    drafted = [None, None]

    def run(index):
        drafted[index] = targets[index].generate(
            prompts[index], max_new_tokens=40, do_sample=False, assistant_model=drafter
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drafted, plain, strict=True))


# What cannot work, and what is said about it.


def test_target_without_a_cache(target, drafter, prompt):
    with pytest.raises(ValueError, match="cache"):
        target.generate(prompt, assistant_model=drafter, use_cache=False, max_new_tokens=5)


def test_encoder_decoder_target(drafter):
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        model.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=5)
