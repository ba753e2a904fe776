"""One call's drafting by several MTP layers: layer `k` guesses at step `k`, each with a cache of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import LongTensor, Tensor

from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from ..reading.reader import Reader
from ..reading.row_model import RowModel


class StepDrafting(Reader):
    """One call's drafting by several layers, each with the states of the layer before it.

    Args:
        models: the D layers, in their order.
        config, max_length, vocabulary: the arguments of `Reader`.
    """

    def __init__(
        self,
        models: Sequence[RowModel],
        config: SpeculationConfig,
        max_length: int,
        vocabulary: LongTensor | None = None,
    ):
        super().__init__(models[0], config, max_length, vocabulary, extends=True)
        self.followers = [Reader(model, config, max_length) for model in models[1:]]
        for reader, follower in pairwise([self, *self.followers]):
            reader.follower = follower

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the token after each row by the first layer.

        The other layers read the text, each with the states of the layer before it.
        """
        guesses = super().propose(prefixes)
        for reader in self.followers:
            reader.read(prefixes, 1)
        return guesses

    def join(self, other: Any) -> bool:
        """Implement `Drafting.join`."""
        return super().join(other) and all(
            reader.join(joining)
            for reader, joining in zip(self.followers, other.followers, strict=True)
        )

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        super().select(rows)
        for reader in self.followers:
            reader.select(rows)

    def fork(self, row: int, read: int) -> None:
        """Keep nothing for later calls.

        A layer's last states went to the next layer, which has read them.
        """

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens by all layers but the first; as `Extend`.

        The layer after the one that guessed a token guesses the token after it. States that the
        layers before that make of it are not used: none of its descendants needs them.
        """
        states = [
            [row.states[0]] * len(above) for row, above in zip(self.rows, parents, strict=True)
        ]
        made = []
        for reader in self.followers:
            made.append(reader.extend(tokens, parents, states))
            states = [
                [row.states[1 + parent] for parent in above]
                for row, above in zip(reader.rows, parents, strict=True)
            ]
        logits = []
        for row, new in enumerate(tokens):
            nodes = self.followers[0].nodes.rows[row]
            steps = [len(node.columns) - 1 for node in nodes[len(nodes) - len(new) :]]
            guesses = [made[step][row][index] for index, step in enumerate(steps)]
            logits.append(torch.stack(guesses) if guesses else made[0][row])
        return logits
