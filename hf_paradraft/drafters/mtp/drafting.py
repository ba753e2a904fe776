"""One call's drafting by several MTP layers: layer `k` guesses at step `k`, each with a cache of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import LongTensor, Tensor

from ...protocol import Drafting, GuessedLogits, Observation, Prefix, SpeculationConfig
from ..feature_reader import FeatureModel, FeatureReader


@dataclass
class GuessedNode:
    """A guessed token that some layers have read: those behind the one that guessed it.

    Attributes:
        depth: 0 behind the text.
        indices: among the nodes of each of these layers.
        states: `(hidden,)`, what each made of it, with which the next one reads its children.
    """

    depth: int
    indices: dict[int, int] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)


class StepDrafting(Drafting):
    """Layer `k` reads each token beside what layer `k - 1` made of the token before; the first one, what the target did.

    Args:
        models: the D layers, in their order.
        config: how they are used.
        max_length: tokens of a row at most.
    """

    def __init__(self, models: list[FeatureModel], config: SpeculationConfig, max_length: int):
        self.readers: list[FeatureReader] = []
        for model in reversed(models):
            self.readers.insert(0, FeatureReader(model, config, max_length, self.readers[0] if self.readers else None))
        self.nodes: list[list[GuessedNode]] = []

    @torch.no_grad()
    def observe(self, observations: list[Observation | None]) -> None:
        """Keep the features of what the target has read."""
        self.readers[0].observe(observations)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """What follows each row, by the first layer; nothing behind a row whose features are not there."""
        logits, *_ = [reader.read(prefixes, 1) for reader in self.readers]
        self.nodes = [[] for _ in prefixes]
        nothing = GuessedLogits(prefixes[0].ids.new_zeros((0, 1)).float())
        return [
            nothing if row is None else GuessedLogits(row[: prefix.room], extend=self.extend)
            for row, prefix in zip(logits, prefixes, strict=True)
        ]

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens; as `Extend`."""
        above = [
            [nodes[parent] if parent >= 0 else None for parent in row] for nodes, row in zip(self.nodes, parents, strict=True)
        ]
        new = [[GuessedNode(0 if parent is None else parent.depth + 1) for parent in row] for row in above]
        logits: list[list[Tensor]] = [[torch.empty(0)] * len(row) for row in new]
        for layer, reader in enumerate(self.readers[1:], 1):
            # What stands deeper has no state of the layer before: no guess behind it needs this layer.
            chosen = [[index for index, node in enumerate(row) if node.depth < layer] for row in new]
            if not any(chosen):
                continue
            lengths = [len(nodes) for nodes in reader.nodes.rows]
            before = [[self._state(row, above[row][index], layer - 1) for index in places] for row, places in enumerate(chosen)]
            indices = [
                [-1 if (parent := above[row][index]) is None else parent.indices[layer] for index in places]
                for row, places in enumerate(chosen)
            ]
            made = reader.read_nodes([row[places] for row, places in zip(tokens, chosen, strict=True)], indices, before)
            for row, places in enumerate(chosen):
                for order, index in enumerate(places):
                    node = new[row][index]
                    node.indices[layer] = lengths[row] + order
                    node.states[layer] = reader.states[row][1 + lengths[row] + order]
                    if node.depth + 1 == layer:
                        logits[row][index] = made[row][order]
        for nodes, more in zip(self.nodes, new, strict=True):
            nodes += more
        return [torch.stack(row) if row else tokens[0].new_zeros((0, 1)) for row in logits]

    def _state(self, row: int, parent: GuessedNode | None, layer: int) -> Tensor:
        """What a layer made of the token above."""
        return self.readers[layer].states[row][0] if parent is None else parent.states[layer]
