"""Drafting while verifying: nothing changes, nothing is left running, and the schedule is the
paper's.
"""

import threading
import time
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import assert_lossless
from scipy.stats import chisquare
from test_distributions import PROMPT, VOCAB, WARPERS, exact
from tiny import ARCHITECTURES, EOS, letters, near_copy, tiny_model, with_prompts
from transformers.generation.streamers import BaseStreamer

import hf_paradraft
from hf_paradraft.integration.look import check_reads

TARGETS = {name: tiny_model(name) for name in ARCHITECTURES}
MAKE = {
    "pard": lambda target: near_copy(target, 0.03),
    "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.03)),
    "prompted": lambda target: hf_paradraft.PromptedDrafter(
        with_prompts(near_copy(target, 0.03), 2)
    ),
    "n-grams": lambda target: hf_paradraft.NgramDrafter(),
}
DRAFTERS = {
    (kind, name): make(TARGETS[name])
    for kind, make in MAKE.items()
    for name in ARCHITECTURES
    if (kind, name)
    != ("prompted", "gemma4")  # whose layers embed ids too, which prompts have none of
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = threading.active_count(), torch.get_num_threads()
    yield
    assert (threading.active_count(), torch.get_num_threads()) == before


class Delayed(hf_paradraft.Drafter, hf_paradraft.Drafting):
    """Any drafter, in a hurry or not, as chance has it."""

    def __init__(self, drafter, seed):
        self.drafter, self.seed = drafter, seed
        self.speculation_config = drafter.speculation_config

    def start_drafting(self, target, max_length):
        drafting = self.drafter.start_drafting(target, max_length)
        generator, propose = torch.Generator().manual_seed(self.seed), drafting.propose

        def slow(prefixes):
            time.sleep(0.004 * float(torch.rand((), generator=generator)) ** 3)
            return propose(prefixes)

        drafting.propose = slow
        return drafting


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(list(DRAFTERS)),
    st.lists(st.lists(st.integers(1, EOS - 1), min_size=1, max_size=12), min_size=1, max_size=3),
    st.sampled_from([None, 7, "auto"]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_overlap_never_changes_output(which, prompts, size, window, new, lookup, sampled, seed):
    target, drafter = TARGETS[which[1]], DRAFTERS[which]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        window, size, never_slower=False, overlap=True, prompt_lookup=lookup
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
    assert_lossless(target, Delayed(drafter, seed), ids, seed=seed, **options)
    assert not any("drafter" in thread.name for thread in threading.enumerate())


class Heard(BaseStreamer):
    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ids.append("end")


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("size", [None, 7])
def test_texts_end_inside_a_window(kind, size):
    """By a stop string, an end token, a time; what is streamed is what comes out, and nothing
    behind it.
    """
    target, drafter, tokenizer = TARGETS["llama"], DRAFTERS[kind, "llama"], letters()
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        6, size, never_slower=False, overlap=True
    )
    for first in range(1, 7):
        ids = torch.tensor([[first, 2, 3]])
        options = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": 24,
            "pad_token_id": 0,
        }
        text = target.generate(ids, **options)[0, 3:]
        ends = (
            {"eos_token_id": int(text[len(text) // 2])},
            {"stop_strings": [tokenizer.decode(text[5:7])], "tokenizer": tokenizer},
        )
        for end in ends:
            plain, heard = target.generate(ids, **options, **end), Heard()
            assert_lossless(target, drafter, ids, plain=plain, **options, **end, streamer=heard)
            assert heard.ids == [*plain[0].tolist(), "end"]
        assert (
            target.generate(
                ids, **options, eos_token_id=None, max_time=0.0, assistant_model=drafter
            ).shape[1]
            < 3 + 24
        )


@pytest.mark.slow
@pytest.mark.parametrize("tree_size", [None, 6])
@pytest.mark.parametrize("kind", MAKE)
def test_rejection_is_exact(kind, tree_size):
    target, rows, calls = TARGETS["llama"], 300, 2
    torch.manual_seed(2)
    drafter = DRAFTERS[kind, "llama"]
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        3, tree_size, acceptance="rejection", never_slower=False, overlap=True
    )
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(calls):
        out = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            assistant_model=drafter,
            do_sample=True,
            eos_token_id=None,
            pad_token_id=0,
            num_return_sequences=rows,
            max_new_tokens=4,
            **WARPERS["top-k"],
        )
        counts.index_put_((out[:, 5], out[:, 6]), torch.ones(rows), accumulate=True)
    wanted = exact(WARPERS["top-k"], 1) * rows * calls
    assert (counts[wanted == 0] == 0).all()
    often, rare = wanted >= 5, (wanted < 5) & (wanted > 0)
    got, expected = counts[often].tolist(), wanted[often].tolist()
    if wanted[rare].sum() > 0:
        got.append(float(counts[rare].sum()))
        expected.append(float(wanted[rare].sum()))
    scale = sum(got) / sum(expected)
    assert chisquare(got, [scale * value for value in expected]).pvalue > 1e-3


@pytest.mark.slow
def test_the_same_seed_gives_the_same_draws(prompt):
    """Under rejection nothing follows the clock."""
    target = TARGETS["llama"]
    options = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": None}
    texts = []
    for seed in range(2):
        drafter = hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.1))
        drafter.speculation_config = hf_paradraft.SpeculationConfig(
            5, None, acceptance="rejection", never_slower=False, overlap=True
        )
        for _ in range(3):
            torch.manual_seed(7)
            texts.append(
                target.generate(prompt, **options, assistant_model=Delayed(drafter, seed))[
                    0
                ].tolist()
            )
    assert all(text == texts[0] for text in texts)


