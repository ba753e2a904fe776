"""A network that reads texts token by token, as a `Reader` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedModel

from ...protocol.drafter import FeatureKey
from ..layers import run


class RowModel(ABC):
    """A network that reads texts token by token, as a `Reader` runs it.

    Attributes:
        stack: the transformer.
        shift: places of a row before its token: 0 where the text's first token is read,
            with nothing before it; 1 where rows begin with the second one.
        reads_features: whether it needs any; if not, a guessed token that became text has been read
            for good.
        context: tokens that it has positions for, of which it reads the newer half where a text is
            longer; None: no end is known.
    """

    stack: PreTrainedModel
    shift: int = 0
    reads_features: bool = True
    context: int | None = None

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Fuse tokens' features to `(f, F)`; by default the normed last state."""
        return features["normed"].to(self.stack.device, self.stack.dtype)

    @abstractmethod
    def text(self, ids: LongTensor, fused: Tensor) -> Tensor:
        """Make inputs `(B, M, hidden)` of tokens `(B, M)`, or ids `(B, M)`.

        `fused`, `(B, M, F)`, holds the features of the tokens before.
        """

    def masks(self, fused: Tensor, count: int) -> Tensor:
        """Make inputs of `count` masks after a text, or of all masks that the model has.

        The text's last row had `fused`, `(B, F)`. The inputs are as those of `text`.
        """
        raise NotImplementedError(f"{type(self).__name__} guesses one token at a time.")

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits `(…, V')` of normed states."""
        raise NotImplementedError(
            f"{type(self).__name__} has no logits(states), and no forward_rows that does without."
        )

    def run(
        self,
        inputs: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        positions: LongTensor,
        cache: Cache,
    ) -> tuple[Tensor, Tensor]:
        """Compute the head's input and the next rows' features; the cache grows by M.

        Both are `(B, M, hidden)`; by default the layers' normed output.
        """
        states = run(self.stack, inputs, mask, positions, cache)
        return states, states

    def forward_rows(
        self,
        inputs: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        positions: LongTensor,
        cache: Cache,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, count, V')` of the last `count` rows, and states for nodes.

        The states are `(B, m, hidden)`, of these rows or more.
        """
        normed, fed = self.run(inputs, mask, positions, cache)
        return self.logits(normed[:, -count:]), fed

    def nothing(self, size: int) -> Tensor:
        """Make the features before the first token: zeros `(size, F)`.

        F is 0 if no features are read.
        """
        width = self.stack.config.hidden_size if self.reads_features else 0
        return torch.zeros((size, width), device=self.stack.device, dtype=self.stack.dtype)
