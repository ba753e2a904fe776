"""One call's drafting by a Gemma 4 assistant: every guessed token is a query of its own over the
target's keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor

from ...protocol import Drafting, GuessedLogits, Observation, Prefix
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
        # of each row, the target's state of the last token that it has read, (d_t,)
        self.last: list[Tensor] = []
        # of each row, after its text and after each node, (d_t,)
        self.states: list[list[Tensor]] = []

    def observe(self, observations: list[Observation | None]) -> None:
        """Keep keys and values, and the newest state."""
        super().observe(observations)
        self.last = self.last or [self.nothing] * len(observations)
        for row, seen in enumerate(observations):
            # a piece may be padding alone
            if seen is not None and len(seen.features.get("normed", ())):
                self.last[row] = seen.features["normed"][-1].to(self.nothing)

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        joined = super().join(other)
        if joined and isinstance(other, Gemma4Drafting):
            self.last += other.last
        return joined

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        super().select(rows)
        self.last = [self.last[row] for row in rows]

    def fork(self, row: int, read: int) -> Drafting | None:
        """Implement `Drafting.fork`, without the newest state.

        That state comes with the token that the target reads again.
        """
        forked: Any = super().fork(row, read)
        if forked is not None:
            forked.last = [self.nothing]
        return forked

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`: one token after each row, and more by `extend`."""
        logits, states = self._read(newest[:, None], torch.stack(self.last)[:, None])
        self.states = [[state] for state in states[:, 0]]
        return [GuessedLogits(guess, extend=self.extend) for guess in logits]

    @torch.no_grad()
    def extend(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens, each with the state after its parent; as `Extend`."""
        size, some = max(map(len, tokens)), self.states[0][0]
        ids = torch.zeros((len(tokens), size), dtype=torch.long, device=some.device)
        before = some.new_zeros((len(tokens), size, some.shape[-1]))
        for row, (new, above) in enumerate(zip(tokens, parents, strict=True)):
            if above:
                ids[row, : len(new)] = new
                before[row, : len(new)] = torch.stack(
                    [self.states[row][parent + 1] for parent in above]
                )
        logits, states = self._read(ids, before)
        for row, new in enumerate(tokens):
            self.states[row] += list(states[row, : len(new)])
        return [guess[: len(new)] for guess, new in zip(logits, tokens, strict=True)]

    def _read(self, ids: LongTensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, M, V)` and states `(B, M, d_t)` after tokens `(B, M)`.

        Each token is read with the state of the token before it.
        """
        positions = torch.tensor(self.ends(), device="cpu")[:, None].expand_as(ids)
        return self.drafter.read(ids, before, positions, self.cache)
