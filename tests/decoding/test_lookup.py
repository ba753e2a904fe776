"""Copied drafts that join a drafter's own: never a change of the output, and a gain where text
repeats itself.
"""

import copy
import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless, listen
from tiny import EOS, near_copy, tiny_model, with_prompts

import hf_paradraft
from hf_paradraft.copies.lookup import PromptLookup, with_copied

TARGET = tiny_model()
MAKE = {
    "pard": lambda: near_copy(TARGET, 0.2),
    "autoregressive": lambda: hf_paradraft.AutoregressiveDrafter(near_copy(TARGET, 0.2)),
    "ppd": lambda: hf_paradraft.PpdDrafter.from_model(
        with_prompts(copy.deepcopy(TARGET), 2, calibrated=True)
    ),
    "prompted": lambda: hf_paradraft.PromptedDrafter(with_prompts(near_copy(TARGET, 0.2), 2)),
    "parallelspec": lambda: hf_paradraft.ParallelSpecDrafter.from_target(TARGET, "eagle", 3),
    "dspark": lambda: hf_paradraft.DSparkDrafter.from_target(
        TARGET, 31, num_layers=1, block_size=4, num_features=2, markov_rank=4
    ),
    "n-grams": hf_paradraft.NgramDrafter,
}
DRAFTERS = {name: make() for name, make in MAKE.items()}


@pytest.mark.slow
@settings(max_examples=32, deadline=None)
@given(
    st.sampled_from(list(MAKE)),
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=14), min_size=1, max_size=3),
    st.sampled_from([None, 9, "auto"]),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_lookup_never_changes_output(name, prompts, size, new, adaptive, sampled):
    drafter = DRAFTERS[name]
    length = 2 if name == "ppd" else 4
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        length, size, prompt_lookup=True, never_slower=adaptive
    )
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {
        "attention_mask": mask,
        "max_new_tokens": new,
        "pad_token_id": 0,
        "do_sample": sampled and len(prompts) == 1,
    }
    assert_lossless(TARGET, drafter, ids, seed=1, **options, eos_token_id=EOS)


def at_random(seed):
    """Instead of the budget's decision: copies alone in half of the rounds that have any."""
    generator = random.Random(seed)

    def enough(lookup, copied, prefixes, budget, num_draft_tokens):
        return any(map(len, copied)) and generator.random() < 0.5

    return enough


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from([name for name in MAKE if name != "n-grams"]),
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=14), min_size=1, max_size=3),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 99),
)
def test_sparing_the_drafter_never_changes_output(name, prompts, new, sampled, seed):
    with patch.object(PromptLookup, "are_enough", at_random(seed)):
        test_lookup_never_changes_output.hypothesis.inner_test(
            name, prompts, "auto", new, True, sampled
        )


@pytest.mark.parametrize("name", ["pard", "autoregressive", "parallelspec", "dspark"])
def test_a_spared_drafter_reads_what_was_written_meanwhile(name):
    """Behind every prefix it guesses what it would have guessed if it had been asked in every
    round.
    """
    drafter, said = MAKE[name](), []
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, "auto", prompt_lookup=True, never_slower=False
    )
    prompt = torch.tensor([[5, 3, 4, 5, 3, 4, 5, 3]])
    for seed in range(4):
        enough = at_random(seed) if seed else lambda *_: False
        with patch.object(PromptLookup, "are_enough", enough), listen(drafter) as heard:
            TARGET.generate(
                prompt,
                do_sample=False,
                max_new_tokens=60,
                eos_token_id=None,
                assistant_model=drafter,
            )
        said.append({asked.ids.shape[1]: asked.guess.logits.clone() for asked in heard})
    always, *seldom = said
    common = [
        (always[length], logits[length])
        for logits in seldom
        for length in logits
        if length in always
    ]
    assert len(common) > 5
    for expected, logits in common:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


