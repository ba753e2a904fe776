"""Is the output plain `generate`'s? And what does a drafter say while it is drafted?"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import LongTensor


def left_padded(prompts, pad=0):
    """Prompts of different lengths side by side: ids and mask, int64 `(B, n)`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}


def assert_lossless(target, drafter, prompts, *, seed=None, plain=None, **options):
    """Assert that ids, and with a `seed` the generator's state, are those of `target.generate`
    without a drafter.

    Args:
        target, drafter: random weights in float64, or trained ones.
        prompts: int64 `(B, n)`, or lists of ids of any lengths.
        seed: of both calls.
        plain: expected ids, if they are known already.
        options: of both calls; greedy, at most 30 new tokens, unless they say otherwise.

    Returns:
        The drafted ids.
    """
    inputs = {"input_ids": prompts} if isinstance(prompts, torch.Tensor) else left_padded(prompts)
    options = {"do_sample": False, "max_new_tokens": 30, **inputs, **options}

    def run(**more):
        if seed is not None:
            torch.manual_seed(seed)
        return target.generate(**options, **more), torch.get_rng_state()

    expected, state = run() if plain is None else (plain, None)
    drafted, after = run(assistant_model=drafter)
    assert torch.equal(expected, drafted), f"plain {expected.tolist()}, drafted {drafted.tolist()}"
    assert seed is None or state is None or torch.equal(state, after), (
        "the generator stands elsewhere"
    )
    return drafted


@dataclass
class Heard:
    """One question to a drafter, about one sequence, and its answer."""

    ids: LongTensor
    room: int
    guess: object


@contextmanager
def listen(drafter, answer=None):
    """What a drafter is asked in the block, and what it guesses; `answer(prefixes, guesses)` puts
    others in their place.
    """
    heard, start = [], drafter.start_drafting

    def started(*args):
        drafting = start(*args)
        propose = drafting.propose

        def proposed(prefixes):
            guesses = propose(prefixes)
            heard.extend(
                Heard(prefix.ids.clone(), prefix.room, guess)
                for prefix, guess in zip(prefixes, guesses, strict=True)
            )
            return guesses if answer is None else answer(prefixes, guesses)

        drafting.propose = proposed
        return drafting

    drafter.start_drafting = started
    try:
        yield heard
    finally:
        del drafter.start_drafting
