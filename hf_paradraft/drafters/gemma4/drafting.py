"""One call's drafting by a Gemma 4 assistant: every guessed token is a query of its own over the
target's keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor

from ...protocol import GuessedLogits, Observation, Prefix
from ..context import ContextDrafting


class Gemma4Drafting(ContextDrafting):
    """One call's drafting, in which no row sees a guessed token.

    So a tree's nodes are independent, all at the text's last position.

    Args:
        drafter: attached to its target; nothing of it changes.
    """

    def __init__(self, drafter: Any):
        super().__init__(drafter)
        network = drafter.network
        size = network.config.backbone_hidden_size
        self.nothing = torch.zeros(size, device=network.device, dtype=network.dtype)

    def observe(self, observations: list[Observation | None]) -> None:
        """Keep keys and values, and the newest state."""
        super().observe(observations)
        for row, seen in zip(self.rows, observations, strict=True):
            # a piece may be padding alone
            if seen is not None and len(seen.features.get("normed", ())):
                row.newest = seen.features["normed"][-1].to(self.nothing)

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`: one token after each row, and more by `extend`."""
        before = [self.nothing if row.newest is None else row.newest for row in self.rows]
        logits, states = self._read(newest[:, None], torch.stack(before)[:, None])
        for row, state in zip(self.rows, states[:, 0], strict=True):
            row.states = [state]
        return [GuessedLogits(guess, extend=self.extend) for guess in logits]

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens, each with the state after its parent; as `Extend`."""
        ids, before = self.laid_out(tokens, parents, max(map(len, tokens)))
        logits, states = self._read(ids, before)
        self.keep_states(tokens, states)
        return [guess[: len(new)] for guess, new in zip(logits, tokens, strict=True)]

    def _read(self, ids: LongTensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, M, V)` and states `(B, M, d_t)` after tokens `(B, M)`.

        Each token is read with the state of the token before it.
        """
        positions = torch.tensor(self.lengths, device="cpu")[:, None].expand_as(ids)
        return self.model.read(ids, before, positions, self.cache)
