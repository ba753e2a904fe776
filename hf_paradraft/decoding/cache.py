"""The target's cache: checks of its kind, keeping the accepted path of every row, and recurrent
states, which are put back instead.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicLayer,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..names import (
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    cache_in,
    is_foreign,
    stores_nothing,
)

# static caches made here are this long, or a multiple: calls of different lengths share a compiled
# forward
SLOTS = 256
REPLACED = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


def cache_of_call(model_kwargs: dict[str, Any]) -> Cache:
    """Look up the call's key-value cache, and refuse one that cannot drop its last tokens.

    Raises:
        ValueError: there is none, or it is of a kind that cannot drop its last tokens.
    """
    cache = cache_in(model_kwargs)
    if not model_kwargs.get("use_cache", True) or cache is None:
        raise ValueError(
            "Speculative decoding needs the target's key-value cache: pass use_cache=True and a "
            "model that has one."
        )
    code = (cache.update, DynamicLayer.update, StaticLayer.update, *map(type, cache.layers))
    if isinstance(cache, QuantizedCache) or any(map(is_foreign, code)):
        raise ValueError(
            f"Speculative decoding does not know how to roll back a {type(cache).__name__}, or its "
            "layers, as they are here: leave cache_implementation and cache (past_key_values) "
            "unset, or pass a DynamicCache or a StaticCache."
        )
    return cache


def static_cache(model: PreTrainedModel, num_slots: int) -> StaticCache:
    """Make an empty static cache of at least `num_slots` slots that keeps every token.

    All of its layers do, sliding windows included.
    """
    num_slots = -(-num_slots // SLOTS) * SLOTS
    cache = StaticCache(config=model.config, max_cache_len=num_slots)
    replace_layers(cache, partial(StaticLayer, num_slots))
    return cache


def replace_layers(cache: Cache, make: Callable[[], Any]) -> None:
    """Replace all layers of a cache that store something with new ones."""
    cache.layers = [layer if stores_nothing(layer) else make() for layer in cache.layers]


def use_plain_layers(cache: Cache, num_slots: int) -> bool:
    """Let an empty cache keep every token in every layer.

    Otherwise a rejected branch could push out entries that a window still needs.

    Args:
        cache: the call's cache; its layers are replaced if they are empty.
        num_slots: the slots that a static cache must have, drafts included.

    Returns:
        Whether all layers are plain, so that any path of a tree can be kept and rows may differ in
        length.

    Raises:
        ValueError: a static cache that has been filled is too small for the drafts.
    """
    layers = [layer for layer in cache.layers if not stores_nothing(layer)]
    if cache.get_seq_length() == 0 and all(type(layer) in REPLACED for layer in layers):
        if cache.is_compileable:
            num_slots = max(num_slots, *(layer.max_cache_len for layer in layers))
        replace_layers(
            cache, partial(StaticLayer, num_slots) if cache.is_compileable else DynamicLayer
        )
        return True
    if cache.is_compileable and any(layer.max_cache_len < num_slots for layer in layers):
        raise ValueError(
            f"This static cache holds {min(layer.max_cache_len for layer in layers)} tokens, and "
            f"with drafts this call needs {num_slots}: make it larger, or leave cache "
            "(past_key_values) unset."
        )
    return all(type(layer) in (DynamicLayer, StaticLayer) for layer in layers)


def recurrent_layers(cache: Cache) -> list[Any]:
    """List the layers of a cache that hold a recurrent state.

    They may have keys and values in addition.
    """
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def check_states(cache: Cache) -> None:
    """Refuse recurrent states that cannot be put back.

    Raises:
        ValueError: the cache is static, or its states have read tokens already.
    """
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError(
            "Static caches with recurrent layers cannot roll back: leave cache_implementation "
            "unset."
        )
    if any(any(layer.has_previous_state.values()) for layer in recurrent_layers(cache)):
        raise ValueError(
            "A recurrent state cannot be continued with a drafter: leave cache (past_key_values) "
            "unset."
        )


def record_windows(cache: Cache) -> None:
    """Let sliding windows keep what they push out, until the cache shrinks."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.activate_past_recording(layer)


def stop_recording(cache: Cache) -> None:
    """Let sliding windows and states drop old entries as they are pushed out.

    They do so by themselves where nothing is recorded.
    """
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionCacheLayerMixin):
            layer.record_past = False


