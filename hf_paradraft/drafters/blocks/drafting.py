"""One call's drafting by blocks: each round fills one block after the context features of each
row.
"""

from __future__ import annotations

from typing import Any

import torch

from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from ..context import ContextDrafting


class BlockDrafting(ContextDrafting):
    """A block after what the target has read of each row.

    Args:
        drafter: shared with other calls; nothing of it changes.
        config: how it is used.
        max_length: tokens of a row at most.
    """

    def __init__(self, drafter: Any, config: SpeculationConfig, max_length: int):
        width = config.compiled_width
        super().__init__(drafter, width, width and max_length + width + drafter.config.block_size)

    @torch.no_grad()
    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Fill a block after each row; nothing after a row whose features are not there."""
        if self.cache is None:
            return self.where_read(prefixes, None)
        self.inject()
        anchors = torch.stack([prefix.ids[0, -1] for prefix in prefixes]).to(self.drafter.device)
        states = self.drafter.fill(anchors, self.masks, self.cache, self.compiled_width > 0)
        self.cache.keep([[]] * len(prefixes), states.shape[1])
        guesses = [
            self.drafter.guess(rows, prefix.ids[0, -2:], prefix.room)
            for rows, prefix in zip(states, prefixes, strict=True)
        ]
        return self.where_read(prefixes, guesses)
