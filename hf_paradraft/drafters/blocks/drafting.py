"""One call's drafting by blocks: each round fills one block after the context features of each
row.
"""

from __future__ import annotations

from typing import Any

from torch import LongTensor

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

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Implement `ContextDrafting.guesses`, by a block after each row."""
        compiled = self.compiled_width > 0
        states = self.model.fill(newest, self.masks, self.cache, compiled)
        self.cache.keep([[]] * len(prefixes), states.shape[1])
        return [
            self.model.guess(rows, prefix.ids[0, -2:], prefix.room)
            for rows, prefix in zip(states, prefixes, strict=True)
        ]