class RaggedCache:
    """A cache of keys and values whose rows grow at their own pace, with its recurrent states.

    Row `r` has its tokens in the slots before `lengths[r]`; a forward writes its new entries, for
    all rows alike, from slot `end` on, the longest row's length. Afterwards `keep` moves each row's
    accepted ones down to its own end. Slots between a row's end and `end` are stale, and
    `TreeAttention` hides them.

    Layers with linear attention or a state space hold a recurrent state, which cannot drop its last
    tokens. It is copied before a draft is read; after a rejection the copy comes back, and the next
    forward reads the accepted tokens again, in front of its own draft.

    Args:
        cache: a cache, dynamic or static, holding `length` entries per row. Only plain layers can
            move entries; those of any kind can drop the last ones of a single row.
        batch_size: the number of rows.
        length: the length of all rows.
    """

    def __init__(self, cache: Cache, batch_size: int, length: int):
        self.cache, self.lengths = cache, [length] * batch_size
        self.linear = recurrent_layers(cache)
        self.saved: list[dict[int, Tensor | None]] = []  # the last copy of the states

    @property
    def end(self) -> int:
        """The slot where the next forward writes."""
        return max(self.lengths)

    @property
    def num_slots(self) -> int | None:
        """The width of a static cache, None for a dynamic one."""
        static = (layer for layer in self.cache.layers if isinstance(layer, StaticLayer))
        return next((layer.max_cache_len for layer in static), None)

    def keep(self, paths: list[list[int]], written: int) -> None:
        """Keep some of the last forward's entries, and drop the rest.

        Nothing is computed again. A row with a recurrent state keeps all of them, or none.

        Args:
            paths: for each row, the indices of its new entries in the order of its tokens.
            written: the number of new entries per row of that forward.
        """
        if self.linear:
            back = [row for row, entries in enumerate(paths) if len(entries) < written]
            self._restore_states(back)
            paths = [[] if row in back else entries for row, entries in enumerate(paths)]
        begin = self.end
        moves = [
            (row, begin + entry, length + offset)
            for row, (length, entries) in enumerate(zip(self.lengths, paths, strict=True))
            for offset, entry in enumerate(entries)
            if begin + entry != length + offset
        ]
        self.lengths = [
            length + len(entries) for length, entries in zip(self.lengths, paths, strict=True)
        ]
        index = torch.tensor(moves, device="cpu").T if moves else None
        for layer in self.layers() if moves else ():
            index = index.to(layer.keys.device)  # sent once, where all layers stand on one device
            rows, sources, targets = index
            for states in (layer.keys, layer.values):
                states[rows, :, targets] = states[rows, :, sources]
        self.shrink(begin + written)

    def forget(self, counts: list[int]) -> None:
        """Drop the last entries of each row; recurrent states stay as they are.

        Args:
            counts: the number of entries to drop, by row.
        """
        end = self.end
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        self.shrink(end)

    def shrink(self, written: int) -> None:
        """Let the cache, which ended at slot `written`, end where the longest row does.

        Entries after it are not needed, nor those that sliding windows have pushed out.
        """
        for layer in self.layers():
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.fill_(self.end)
                continue
            kind = type(layer)
            if isinstance(layer, LinearAttentionCacheLayerMixin):  # its keys and values alone
                slides = isinstance(layer, DynamicSlidingWindowLayer)
                kind = DynamicSlidingWindowLayer if slides else DynamicLayer
            kind.crop(layer, self.end - written)

    def layers(self) -> Iterator[DynamicLayer | StaticLayer]:
        """Yield the layers that hold keys and values of their own."""
        attention = (
            layer for layer in self.cache.layers if isinstance(layer, DynamicLayer | StaticLayer)
        )
        return (layer for layer in attention if layer.is_initialized)

    def copy_states(self) -> None:
        """Copy the recurrent states, if there are any."""
        self.saved = [
            {key: state if state is None else state.clone() for key, state in states.items()}
            for states in self._states()
        ]

    def _restore_states(self, rows: list[int]) -> None:
        """Restore the copied states of some rows, if any."""
        for current, saved in zip(self._states(), self.saved, strict=True) if rows else ():
            for key, state in current.items():
                if state is not None and len(rows) < len(state):
                    state[rows] = saved[key][rows]
                else:  # also where it has grown
                    current[key] = saved[key]

    def _states(self) -> list[dict[int, Tensor | None]]:
        return [
            states
            for layer in self.linear
            for states in (layer.conv_states, layer.recurrent_states)
        ]
