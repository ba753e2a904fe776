"""Drafting over a cache of what a network makes of the target's features: they go in as they come,
and nothing else stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..decoding.cache import RaggedCache
from ..decoding.joining import bytes_of, join_caches, join_masks, row_of, select_cache, select_masks
from ..protocol import Drafting, GuessedLogits, Observation, Prefix
from .cache import compiled_method, fused_rows, make_room


class ContextDrafting(Drafting):
    """One call's cache over what the target has read of each row.

    Args:
        drafter: shared with other calls; nothing of it changes. `fuse` makes context features `(f,
            width)` of a token's, `inject` writes them into a cache from `empty_context`, and
            `masks` hides what rows do not see.
        compiled_width: tokens that a compiled round reads; 0: none is compiled.
        num_slots: of a static cache; 0: it is dynamic.
    """

    def __init__(self, drafter: Any, compiled_width: int = 0, num_slots: int = 0):
        self.drafter, self.compiled_width, self.num_slots = drafter, compiled_width, num_slots
        self.cache: RaggedCache | None = None
        self.masks: dict[str, Any] = {}
        self.begins: list[int] = []  # of each row, the first token with features
        self.waiting: list[
            list[Tensor]
        ] = []  # of each row, context features `(f, width)` that are not in the cache yet

    @torch.no_grad()
    def observe(self, observations: list[Observation | None]) -> None:
        """Make context features of what the target has read."""
        if self.cache is None:
            self.begins = [0 if seen is None else seen.begin for seen in observations]
            self.cache = RaggedCache(
                self.drafter.empty_context(self.num_slots), len(observations), 0
            )
            self.masks = self.drafter.masks(self.begins)
            self.waiting = [[] for _ in observations]
        for row, fused in fused_rows(self.drafter, observations).items():
            self.waiting[row].append(fused)

    def join(self, other: Drafting) -> bool:
        """Implement `Drafting.join`."""
        if (
            type(other) is not type(self)
            or other.drafter is not self.drafter
            or self.compiled_width
        ):
            return False
        if self.cache is None or other.cache is None:
            return False
        join_caches(self.cache, other.cache)
        for kind, mask in self.masks.items():
            join_masks(mask, other.masks[kind])
        self.begins, self.waiting = self.begins + other.begins, self.waiting + other.waiting
        return True

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`."""
        self.begins = [self.begins[row] for row in rows]
        self.waiting = [self.waiting[row] for row in rows]
        select_cache(self.cache, rows)
        for mask in self.masks.values():
            select_masks(mask, rows)

    def fork(self, row: int, read: int) -> Drafting | None:
        """Implement `Drafting.fork`."""
        if self.cache is None or self.begins[row] > read:
            return None
        forked, waiting = copy.copy(self), max(0, read - self.ends()[row])
        forked.begins = [self.begins[row]]
        forked.cache = row_of(
            self.cache, row, min(self.cache.lengths[row], read - self.begins[row])
        )
        forked.waiting = [
            [torch.cat(self.waiting[row])[:waiting]] if waiting and self.waiting[row] else []
        ]
        forked.masks = {kind: copy.copy(mask) for kind, mask in self.masks.items()}
        for mask in forked.masks.values():
            select_masks(mask, [row])
        forked.nbytes = bytes_of(forked.cache.cache)
        return forked

    def where_read(
        self, prefixes: list[Prefix], guesses: Iterable[GuessedLogits] | None
    ) -> list[GuessedLogits]:
        """Keep the guesses of rows of which all but the newest token has been read.

        Other rows get none, and no row gets any without `guesses`.
        """
        nothing = GuessedLogits(prefixes[0].ids.new_zeros((0, 1)).float())
        if guesses is None:
            return [nothing] * len(prefixes)
        return [
            guess if end == prefix.ids.shape[1] - 1 else nothing
            for guess, end, prefix in zip(guesses, self.ends(), prefixes, strict=True)
        ]

    def ends(self) -> list[int]:
        """Count each row's tokens up to the last one whose features are in the cache."""
        return [
            begin + length for begin, length in zip(self.begins, self.cache.lengths, strict=True)
        ]

    def inject(self) -> None:
        """Put what is waiting into the cache."""
        if not any(self.waiting):
            return
        nothing = next(rows[0][:0] for rows in self.waiting if rows)
        waiting = [torch.cat([nothing, *rows]) for rows in self.waiting]
        counts = [len(rows) for rows in waiting]
        compiled = self.cache.end > 0 and max(counts) <= self.compiled_width
        size = self.compiled_width if compiled else max(counts)
        context = torch.stack([pad(rows, (0, 0, 0, size - len(rows))) for rows in waiting])
        positions = (
            torch.tensor(self.ends(), device="cpu")[:, None] + torch.arange(size, device="cpu")
        ).to(context.device)
        make_room(self.cache, size)
        compiled_method(self.drafter.inject, compiled)(context, positions, self.cache.cache)
        self.cache.keep([list(range(count)) for count in counts], size)
        self.waiting = [[] for _ in counts]
