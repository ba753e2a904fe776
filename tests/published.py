"""What the tests of published drafters share: their target, the expected numbers, and features and guesses of a call."""

from pathlib import Path

import torch
from layouts import LAYERS, D
from safetensors.torch import load_file
from tiny import tiny_model

from hf_paradraft.decoding.features import Features

EXPECTED = load_file(Path(__file__).parent / "drafters" / "expected" / "expected.safetensors")
TARGET = tiny_model("llama", num_hidden_layers=LAYERS)
LENGTH = 12


def features_of(drafter, length=LENGTH - 1):
    """The expected text's features, by the keys that the drafter asks for; further ones at random."""
    rows = EXPECTED["features"][:length].split(D, dim=-1)
    return {key: rows[place % 3][None] + place // 3 for place, key in enumerate(drafter.features)}


@torch.no_grad()
def features_behind(drafter, target, ids):
    features = Features(target, drafter.needs(target))
    with features:
        target(ids, use_cache=False)
        return {key: states[:, :-1] for key, states in features.rows.items()}


def guesses_of_a_call(drafter, target, ids, **options):
    """What the engine was given, with the prefixes that it had asked about."""
    seen, start = [], drafter.start_drafting

    def watched(*args):
        drafting = start(*args)
        propose = drafting.propose

        def both(prefixes):
            guesses = propose(prefixes)
            seen.extend((prefix.ids.clone(), prefix.room, guess) for prefix, guess in zip(prefixes, guesses, strict=True))
            return guesses

        drafting.propose = both
        return drafting

    drafter.start_drafting = watched
    try:
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, **options}
        target.generate(ids, assistant_model=drafter, **options)
    finally:
        del drafter.start_drafting
    return seen
