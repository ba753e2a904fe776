"""Copied drafts that join a drafter's own: never a change of the output, and a gain where text repeats itself."""

import copy
import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, near_copy, tiny_model, with_prompts

import hf_paradraft as pd
from hf_paradraft.decoding.copies import Copies, grafted, grafted_beside_riders
from hf_paradraft.decoding.pace import TRIAL, Pace
from hf_paradraft.drafters.dspark.training import block_drafter

TARGET = tiny_model()
MAKE = {
    "pard": lambda: near_copy(TARGET, 0.2),
    "autoregressive": lambda: pd.AutoregressiveDrafter(near_copy(TARGET, 0.2)),
    "ppd": lambda: pd.PpdDrafter.from_model(with_prompts(copy.deepcopy(TARGET), 2, calibrated=True)),
    "prompted": lambda: pd.PromptedDrafter(with_prompts(near_copy(TARGET, 0.2), 2)),
    "parallelspec": lambda: pd.ParallelSpecDrafter.from_target(TARGET, "eagle", 3),
    "dspark": lambda: block_drafter(TARGET, 31, num_layers=1, block_size=4, num_features=2, markov_rank=4),
    "n-grams": pd.NgramDrafter,
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
def test_copies_change_nothing(name, prompts, size, new, adaptive, sampled):
    drafter = DRAFTERS[name]
    length = 2 if name == "ppd" else 4
    drafter.speculation_config = pd.SpeculationConfig(length, size, graft=True, never_slower=adaptive)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "max_new_tokens": new, "pad_token_id": 0, "do_sample": sampled and len(prompts) == 1}
    torch.manual_seed(1)
    plain = TARGET.generate(ids, **options, eos_token_id=EOS)
    torch.manual_seed(1)
    assert torch.equal(plain, TARGET.generate(ids, **options, eos_token_id=EOS, assistant_model=drafter))


def at_random(seed):
    """Instead of `Pace.spares`: copies alone in half of the rounds that have any."""
    generator = random.Random(seed)
    return lambda pace, copied: bool(pace.draft) and any(map(len, copied)) and generator.random() < 0.5


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(
    st.sampled_from([name for name in MAKE if name != "n-grams"]),
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=14), min_size=1, max_size=3),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_drafter_that_is_spared_changes_nothing(name, prompts, new, sampled, seed):
    with patch.object(Pace, "spares", at_random(seed)):
        test_copies_change_nothing.hypothesis.inner_test(name, prompts, "auto", new, True, sampled)


@pytest.mark.parametrize("name", ["pard", "autoregressive", "parallelspec", "dspark"])
def test_a_drafter_that_was_spared_knows_what_was_written(name):
    """Behind every prefix it guesses what it would have guessed if it had been asked in every round."""
    drafter, said = MAKE[name](), []
    start = drafter.start_drafting

    def listening(target, max_length):
        drafting, found = start(target, max_length), {}
        propose = drafting.propose

        def told(prefixes):
            guesses = propose(prefixes)
            found[prefixes[0].ids.shape[1]] = guesses[0].logits.clone()
            return guesses

        drafting.propose = told
        said.append(found)
        return drafting

    drafter.start_drafting = listening
    drafter.speculation_config = pd.SpeculationConfig(3, "auto", graft=True, never_slower=False)
    prompt = torch.tensor([[5, 3, 4, 5, 3, 4, 5, 3]])
    for seed in range(4):
        with patch.object(Pace, "spares", at_random(seed) if seed else lambda pace, copied: False):
            TARGET.generate(prompt, do_sample=False, max_new_tokens=60, eos_token_id=None, assistant_model=drafter)
    always, *seldom = said
    common = [(always[length], found[length]) for found in seldom for length in found if length in always]
    assert len(common) > 5
    for expected, logits in common:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_copies_alone_where_a_draft_costs_more_than_it_brings():
    pace = Pace(4, False)
    for _ in range(TRIAL):
        for seconds, value in ((pace.draft, 1.0), (pace.verify, 9.0), (pace.other, 1.0)):
            seconds.append(value)
    pace.tried[:], pace.held[:] = 100, 30  # a guess is right in three of ten rounds
    sure, doubtful = [0.95] * 10, [0.3] + [0.5] * 9
    assert pace.spares([sure])
    assert not pace.spares([doubtful])
    assert not pace.spares([[]])
    pace.held[:] = 80
    assert pace.spares([sure])
    assert not pace.spares([sure, []])  # the other row has nothing but guesses, and they are good
    pace.held[:] = 0
    assert pace.spares([doubtful, []])
    assert not pace.spares([[], []])  # a round without any draft is the pace's own business
    pace.adaptive = False
    assert not pace.spares([sure])


