"""Sequences of several calls in one batch: they join and leave between rounds, and each gets what
it would get alone.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, near_copy, tiny_model
from transformers import LogitsProcessor

import hf_paradraft
from hf_paradraft.admission import admit
from hf_paradraft.decoding.begin import begin_call
from hf_paradraft.decoding.joining import join, leave
from hf_paradraft.decoding.loop import step

TARGETS = {name: tiny_model(name) for name in ("llama", "mistral-sliding", "gpt2")}


def begun(target, drafter, ids, **options):
    """A call of `generate` as it stands before its first round, as a batch, with all that
    transformers prepares.
    """
    made = []

    def keep(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        model_kwargs.pop("synced_gpus", None)
        own = logits_processor, stopping_criteria, generation_config
        terms = admit(model, input_ids, *own, drafter)
        made.append(begin_call(model, input_ids, *own, drafter, None, model_kwargs, terms))
        return input_ids

    target.generate(ids, custom_generate=keep, **{"do_sample": False, "pad_token_id": 0, **options})
    return made[0]


def alone(target, ids, **options):
    return target.generate(ids, **{"do_sample": False, "pad_token_id": 0, **options})


class Counts(LogitsProcessor):
    """Forbids another token at each call: it has a memory of its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % 7] = -1e9
        return scores


DRAFTERS = {
    "pard": lambda target: near_copy(target, 0.05),
    "autoregressive": lambda target: hf_paradraft.AutoregressiveDrafter(near_copy(target, 0.05)),
    "parallelspec": lambda target: hf_paradraft.ParallelSpecDrafter.from_target(target, "eagle", 3),
    "n-gram": lambda target: hf_paradraft.NgramDrafter(),
}
PROMPT = st.lists(st.integers(1, EOS - 1), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(TARGETS)),
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(list(DRAFTERS)), st.lists(PROMPT, min_size=1, max_size=2),
            st.integers(1, 25), st.integers(0, 4),
            st.sampled_from([None, 7, "auto"]), st.booleans(),
        ),
        min_size=2,
        max_size=4,
    ),
)  # fmt: skip
def test_calls_that_join_and_leave_get_what_they_get_alone(name, arrivals):
    target, batch, waiting = TARGETS[name], None, []
    for kind, prompts, new, wait, size, remembers in arrivals:
        drafter = DRAFTERS[kind](target)
        drafter.speculation_config = hf_paradraft.SpeculationConfig(4, size, never_slower=False)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"attention_mask": mask, "max_new_tokens": new}
        more = [{"logits_processor": [Counts()]} if remembers else {} for _ in range(2)]
        waiting.append(
            (
                wait,
                alone(target, ids, **options, **more[0]),
                begun(target, drafter, ids, **options, **more[1]),
            )
        )
    entered = []
    for wait, plain, joining in waiting:
        entered += [(plain, call) for call in joining.calls]
        step(joining)  # reads the prompt
        if batch is None or not batch.sequences:
            batch = joining
        else:
            join(batch, joining)
        leave(batch)
        for _ in range(wait):
            if batch.sequences:
                step(batch)
                leave(batch)
    while batch.sequences:
        step(batch)
        leave(batch)
    for plain, call in entered:
        assert torch.equal(plain, call.padded(call.longest))


def test_columns_that_are_padding_for_all_are_cropped():
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    drafter.speculation_config.tree_size = 6
    ids = torch.tensor([[0] * 10 + [4, 5], list(range(1, 13))])
    ends = alone(target, ids[1:], max_new_tokens=5)[
        0, 13
    ].item()  # the long one ends soon, the other does not
    mask = torch.tensor([[0] * 10 + [1, 1], [1] * 12])
    plain = alone(target, ids, attention_mask=mask, max_new_tokens=30, eos_token_id=ends)
    batch = begun(target, drafter, ids, attention_mask=mask, max_new_tokens=30, eos_token_id=ends)
    [call] = batch.calls
    while batch.sequences:
        step(batch)
        leave(batch)
        if len(batch.sequences) == 1 and not call.sequences[0].finished:
            assert batch.verifier.cache.end == call.sequences[0].length - 1 - 10
    assert torch.equal(plain, call.padded(call.longest))


def test_batches_that_cannot_be_joined_are_refused(prompt):
    target = tiny_model()
    drafter = near_copy(target, 0.05)
    more = ({}, {}, {"cache_implementation": "static"})
    batches = [begun(target, drafter, prompt, max_new_tokens=20, **options) for options in more]
    with pytest.raises(ValueError, match="after their prompts"):
        join(batches[0], batches[1])
    for batch in batches:
        step(batch)
    with pytest.raises(ValueError, match="dynamic caches"):
        join(batches[0], batches[2])
    join(batches[0], batches[1])
    assert len(batches[0].sequences) == 2
