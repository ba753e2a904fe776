"""One call's drafting by several MTP layers: layer `k` guesses at step `k`, each with a cache of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import LongTensor, Tensor

from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from ..reading.reader import Reader
from ..reading.row_model import RowModel


@dataclass
class GuessedNode:
    """A node that some layers have read: a guessed token, or the text's last one.

    A guessed token has been read by layers after the one that guessed it, the text's last one by
    all.

    Attributes:
        depth: 0 after the text, -1 for its last token.
        indices: among the nodes of each of these layers, -1 for the text's last token.
    """

    depth: int
    indices: dict[int, int] = field(default_factory=dict)


class StepDrafting(Reader):
    """One call's drafting by several layers, each with the states of the layer before it.

    Args:
        models: the D layers, in their order.
        config, max_length, vocabulary: as for `Reader`.
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
        self.guessed: list[list[GuessedNode]] = []  # of each row

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the token after each row by the first layer.

        The other layers read the text, each with the states of the layer before it.
        """
        guesses = super().propose(prefixes)
        for reader in self.followers:
            reader.read(prefixes, 1)
        layers = range(1 + len(self.followers))
        self.guessed = [[GuessedNode(-1, dict.fromkeys(layers, -1))] for _ in prefixes]
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
        """Read guessed tokens; as `Extend`."""
        above = [
            [nodes[1 + parent] for parent in row]
            for nodes, row in zip(self.guessed, parents, strict=True)
        ]
        new = [[GuessedNode(parent.depth + 1) for parent in row] for row in above]
        logits: list[list[Tensor]] = [[torch.empty(0, device="cpu")] * len(row) for row in new]
        for layer, (before, reader) in enumerate(pairwise([self, *self.followers]), 1):
            # What stands deeper has no state of the layer before: no guess after it needs this
            # layer.
            chosen = [
                [index for index, node in enumerate(row) if node.depth < layer] for row in new
            ]
            if not any(chosen):
                continue
            states = [row.states for row in before.rows]
            lengths = [len(reader.nodes.rows[row]) for row in range(len(tokens))]
            parent_nodes = [
                [above[row][index] for index in places] for row, places in enumerate(chosen)
            ]
            made = reader.extend(
                [row[places] for row, places in zip(tokens, chosen, strict=True)],
                [[parent.indices[layer] for parent in row] for row in parent_nodes],
                [
                    [states[row][1 + parent.indices[layer - 1]] for parent in nodes]
                    for row, nodes in enumerate(parent_nodes)
                ],
            )
            for row, places in enumerate(chosen):
                for order, index in enumerate(places):
                    node = new[row][index]
                    node.indices[layer] = lengths[row] + order
                    if node.depth + 1 == layer:
                        logits[row][index] = made[row][order]
        for nodes, more in zip(self.guessed, new, strict=True):
            nodes += more
        return [torch.stack(row) if row else tokens[0].new_zeros((0, 1)) for row in logits]
