"""Drafting over a cache of keys and values made of the target's features: they go in as they come,
and nothing else stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel

from ...decoding.cache import RaggedCache
from ...notes import last_target, pair, remember_target
from ...protocol import GuessedLogits, Prefix
from ...protocol.drafter import FeatureKey, KeyValues
from ..drafter import SavedDrafter
from .network import compiled_method, make_room, side_by_side
from .ragged import RaggedDrafting, Row, no_guess


class ContextDrafting(RaggedDrafting):
    """One call's cache over the tokens that the target has read of each row.

    Args:
        model: a drafter. `inject` writes fused features into a cache from `empty_context`, and
            `masks` makes the masks of its rows.
        compiled_width, num_slots: as for `RaggedDrafting`.
    """

    def begin(self, begins: list[int]) -> None:
        """Implement `RaggedDrafting.begin`."""
        self.rows = [Row(begin) for begin in begins]
        self.cache = RaggedCache(self.model.empty_context(self.num_slots), len(begins), 0)
        self.masks = self.model.masks(begins)

    @torch.no_grad()
    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row of which all but the newest token has been read.

        Other rows get no guess.
        """
        if self.cache is not None:
            self.inject()
        if self.cache is None or not self.cache.end:
            return [no_guess(prefix) for prefix in prefixes]
        newest = torch.stack([prefix.ids[0, -1] for prefix in prefixes])
        guesses = self.guesses(newest, prefixes)
        return [
            guess if end == prefix.ids.shape[1] - 1 else no_guess(prefix)
            for guess, end, prefix in zip(guesses, self.lengths, prefixes, strict=True)
        ]

    def guesses(self, newest: LongTensor, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row, over the cache.

        Args:
            newest: int64 `(B,)`, the rows' newest tokens.
            prefixes: those of the rows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no guesses(newest, prefixes).")

    def inject(self) -> None:
        """Put the waiting features into the cache."""
        waiting = [row.waiting for row in self.rows if row.waiting is not None]
        if not any(map(len, waiting)):
            return
        nothing = waiting[0][:0]
        waiting = [nothing if row.waiting is None else row.waiting for row in self.rows]
        counts = [len(rows) for rows in waiting]
        compiled = self.cache.end > 0 and max(counts) <= self.compiled_width
        size = self.compiled_width if compiled else max(counts)
        context = torch.stack([pad(rows, (0, 0, 0, size - len(rows))) for rows in waiting])
        begins = torch.tensor(self.lengths, device="cpu")[:, None]
        positions = (begins + torch.arange(size, device="cpu")).to(context.device)
        make_room(self.cache, size)
        compiled_method(self.model.inject, compiled)(context, positions, self.cache.cache)
        self.cache.keep([list(range(count)) for count in counts], size)
        for row in self.rows:
            row.waiting = None


class KeyValueDrafter(SavedDrafter):
    """A drafter that reads keys and values of the target's own layers: Gemma 4's assistants, UNO.

    Attributes:
        drafts_by: begins a call with a view of one target.
        network: the model that guesses; None: it needs a target first.
        shapes: heads, and numbers of a key and of a value, of each layer that is read.
    """

    drafts_by: ClassVar[type[ContextDrafting]]
    network: PreTrainedModel = None
    shapes: Mapping[Any, tuple[int, int, int]]

    def attach(self, target: PreTrainedModel) -> None:
        """Refuse options that hide the target's cache, and note the target.

        Raises:
            ValueError: the target's forward is to be compiled.
        """
        if self.speculation_config.compile:
            raise ValueError(
                f"A {self.title} reads the target's cache, which a compiled forward does not show: "
                "leave compile off."
            )
        remember_target(self, target)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> ContextDrafting:
        """Begin a `generate` call; its state is its own."""
        return self.drafts_by(pair(self, target))

    def draft_logits(
        self,
        input_ids: LongTensor,
        features: dict[FeatureKey, Tensor] | None = None,
        num_draft_tokens: int | None = None,
    ) -> Tensor:
        """Compute logits `(B, K, V)`, with the target that it was attached to last.

        Arguments as for `FeatureDrafter.draft_logits`.

        Raises:
            ValueError: it is attached to no target.
        """
        count = num_draft_tokens or self.speculation_config.num_draft_tokens
        drafting = self.start_drafting(last_target(self), 0)
        return drafting.logits_after_texts(input_ids, features, count)

    def empty_context(self, num_slots: int) -> Cache:
        """Make a cache for the layers that are read."""
        cache = DynamicCache()
        cache.layers = [DynamicLayer() for _ in self.shapes]
        return cache

    def fuse(self, features: dict[FeatureKey, Tensor]) -> Tensor:
        """Put keys and values of all layers side by side, `(f, width)`."""
        keys = [key for key in features if isinstance(key, KeyValues)]
        return side_by_side(features, keys, self.network)

    def inject(self, context: Tensor, positions: LongTensor, cache: Cache) -> None:
        """Write them into the cache; positions are in the keys already."""
        widths = [heads * size for heads, *both in self.shapes.values() for size in both]
        parts = iter(context.split(widths, dim=-1))
        for index, (heads, *_) in enumerate(self.shapes.values()):
            keys, values = (
                next(parts).unflatten(-1, (heads, -1)).transpose(1, 2) for _ in range(2)
            )
            cache.update(keys, values, index)
