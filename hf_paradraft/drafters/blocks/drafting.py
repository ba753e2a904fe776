"""One call's drafting by blocks: context features go into a cache as they come, and each round fills one block behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...decoding.cache import RaggedCache
from ...protocol import Drafting, GuessedLogits, Observation, Prefix, SpeculationConfig
from ..cache import compiled_method, make_room, plain_cache
from ..layers import StackMasks


class BlockDrafting(Drafting):
    """A cache over what the target has read of each row.

    Args:
        drafter: shared with other calls; nothing of it changes.
        config: how it is used.
        max_length: tokens of a row at most.
    """

    def __init__(self, drafter: Any, config: SpeculationConfig, max_length: int):
        self.drafter = drafter
        self.compiled_width = config.compiled_width  # tokens a compiled round reads; 0: none
        self.num_slots = self.compiled_width and max_length + self.compiled_width + drafter.block.block_size
        self.cache: RaggedCache | None = None
        self.masks: dict[str, StackMasks] = {}
        self.begins: list[int] = []  # of each row, the first token with features
        self.waiting: list[Tensor] = []  # of each row, context features `(f, hidden)` that are not in the cache yet

    @torch.no_grad()
    def observe(self, observations: list[Observation | None]) -> None:
        """Make context features of what the target has read."""
        if self.cache is None:
            self.begins = [0 if seen is None else seen.begin for seen in observations]
            self.cache = RaggedCache(plain_cache(self.drafter.stack, self.num_slots), len(observations), 0)
            self.masks = self.drafter.masks(self.begins)
            nothing = torch.zeros((0, self.drafter.hidden_size), dtype=self.drafter.dtype, device=self.drafter.device)
            self.waiting = [nothing] * len(observations)
        for row, seen in enumerate(observations):
            if seen is not None and seen.features:
                self.waiting[row] = torch.cat([self.waiting[row], self.drafter.fuse(seen.features)])

    @torch.no_grad()
    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Fill a block behind each row; nothing behind a row whose features are not there."""
        nothing = GuessedLogits(prefixes[0].ids.new_zeros((0, 1)).float())
        if self.cache is None:
            return [nothing] * len(prefixes)
        self._inject()
        ends = self._ends()
        anchors = torch.stack([prefix.ids[0, -1] for prefix in prefixes]).to(self.drafter.device)
        states = self.drafter.fill(anchors, self.masks, self.cache, self.compiled_width > 0)
        self.cache.keep([[]] * len(prefixes), states.shape[1])
        return [
            self.drafter.guess(rows, anchor, prefix.room) if end == prefix.ids.shape[1] - 1 else nothing
            for rows, anchor, end, prefix in zip(states, anchors, ends, prefixes, strict=True)
        ]

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        if type(other) is not BlockDrafting or other.drafter is not self.drafter or self.compiled_width:
            return False
        if self.cache is None or other.cache is None:
            return False
        self.cache.join(other.cache)
        for kind, mask in self.masks.items():
            mask.join(other.masks[kind])
        self.begins, self.waiting = self.begins + other.begins, self.waiting + other.waiting
        return True

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        self.begins, self.waiting = [self.begins[row] for row in rows], [self.waiting[row] for row in rows]
        self.cache.select(rows)
        for mask in self.masks.values():
            mask.select(rows)

    def _ends(self) -> list[int]:
        """Count each row's tokens up to the last one whose features are in the cache."""
        return [begin + length for begin, length in zip(self.begins, self.cache.lengths, strict=True)]

    def _inject(self) -> None:
        """Put what is waiting into the cache."""
        drafter, counts = self.drafter, [len(rows) for rows in self.waiting]
        if not any(counts):
            return
        compiled = self.cache.end > 0 and max(counts) <= self.compiled_width
        size = self.compiled_width if compiled else max(counts)
        context = torch.stack([pad(rows, (0, 0, 0, size - len(rows))) for rows in self.waiting])
        positions = torch.tensor(self._ends())[:, None] + torch.arange(size)
        make_room(self.cache, size)
        compiled_method(drafter.inject, compiled)(context, positions.to(drafter.device), self.cache.cache)
        self.cache.keep([list(range(count)) for count in counts], size)
        self.waiting = [rows[:0] for rows in self.waiting]