LOOPING = tiny_model(num_hidden_layers=6, initializer_range=0.15)
USELESS = {
    "pard": lambda: near_copy(tiny_model(seed=9), 0.5),
    "ppd": lambda: pd.PpdDrafter.from_model(with_prompts(copy.deepcopy(LOOPING), 2, calibrated=True)),
    "parallelspec": lambda: pd.ParallelSpecDrafter.from_target(LOOPING, "eagle", 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", USELESS)
@pytest.mark.parametrize("size", [None, 15])
def test_copies_pay_where_text_repeats(name, size):
    """Greedy text of a small random model falls into loops, which a useless drafter does not foresee."""
    drafter, tau = USELESS[name](), {}
    for graft in (False, True):
        drafter.speculation_config = pd.SpeculationConfig(2 if name == "ppd" else 6, size, graft=graft, never_slower=False)
        prompt = torch.tensor([[5, 3, 4]])
        LOOPING.generate(prompt, do_sample=False, max_new_tokens=100, eos_token_id=None, assistant_model=drafter)
        tau[graft] = drafter.last_stats.mean_emitted
    assert tau[True] > 1.1 * tau[False], tau


@pytest.mark.parametrize("name", ["pard", "parallelspec"])
def test_copies_go_deeper_than_guesses(name):
    """Where text repeats itself, a round brings more than K + 1 tokens."""
    drafter = USELESS[name]()
    drafter.speculation_config = pd.SpeculationConfig(2, 12, graft=True, never_slower=False)
    options = {"do_sample": False, "max_new_tokens": 100, "eos_token_id": None}
    prompt = torch.tensor([[5, 3, 4]])
    plain = LOOPING.generate(prompt, **options)
    assert torch.equal(plain, LOOPING.generate(prompt, **options, assistant_model=drafter))
    assert 3 < max(drafter.last_stats.emitted_per_round) <= 11


def test_copied_chains_join_trees():
    tree = pd.Draft(torch.tensor([5, 6, 7]), [-1, 0, -1], beliefs=[0.6, 0.5, 0.3])
    joined = grafted(tree, [5, 8, 9], [0.9, 0.9, 0.2], 4)
    assert joined.tokens.tolist() == [5, 8, 6, 7]
    assert joined.parents == [-1, 0, 0, -1]
    assert joined.beliefs == [0.9, 0.9, 0.5, 0.3]
    assert grafted(pd.Draft.chain(torch.zeros(0, dtype=torch.long)), [1, 2], [0.5, 0.5], 8).parents == [-1, 0]


def test_copied_chains_beside_riders():
    riders = pd.Riders(torch.tensor([[1.0], [2.0]]))
    tree = pd.Draft(torch.tensor([5]), [-1], None, [0.5], [-1, 0], [-1, 0], torch.tensor([[1.0], [1.0]]))
    joined = grafted_beside_riders(tree, [5, 8], [0.9, 0.9], riders)
    assert joined.tokens.tolist() == [5, 8]
    assert joined.rider_nodes == [-1, 0, 1, 1]
    assert joined.rider_parents == [-1, 0, 1, 4]  # the last one sees the rider before it
    assert joined.rider_embeddings.flatten().tolist() == [1, 1, 1, 2]
    assert grafted_beside_riders(tree, [5], [0.9], riders) is tree


def test_copies_learn_when_they_do_not_hold():
    copies, text = Copies(1, longest=2), [4, 5, 9, 4, 5]
    copies.read(0, torch.tensor(text), 0)
    first = copies.following(0, 3)
    assert first[0] == [9, 4, 5]
    for token in range(10, 16):
        kept, text = len(text), [*text, token, 4, 5, 9, 4, 5]
        copies.read(0, torch.tensor(text), kept)
        last = copies.following(0, 3)
        assert last[0][0] == 9
    assert last[1][0] < 0.2 < first[1][0]


def test_rejection_draws_and_does_not_copy(prompt, caplog):
    drafter = DRAFTERS["pard"]
    drafter.speculation_config = pd.SpeculationConfig(4, 6, acceptance="rejection", graft=True, never_slower=False, trace=True)
    TARGET.generate(prompt, do_sample=True, max_new_tokens=20, assistant_model=drafter)
    assert drafter.last_stats.num_drafted > 0
    assert "nothing is copied" in caplog.text
