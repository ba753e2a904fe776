"""What the tests of published drafters share: their target, the expected numbers, and features and
guesses of a call.
"""

from pathlib import Path

import torch
from layouts.parts import LAYERS, D
from lossless import listen
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import DynamicCache

import hf_paradraft
from hf_paradraft.decoding.features import Features
from hf_paradraft.names import with_cache
from hf_paradraft.protocol import Observation
from hf_paradraft.protocol.drafter import KeyValues

EXPECTED = load_file(Path(__file__).parent / "drafters" / "expected" / "expected.safetensors")
TARGET = tiny_model("llama", num_hidden_layers=LAYERS)
LENGTH = 12


def features_of(drafter, length=LENGTH - 1):
    """The expected text's features, by the keys that the drafter asks for; further ones at
    random.
    """
    rows = EXPECTED["features"][:length].split(D, dim=-1)
    return {key: rows[index % 3][None] + index // 3 for index, key in enumerate(drafter.features)}


@torch.no_grad()
def block_states(drafter, ids, features):
    """The states `(B, block size, hidden)` of blocks behind whole texts `(B, n)`."""
    drafting = drafter.drafting(hf_paradraft.SpeculationConfig(), 0)
    drafting.observe(
        [
            Observation(row, 0, {key: states[index] for key, states in features.items()})
            for index, row in enumerate(ids)
        ]
    )
    drafting.inject()
    return drafter.fill(ids[:, -1], drafting.masks, drafting.cache)


@torch.no_grad()
def features_behind(drafter, target, ids, **images):
    features = Features(target, drafter.needs(target))
    cached = any(isinstance(key, KeyValues) for key in features.keys)
    cache = (
        with_cache(target, DynamicCache(config=target.config.get_text_config())) if cached else {}
    )
    with features:
        target(ids, use_cache=cached, **cache, **images)
        return {key: states[:, :-1] for key, states in features.rows.items()}


class FeaturesOfPrefixes:
    """The features of `features_behind`, which for a causal target are a longer text's first
    ones.
    """

    def __init__(self, drafter, target, **images):
        self.drafter, self.target, self.images, self.read = drafter, target, images, []

    def __call__(self, ids):
        length = ids.shape[1]
        for text, features in self.read:
            if torch.equal(text[:, :length], ids):
                return {key: states[:, : length - 1] for key, states in features.items()}
        self.read.append((ids, features_behind(self.drafter, self.target, ids, **self.images)))
        return self.read[-1][1]


def guesses_of_a_call(drafter, target, ids, answers=None, **options):
    """What the engine was given, with the prefixes that it had asked about; every other round goes
    by the answers, if any.
    """

    def by_turns(prefixes, guesses):
        if answers is None or len(heard) // len(prefixes) % 2:
            return guesses
        return [
            hf_paradraft.GuessedTokens(answer[question.ids.shape[1] :][: question.room])
            for question, answer in zip(prefixes, answers, strict=True)
        ]

    options = {
        "do_sample": False,
        "max_new_tokens": 20,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }
    with listen(drafter, by_turns) as heard:
        target.generate(ids, assistant_model=drafter, **options)
    return [(question.ids, question.room, question.guess) for question in heard]


def check_guesses(drafter, target, seen, tolerance=1e-3, **images):
    """What `guesses_of_a_call` gave is what `draft_logits` gives behind the whole prefixes; how
    many guesses that were.
    """
    checked, features = 0, FeaturesOfPrefixes(drafter, target, **images)
    # the longest first: what the target reads of a text is read once
    for ids, room, guess in sorted(seen, key=lambda one: -one[0].shape[1]):
        if not room or not len(guess.logits):
            continue
        count = 1 if guess.extend is not None else room
        with torch.no_grad():
            expected = drafter.draft_logits(ids, features(ids) or None, count)[0]
        given = guess.logits[:count]
        if guess.bias is not None:  # draft_logits goes along the most probable tokens
            token, states = ids[0, -1:], [None]
            for index in range(len(given)):
                bias, states = guess.bias(torch.tensor([index]), token, states)
                row = guess.logits[index] + bias[0]
                torch.testing.assert_close(row, expected[index], rtol=tolerance, atol=tolerance)
                best = row.argmax()
                token = (best if guess.vocabulary is None else guess.vocabulary[best])[None]
        else:
            torch.testing.assert_close(
                given, expected[: len(given)], rtol=tolerance, atol=tolerance
            )
        checked += 1
    return checked
