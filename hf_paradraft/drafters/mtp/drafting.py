"""One call's drafting by MTP layers: one at every step, or layer `k` at step `k`, each with a cache
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import LongTensor, Tensor

from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from ..reading.network import RowModel
from ..reading.reader import Reader


class MtpStep(RowModel):
    """A layer as it reads texts with one target.

    Args:
        drafter: an attached `MtpDrafter`.
        layer: one of its layers.
    """

    shift = 1
    extends = True

    def __init__(self, drafter: Any, layer: Any):
        self.drafter, self.layer, self.stack = drafter, layer, layer.stack
        self.vocabulary = drafter.vocabulary

    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Implement `RowModel.text`: tokens' embeddings, and the states before them, projected."""
        layer = self.layer
        both = [layer.enorm(self.drafter.embed(ids)), layer.hnorm(fused)]
        return layer.eh_proj(torch.cat(both, dim=-1))

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits `(…, V')` by the drafter's head."""
        return self.drafter.logits(states)


class StepDrafting(Reader):
    """One call's drafting by several layers, each with the states of the layer before it.

    Args:
        models: the D layers, in their order.
        config, max_length: the arguments of `Reader`.
    """

    def __init__(self, models: Sequence[RowModel], config: SpeculationConfig, max_length: int):
        super().__init__(models[0], config, max_length)
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

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens by all layers but the first; as `Extend`.

        The layer after the one that guessed a token guesses the token after it. States that the
        layers before that make of it are not used: none of its descendants needs them.
        """
        states, made = self.states_of([[-1] * len(above) for above in parents]), []
        for reader in self.followers:
            made.append(reader.extend(tokens, parents, states))
            states = reader.states_of(parents)
        logits = []
        for row, new in enumerate(tokens):
            nodes = self.followers[0].rows[row].nodes
            steps = [len(columns) - 1 for _, columns in nodes[len(nodes) - len(new) :]]
            guesses = [made[step][row][index] for index, step in enumerate(steps)]
            logits.append(torch.stack(guesses) if guesses else made[0][row])
        return logits
