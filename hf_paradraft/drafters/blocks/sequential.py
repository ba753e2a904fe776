"""Block drafters with a sequential head: one forward fills a block, and each guess then knows the
token chosen before it.

DSpark (section 3.2), DFlash2 and XPress differ in what that head adds to the logits.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import LongTensor, Tensor

from ...decoding.trees import to_target
from ...protocol import GuessedLogits
from ...protocol.drafter import FeatureKey
from ...protocol.guess import Bias
from .model import DFlashDrafter


class SequentialDrafter(DFlashDrafter):
    """A block drafter whose guesses depend on each other; arguments as for `DFlashDrafter`."""

    @abstractmethod
    def bias_behind(self, text: LongTensor, states: Tensor, logits: Tensor) -> Bias | None:
        """Make what one row's block adds to its logits after known tokens; None: nothing.

        Args:
            text: int64 `(n,)`, the newest tokens, two where there are as many.
            states: `(block size, d)`, of the whole block.
            logits: `(k, V')`, of its guesses before the head.
        """

    def guess(self, states: Tensor, text: LongTensor, room: int) -> GuessedLogits:
        """Make the guess of one row's block, with the bias of the tokens before."""
        guess = super().guess(states, text, room)
        guess.bias = self.bias_behind(text.to(self.device), states, guess.logits)
        return guess

    def draft_logits(
        self,
        input_ids: LongTensor,
        features: dict[FeatureKey, Tensor] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:
        """Implement `DFlashDrafter.draft_logits`; each token after the most probable one before."""
        count = self.most_drafts if num_draft_tokens is None else num_draft_tokens
        blocks = zip(self.all_states(input_ids, features), input_ids, strict=True)
        return torch.stack(
            [self._chain(self.guess(states, ids[-2:], count), ids[-1:]) for states, ids in blocks]
        )

    @torch.no_grad()
    def _chain(self, guess: GuessedLogits, token: LongTensor) -> Tensor:
        """Compute a guess's logits `(k, V')`, each biased by the most probable token before it."""
        if guess.bias is None:
            return guess.logits
        rows, memories = [], [None]
        for depth, row in enumerate(guess.logits):
            bias, memories = guess.bias(torch.tensor([depth], device=token.device), token, memories)
            rows.append(row + bias[0].to(row))
            token = to_target(rows[-1].argmax()[None], self.vocabulary)
        return torch.stack(rows)
