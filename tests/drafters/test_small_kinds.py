"""Copied drafts, and an ordinary small model in our loop: exact, and as right as they should be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from tiny import ARCHITECTURES, EOS, make_tokenizer, near_copy, tiny_model
from transformers import AutoModelForCausalLM, BloomConfig

import hf_paradraft
from hf_paradraft.copies.lookup import FIRST

TARGETS = {name: tiny_model(name) for name in ARCHITECTURES}
SMALL = {name: near_copy(model, 0.02) for name, model in TARGETS.items()}


ROWS = st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=12), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(list(ARCHITECTURES)), ROWS, st.integers(1, 30), st.integers(1, 6), st.booleans()
)
def test_copied_drafts_change_nothing(name, prompts, new, longest, adaptive):
    drafter = hf_paradraft.NgramDrafter(
        longest, speculation_config=hf_paradraft.SpeculationConfig(6, never_slower=adaptive)
    )
    assert_lossless(TARGETS[name], drafter, prompts, max_new_tokens=new)


def copied(drafter, text, room=4, unchanged=0):
    return drafter.propose([hf_paradraft.Prefix(torch.tensor([text]), room, unchanged)])[
        0
    ].tokens.tolist()


def test_the_latest_of_the_longest_matches_is_copied():
    drafting = hf_paradraft.NgramDrafter(3).start_drafting(tiny_model(), 64)
    assert copied(drafting, [1, 2, 3, 4, 9, 2, 3]) == [4, 9, 2, 3]
    # the latest of the longest matches
    assert copied(drafting, [1, 2, 3, 4, 9, 2, 3, 5, 2, 3], room=2, unchanged=7) == [
        5,
        2,
    ]
    assert copied(drafting, [1, 2, 3, 7], unchanged=3) == []  # what was taken back is forgotten
    assert copied(drafting, [1, 2, 3, 7, 1, 2], unchanged=4) == [3, 7, 1, 2]
    assert (
        copied(
            hf_paradraft.NgramDrafter(3, shortest=2).start_drafting(tiny_model(), 64), [1, 2, 3, 2]
        )
        == []
    )
    with pytest.raises(ValueError, match="1 token at least"):
        hf_paradraft.NgramDrafter(2, 3)


def test_copying_learns_how_often_matches_hold():
    drafting, text = hf_paradraft.NgramDrafter(1).start_drafting(tiny_model(), 64), [5, 6, 5]
    unchanged = 0
    for right in (False, False, True, False):
        guess = drafting.propose([hf_paradraft.Prefix(torch.tensor([text]), 2, unchanged)])[0]
        assert guess.tokens.tolist()[0] == 6
        unchanged = len(text)
        text = [*text, 6, 5] if right else [*text, 7, 5, 6, 5]
    assert drafting.propose([hf_paradraft.Prefix(torch.tensor([text]), 2, unchanged)])[
        0
    ].acceptance[0] == pytest.approx((2 * FIRST[0] + 1) / 6)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    ROWS,
    st.integers(1, 24),
    st.integers(1, 6),
    st.sampled_from([None, 1, 7, 20]),
    st.sampled_from([None, "static"]),
)
def test_a_small_model_changes_nothing(name, prompts, new, length, size, cache):
    drafter = hf_paradraft.AutoregressiveDrafter(
        SMALL[name], hf_paradraft.SpeculationConfig(length, size, never_slower=False)
    )
    assert_lossless(
        TARGETS["llama"], drafter, prompts, max_new_tokens=new, cache_implementation=cache
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("size", [None, 12])
def test_a_small_model_drafts_its_most_probable_tokens(name, size, prompt):
    """Through rejections, with what was read kept: each path of a draft is the most probable
    continuation of its node.
    """
    small = SMALL[name]
    drafter = hf_paradraft.AutoregressiveDrafter(
        small, hf_paradraft.SpeculationConfig(5, size, never_slower=False, trace=True)
    )
    out = TARGETS[name].generate(
        prompt, do_sample=False, max_new_tokens=40, eos_token_id=None, assistant_model=drafter
    )
    length = prompt.shape[1]
    for record in drafter.last_stats.trace:
        for node, (token, parent) in enumerate(zip(record.drafted, record.parents, strict=True)):
            path = []
            while parent >= 0:
                path.append(record.drafted[parent])
                parent = record.parents[parent]
            ids = torch.cat([out[:, :length], torch.tensor([path[::-1]], dtype=torch.long)], dim=1)
            with torch.no_grad():
                logits = small(ids).logits[0, -1]
            first = record.parents.index(record.parents[node]) == node
            ranks = int((logits > logits[token]).sum())
            assert ranks == 0 if first else ranks > 0
        if size is None:
            whole = (
                drafter.draft_logits(out[:, :length], num_draft_tokens=len(record.drafted) or 1)[0]
                .argmax(-1)
                .tolist()
            )
            assert record.drafted == whole[: len(record.drafted)]
        length += len(record.emitted)
    assert drafter.last_stats.mean_emitted > 1.2


def test_accepted_tokens_are_not_read_again(prompt):
    """The target itself as its drafter: each forward of the drafter reads one new token, but for
    the prompt's.
    """
    target, small = tiny_model(), tiny_model()
    read = []
    small.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drafter = hf_paradraft.AutoregressiveDrafter(
        small, hf_paradraft.SpeculationConfig(4, None, never_slower=False)
    )
    target.generate(
        prompt, do_sample=False, max_new_tokens=26, eos_token_id=None, assistant_model=drafter
    )
    assert drafter.last_stats.mean_emitted == pytest.approx(26 / 6)
    assert read[0] == prompt.shape[1]
    # the last draft, which nobody needed to read, and the target's own token
    assert max(read[1:]) <= 2


def test_drafting_stops_early_for_a_cheap_target(prompt):
    big = tiny_model(num_hidden_layers=8)
    drafter = hf_paradraft.AutoregressiveDrafter(big, hf_paradraft.SpeculationConfig(6))
    target = TARGETS["llama"]
    options = {"do_sample": False, "max_new_tokens": 120, "eos_token_id": None}
    assert_lossless(target, drafter, prompt, **options)
    stats = drafter.last_stats
    # six a round, did it not stop; a busy machine costs a few
    assert stats.num_drafted < 3 * stats.num_rounds


def test_a_saved_autoregressive_drafter_is_loaded_as_one(tmp_path, prompt):
    drafter = hf_paradraft.AutoregressiveDrafter(tiny_model(), hf_paradraft.SpeculationConfig(3, 6))
    drafter.save_pretrained(tmp_path / "drafter")
    make_tokenizer().save_pretrained(tmp_path / "drafter")
    again = hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "drafter")
    assert isinstance(again, hf_paradraft.AutoregressiveDrafter)
    assert again.speculation_config == hf_paradraft.SpeculationConfig(3, 6)
    assert again.name_or_path == str(tmp_path / "drafter")
    chains = hf_paradraft.SpeculationConfig(2, None)
    asked = hf_paradraft.AutoDrafter.from_pretrained(
        tmp_path / "drafter", speculation_config=chains
    )
    assert asked.speculation_config == chains
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter")
    assert torch.equal(plain(prompt).logits, again.model(prompt).logits)
    tiny_model().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"AutoregressiveDrafter\.from_causal_lm"):
        hf_paradraft.AutoDrafter.from_pretrained(tmp_path / "plain")
    assert isinstance(
        hf_paradraft.AutoregressiveDrafter.from_causal_lm(tmp_path / "plain"),
        hf_paradraft.AutoregressiveDrafter,
    )


def test_models_that_take_no_masks_are_refused():
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=4)
    )
    with pytest.raises(ValueError, match="takes no explicit masks"):
        hf_paradraft.AutoregressiveDrafter(bloom)
