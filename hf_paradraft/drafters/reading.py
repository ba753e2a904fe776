"""One call's drafting by a reader: what is new of each text in every round, and guesses after
it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import LongTensor, Tensor

from ..decoding.joining import bytes_of
from ..decoding.trees import to_target
from ..protocol import Drafting, GuessedLogits, Observation, Prefix, SpeculationConfig
from ..protocol.drafter import FeatureKey
from .cache import guesses_of
from .reader import RowModel


class ReadingDrafting(Drafting):
    """One call's drafting by one reader.

    The reader's rows join and leave with the calls whose texts they hold.

    Args:
        model: shared with other calls; nothing of it changes.
        config: how it is used.
        max_length: tokens of a row at most.
        vocabulary: int64 `(V',)`, the target's id of each of the model's; None: they are the same.
        extends: whether it goes on from tokens that the engine chose, instead of reading masks.
    """

    def __init__(
        self,
        model: RowModel,
        config: SpeculationConfig,
        max_length: int,
        vocabulary: LongTensor | None = None,
        extends: bool = False,
    ):
        self.vocabulary, self.extends = vocabulary, extends
        self.reader = model.reader(config, max_length)

    def check_texts(self, count: int) -> None:
        """Implement `Drafting.check_texts`."""
        self.reader.check_texts(count)

    @torch.no_grad()
    def observe(self, observations: list[Observation | None]) -> None:
        """Keep the features of what the target has read, where they are read."""
        if self.reader.model.reads_features:
            self.reader.observe(observations)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row; none after a row without features."""
        most = (
            self.reader.compiled_width - 1
            if self.reader.compiled_width
            else max(prefix.room for prefix in prefixes)
        )
        logits = self.reader.read(prefixes, 1 if self.extends else most)
        extend = self.extend if self.extends else None
        return guesses_of(logits, prefixes, vocabulary=self.vocabulary, extend=extend)

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        return type(other) is type(self) and self.reader.join(other.reader)

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        self.reader.select(rows)

    def fork(self, row: int, read: int) -> Drafting | None:
        """Implement `Drafting.fork`."""
        reader = self.reader.fork(row, read)
        if reader is None:
            return None
        forked = copy.copy(self)
        forked.reader, forked.nbytes = reader, bytes_of(reader.cache.cache)
        return forked

    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens; as `Extend`."""
        return self.reader.read_nodes(tokens, parents)


@torch.no_grad()
def logits_behind(
    drafting: Drafting, ids: LongTensor, features: dict[FeatureKey, Tensor] | None, count: int
) -> Tensor:
    """Compute logits `(B, count, V')` after whole texts of equal length.

    A guess that depends on the tokens before it stands after the most probable ones.

    Args:
        drafting: gives `GuessedLogits`, and has read nothing yet.
        ids: int64 `(B, n)`.
        features: by key, `(B, n - 1, …)`; None where none are read.
        count: K.

    Raises:
        ValueError: where features are read, none, or a text of one token.
    """
    if features:
        drafting.observe(
            [
                Observation(row, 0, {key: states[index] for key, states in features.items()})
                for index, row in enumerate(ids)
            ]
        )
    guesses: Any = drafting.propose([Prefix(row[None], count, 0) for row in ids])
    first = guesses[0]
    if not len(first.logits):
        raise ValueError(
            "Guesses are made from the target's hidden states: pass features, by key, of all "
            "tokens but the last, of a text of two tokens at least."
        )
    logits = torch.stack(
        [_most_probable(guess, row[-1:]) for guess, row in zip(guesses, ids, strict=True)]
    )
    while first.extend is not None and logits.shape[1] < count:
        token = to_target(logits[:, -1].max(-1).indices, first.vocabulary)
        parents = [[logits.shape[1] - 2]] * len(ids)
        logits = torch.cat(
            [logits, torch.stack(first.extend(list(token[:, None]), parents))], dim=1
        )
    return logits


def _most_probable(guess: GuessedLogits, token: LongTensor) -> Tensor:
    """Compute a guess's logits `(k, V')`, each biased by the most probable token before it.

    `token`, int64 `(1,)`, is the text's last one.
    """
    if guess.bias is None:
        return guess.logits
    rows, memories = [], [None]
    for depth, row in enumerate(guess.logits):
        bias, memories = guess.bias(torch.tensor([depth], device=token.device), token, memories)
        rows.append(row + bias[0].to(row))
        token = to_target(rows[-1].argmax()[None], guess.vocabulary)
    return torch.stack(rows)
