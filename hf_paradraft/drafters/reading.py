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

    def logits_behind(
        self, ids: LongTensor, features: dict[FeatureKey, Tensor] | None, count: int
    ) -> Tensor:
        """Compute logits `(B, count, V')` after whole texts.

        Arguments as for the function of that name.
        """
        return logits_behind(
            self, ids, features, count, self.vocabulary, self.reader.model.reads_features
        )


@torch.no_grad()
def logits_behind(
    drafting: Any,
    ids: LongTensor,
    features: dict[FeatureKey, Tensor] | None,
    count: int,
    vocabulary: LongTensor | None = None,
    reads_features: bool = True,
) -> Tensor:
    """Compute logits `(B, count, V')` after whole texts of equal length.

    The drafting has read nothing yet. Where it goes on from tokens, each guess stands after the
    most probable ones before.

    Args:
        drafting: has `extend`, if its guesses are fewer than `count`.
        ids: int64 `(B, n)`.
        features: by key, `(B, n - 1, …)`; None where none are read.
        count: K.
        vocabulary: int64 `(V',)`, the target's id of each of the drafter's; None: they are the
            same.
        reads_features: whether it wants any.

    Raises:
        ValueError: where features are read, none, or a text of one token.
    """
    if reads_features:
        if ids.shape[1] < 2 or features is None:
            raise ValueError(
                "Features belong to tokens that were read: give a text of two tokens at least, and "
                "features of all but the last."
            )
        drafting.observe(
            [
                Observation(row, 0, {key: states[index] for key, states in features.items()})
                for index, row in enumerate(ids)
            ]
        )
    logits = torch.stack(
        [guess.logits for guess in drafting.propose([Prefix(row[None], count, 0) for row in ids])]
    )
    while logits.shape[1] < count:
        token = to_target(logits[:, -1].max(-1).indices, vocabulary)
        parents = [[logits.shape[1] - 2]] * len(ids)
        logits = torch.cat(
            [logits, torch.stack(drafting.extend(list(token[:, None]), parents))], dim=1
        )
    return logits
