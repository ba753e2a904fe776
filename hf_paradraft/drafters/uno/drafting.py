"""One call's drafting by the target itself: the newest token and noise, over keys and values that the target has written."""

from __future__ import annotations

import torch

from ...protocol import GuessedLogits, Prefix
from ..cache import guesses_of
from ..context import ContextDrafting


class UnoDrafting(ContextDrafting):
    """A row of noise for every token to be guessed but the first, behind what the target has read of each text.

    Args:
        drafter: beside its target; nothing of it changes.
    """

    @torch.no_grad()
    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row; nothing after a row whose features are not there."""
        if self.cache is None:
            return self.behind(prefixes, None)
        self.inject()
        count = max(1, *(prefix.room for prefix in prefixes))
        last = torch.stack([prefix.ids[0, -1] for prefix in prefixes])
        logits = self.drafter.read(last, count, self.masks["rows"], self.ends(), self.cache)
        self.cache.keep([[]] * len(prefixes), count)
        return self.behind(prefixes, guesses_of(logits, prefixes))
