"""The target's draws, made before the round: the seed's own text and generator, and guesses of what
will be drawn.
"""

import threading
from functools import cache
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless, listen
from test_distributions import DRAFTERS, READERS, TARGET
from tiny import near_copy, tiny_model
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_paradraft
from hf_paradraft.decoding.sequence import Sequence
from hf_paradraft.rules import same_seed
from hf_paradraft.rules.race import Odds
from hf_paradraft.rules.same_seed import draws_by_race

WARPERS = {
    "nothing": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"top_k": 4, "temperature": 1.5},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.1},
    "typical-p": {"top_k": 0, "typical_p": 0.7},
    "epsilon": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"top_k": 0, "eta_cutoff": 0.02},
    "top-h": {"top_k": 0, "top_h": 0.5},
    "repetition": {"top_k": 0, "repetition_penalty": 1.6},
    "bigrams": {"top_k": 6, "no_repeat_ngram_size": 2},
    "normalised": {"top_k": 6, "renormalize_logits": True},
}
KINDS = {**DRAFTERS, **READERS}
drafter_of = cache(lambda name: KINDS[name]())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(list(WARPERS)),
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=9), min_size=1, max_size=4),
    st.sampled_from([None, 6, 9, "auto"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_a_seed_has_plain_generates_text(kind, warper, prompts, size, lookup, never_slower, seed):
    """With every kind, warper, tree, in batches, with copies; and the generator stands where plain
    decoding leaves it.
    """
    drafter = drafter_of(kind)
    length = 2 if isinstance(drafter, hf_paradraft.PpdDrafter) else 3
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        length, size, never_slower=never_slower, prompt_lookup=lookup
    )
    options = {"do_sample": True, "max_new_tokens": 20, **WARPERS[warper]}
    assert_lossless(TARGET, drafter, prompts, seed=seed, **options)


@pytest.mark.parametrize("size", [0, 2**20])
def test_several_samples_of_one_prompt_are_plain_generates(prompt, size, monkeypatch):
    """Sequences that are far apart have their noise drawn again."""
    monkeypatch.setattr(same_seed, "KEPT", size)
    drafter = near_copy(TARGET, 0.1)
    drafter.speculation_config.tree_size = 6
    assert_lossless(
        TARGET,
        drafter,
        prompt,
        seed=3,
        do_sample=True,
        num_return_sequences=5,
        max_new_tokens=60,
        top_k=5,
    )
    rounds = [row.num_rounds for row in drafter.last_stats.by_row]
    assert max(rounds) - min(rounds) > 2


class Draws(LogitsProcessor, StoppingCriteria):
    """Draws random numbers of its own at one step, as a processor or as a criterion, and may raise
    there.
    """

    def __init__(self, length, raises=None):
        self.length, self.raises = length, raises

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            torch.rand(3)
            if self.raises is not None:
                raise self.raises
        stops = isinstance(scores, tuple) or scores is None
        return torch.zeros(len(ids), dtype=torch.bool) if stops else scores


@pytest.mark.parametrize("how", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("raises", [None, KeyError("stop")])
def test_whatever_else_draws_leaves_the_text_plain_generates(how, raises, prompt):
    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
    drafter, results = near_copy(TARGET, 0.1), []
    for options in ({}, {"assistant_model": drafter}):
        torch.manual_seed(5)
        given_list = lists[how]([Draws(prompt.shape[1] + 7, raises)])
        try:
            text = TARGET.generate(
                prompt, do_sample=True, max_new_tokens=30, **{how: given_list}, **options
            )
        except KeyError:
            text = None
        results.append((text, torch.get_rng_state()))
    (plain, before), (drafted, after) = results
    assert (plain is None) == (raises is not None)
    assert plain is None or torch.equal(plain, drafted)
    assert torch.equal(before, after)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_drafter_draws_changes_no_text(rows, prompt):
    """The generator stands where it did before the drafter was asked."""
    drafter = near_copy(TARGET, 0.1)

    def draws(prefixes, guesses):
        torch.rand(3)
        return guesses

    options = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    with listen(drafter, draws) as heard:
        assert_lossless(TARGET, drafter, prompt.repeat(rows, 1), seed=3, **options)
    assert len(heard) > 2


def test_a_batch_that_goes_on_plainly_uses_no_noise_twice():
    """Some sequences have used what is ahead of others, behind which the generator stands."""
    sequences = [Sequence(torch.zeros(1, 9, dtype=torch.long), None, 2) for _ in range(2)]
    p = torch.full((1, 32), 1 / 32)
    rule = same_seed.SameSeed()
    rule.begin(SimpleNamespace(sequences=sequences, begin=2), 32, None)
    for _ in range(3):
        rule.draw(0, p)
        sequences[0].length += 1
    torch.rand(3)  # as a processor might
    last = rule.states[-1]
    rule.draw(1, p)
    rule.end()
    after = torch.get_rng_state()
    torch.set_rng_state(last)
    torch.multinomial(p, 1)
    assert torch.equal(after, torch.get_rng_state())


def test_a_device_that_draws_otherwise_has_plain_generates_text(prompt, monkeypatch):
    """Noise that is not the target's would only mislead the drafter."""
    assert draws_by_race(torch.device("cpu"))
    monkeypatch.setattr(same_seed, "draws_by_race", lambda device: False)
    assert_lossless(TARGET, near_copy(TARGET, 0.1), prompt, seed=2, do_sample=True)


@pytest.mark.parametrize("tree_size", [None, 8])
def test_a_drafter_that_agrees_guesses_what_is_drawn(tree_size, prompt):
    """Plain candidates of a flat distribution hardly ever win; with the noise known, an equal
    model's nearly always do.
    """
    target = tiny_model(seed=0, dtype=torch.float64)
    drafter = hf_paradraft.AutoregressiveDrafter(target)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(4, tree_size, never_slower=False)
    options = {
        "do_sample": True,
        "top_k": 0,
        "temperature": 3.0,
        "eos_token_id": None,
        "max_new_tokens": 120,
    }
    rates = []
    for knows in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not knows:
                patch.setattr(same_seed, "draws_by_race", lambda device: False)
            for seed in (0, 1):
                assert_lossless(target, drafter, prompt, seed=seed, **options)
            rates.append(drafter.last_stats.acceptance_by_position[0])
    assert rates[0] > 0.85
    assert rates[1] < rates[0] - 0.15


def test_calls_of_two_threads_share_no_noise(prompt):
    """Each would take back what the other draws, and equal prompts would have equal texts."""
    texts, both = {}, threading.Barrier(2)

    class Waits(LogitsProcessor):
        def __call__(self, ids, scores):
            if ids.shape[1] == prompt.shape[1] + 1:
                both.wait(30)
            return scores

    def call(name):
        drafter = near_copy(TARGET, 0.1)
        options = {
            "do_sample": True,
            "temperature": 3.0,
            "top_k": 0,
            "eos_token_id": None,
            "max_new_tokens": 40,
        }
        texts[name] = TARGET.generate(
            prompt,
            assistant_model=drafter,
            logits_processor=LogitsProcessorList([Waits()]),
            **options,
        )

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (texts["a"] == texts["b"])[0, prompt.shape[1] + 1 :].float().mean() < 0.6


@pytest.mark.parametrize(
    ("scale", "sharp", "alpha", "noisy"),
    [
        (0.0, 1.0, (0.6, 9.0), None),  # the drafter is right: both count alike
        (
            1.0,
            1e9,
            None,
            (0.0, 0.25),
            # the target is sure, and the drafter's probabilities are the chances: noise says
            # nothing
        ),
    ],
)
def test_odds_learn_how_much_the_noise_decides(scale, sharp, alpha, noisy):
    """Of races that were really run: `q` is the target's distribution, off by Gumbel noise of some
    scale, made sharper.
    """
    generator, odds = numpy.random.default_rng(0), Odds()
    for _ in range(200):  # rounds of three tokens
        q = 1.5 * generator.normal(size=(3, 16))
        q -= numpy.log(numpy.exp(q).sum(1, keepdims=True))
        noise = numpy.log(generator.exponential(size=(3, 16)))
        p = sharp * (q + scale * generator.gumbel(size=(3, 16)))
        unsure = -q.max(1, keepdims=True)
        odds.learn(
            numpy.stack([q, unsure * q, -noise, -unsure * noise], -1),
            (p - noise).argmax(1).tolist(),
        )
    q = torch.tensor([[-0.5, -1.5]])
    of_q = float(odds(q, torch.zeros(1, 2))[0, 0] - odds(q, torch.zeros(1, 2))[0, 1])
    of_noise = float(odds(q, torch.zeros(1, 2))[0, 1] - odds(q, torch.tensor([[0.0, 1.0]]))[0, 1])
    if alpha is not None:
        assert alpha[0] < of_q < alpha[1]
        assert 0.85 < of_noise / of_q < 1.15
    else:
        assert noisy[0] <= of_noise / of_q < noisy[1]


def test_a_seeds_text_is_its_own_under_another_default_dtype():
    """torch's default is bf16 while such models are loaded; plain decoding draws in float32
    whatever it is.
    """
    target = tiny_model(vocab_size=2000, dtype=torch.float32, eos_token_id=None)
    drafter = near_copy(target)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for seed in (3, 4):
            assert_lossless(
                target,
                drafter,
                torch.tensor([[1, 2, 3, 4, 5, 6]]),
                seed=seed,
                do_sample=True,
                temperature=3.0,
            )
    finally:
        torch.set_default_dtype(torch.float32)