def rounds(drafter, target, prompt, new=40):
    target.generate(
        prompt, do_sample=False, max_new_tokens=new, eos_token_id=None, assistant_model=drafter
    )
    return drafter.last_stats


class Boom(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("where", ["drafter", "target"])
def test_an_error_on_either_side_ends_both(where, prompt):
    target = tiny_model()
    drafter = hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.03))
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=True
    )
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    generator = torch.Generator().manual_seed(0)
    for error in (Boom, KeyboardInterrupt) * 20:
        left = 1000

        model = target if where == "target" else drafter.model

        @wraps(model.forward)
        def fail(*args, forward=model.forward, error=error, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return forward(*args, **kwargs)

        model.forward = fail
        check_reads(target, several=False)  # once for each target as it is wrapped
        left = int(torch.randint(0, 12, (), generator=generator))
        with pytest.raises(error):
            target.generate(prompt, **options, assistant_model=drafter)
        del model.forward
        assert threading.active_count() == 1 or not any(
            "drafter" in thread.name for thread in threading.enumerate()
        )
    assert_lossless(target, drafter, prompt, **options)


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_decode_in_the_mode_that_plain_decoding_decodes_in(overlap, prompt, monkeypatch):
    target, entered = tiny_model(), []

    @contextmanager
    def optimise():
        entered.append(True)
        yield

    monkeypatch.setattr(target, "_optimize_model_for_decode", optimise, raising=False)
    drafter = near_copy(target, 0.03)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=overlap
    )
    check_reads(target, several=False)
    entered.clear()
    target.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert entered == [True]


def test_drafters_that_need_the_target_do_not_overlap(prompt):
    target = TARGETS["llama"]
    overlap = hf_paradraft.SpeculationConfig(2, overlap=True, never_slower=False)
    reader = hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 2)
    reader.speculation_config = overlap
    with pytest.raises(ValueError, match="needs this one's"):
        target.generate(prompt, assistant_model=reader, max_new_tokens=4)
    rider = hf_paradraft.PpdDrafter.from_model(with_prompts(tiny_model(), 2))
    rider.speculation_config = overlap
    with pytest.raises(ValueError, match="own forward"):
        target.generate(prompt, assistant_model=rider, max_new_tokens=4)


@pytest.mark.slow
def test_two_calls_at_once_on_one_drafter(prompt):
    target, drafter = TARGETS["llama"], near_copy(TARGETS["llama"])
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        4, None, never_slower=False, overlap=True
    )
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    plain = target.generate(prompt, **options)
    texts = []

    def call():
        texts.append(target.generate(prompt, **options, assistant_model=drafter))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3
    assert all(torch.equal(plain, text) for text in texts)


@pytest.mark.parametrize("tree_size", [None, 7, "auto"])
def test_windows_are_chains(tree_size, prompt):
    target, drafter = TARGETS["llama"], near_copy(TARGETS["llama"], 0.03)
    drafter.speculation_config = hf_paradraft.SpeculationConfig(
        5, tree_size, never_slower=False, overlap=True, trace=True
    )
    trace = rounds(drafter, target, prompt).trace
    assert any(len(record.drafted) > 1 for record in trace)
    assert all(record.parents == [*range(-1, len(record.drafted) - 1)] for record in trace)