LOOPING = tiny_model(num_hidden_layers=6, initializer_range=0.15)
USELESS = {
    "pard": lambda: near_copy(tiny_model(seed=9), 0.5),
    "ppd": lambda: hf_paradraft.PpdDrafter.from_model(
        with_prompts(copy.deepcopy(LOOPING), 2, calibrated=True)
    ),
    "parallelspec": lambda: hf_paradraft.ParallelSpecDrafter.from_target(LOOPING, "eagle", 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(USELESS.keys() - {"ppd"}))
@pytest.mark.parametrize("size", [None, 15])
def test_copies_pay_where_text_repeats(name, size):
    """Greedy text of a small random model falls into loops, which a useless drafter does not
    foresee.
    """
    drafter, tau = USELESS[name](), {}
    for lookup in (False, True):
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            6, size, prompt_lookup=lookup, never_slower=False
        )
        prompt = torch.tensor([[5, 3, 4]])
        LOOPING.generate(
            prompt, do_sample=False, max_new_tokens=100, eos_token_id=None, assistant_model=drafter
        )
        tau[lookup] = drafter.last_stats.mean_emitted
    assert tau[True] > 1.1 * tau[False], tau


def test_prompt_tokens_copy_nothing_and_say_so(caplog):
    drafter = USELESS["ppd"]()
    drafter.speculation_config.prompt_lookup = True
    assert_lossless(LOOPING, drafter, torch.tensor([[5, 3, 4]]))
    assert "nothing is copied (prompt_lookup)" in caplog.text


@pytest.mark.parametrize("name", ["pard", "parallelspec"])
def test_copies_go_deeper_than_guesses(name):
    """Where text repeats itself, a round brings more than K + 1 tokens."""
    drafter = USELESS[name]()
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        2, 12, prompt_lookup=True, never_slower=False
    )
    options = {"do_sample": False, "max_new_tokens": 100, "eos_token_id": None}
    prompt = torch.tensor([[5, 3, 4]])
    assert_lossless(LOOPING, drafter, prompt, **options)
    assert max(drafter.last_stats.emitted_per_round) > 3


def test_copied_chains_join_trees():
    tree = hf_paradraft.Draft(torch.tensor([5, 6, 7]), [-1, 0, -1], acceptance=[0.6, 0.5, 0.3])
    joined = with_copied(tree, [([5, 8, 9], [0.9, 0.9, 0.2])], 4)
    assert joined.tokens.tolist() == [5, 8, 6, 7]
    assert joined.parents == [-1, 0, 0, -1]
    assert joined.acceptance == [0.9, 0.9, 0.5, 0.3]
    assert with_copied(
        hf_paradraft.Draft.chain(torch.zeros(0, dtype=torch.long)), [([1, 2], [0.5, 0.5])], 8
    ).parents == [-1, 0]


def test_copies_learn_when_they_do_not_hold():
    lookup, text = PromptLookup(longest=2), [4, 5, 9, 4, 5]
    lookup.read(torch.tensor(text), 0)
    [first] = lookup.following(3)
    assert first[0] == [9, 4, 5]
    for token in range(10, 16):
        before, text = len(text), [*text, token, 4, 5, 9, 4, 5]
        lookup.read(torch.tensor(text), before)
        [last] = lookup.following(3)
        assert last[0][0] == 9
    assert last[1][0] < 0.2 < first[1][0]


def test_rejection_draws_and_does_not_copy(prompt, caplog):
    drafter = DRAFTERS["pard"]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, 6, acceptance="rejection", prompt_lookup=True, never_slower=False, trace=True
    )
    TARGET.generate(prompt, do_sample=True, max_new_tokens=20, assistant_model=drafter)
    assert drafter.last_stats.num_drafted > 0
    assert "nothing is copied" in caplog.text


def test_a_text_that_is_taken_back_is_forgotten():
    """What a lookup knows behind a rejected window is what one that never saw the window knows."""
    seen, fresh = PromptLookup(), PromptLookup()
    seen.read(torch.tensor([4, 5, 6, 4, 5, 7, 4, 5]), 0)
    seen.read(torch.tensor([4, 5, 6, 9, 4, 5]), 3)
    fresh.read(torch.tensor([4, 5, 6, 9, 4, 5]), 0)
    assert seen.chains.tokens == fresh.chains.tokens
    assert seen.chains.newest == fresh.chains.newest
    assert seen.chains.before == fresh.chains.before
    assert seen.following(4) == fresh.following(4)
