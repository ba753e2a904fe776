"""Recurrent states in a cache: they cannot drop their last tokens, but a copy can be put back."""

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

MOST_UNREAD = 32  # tokens behind a state that are read again with every draft; with more they are read for good


def is_recurrent(cache: Cache) -> bool:
    """Whether a layer of `cache` holds a state instead of, or beside, keys and values."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def _state_dicts(cache: Cache) -> list[dict[int, Tensor | None]]:
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    return [states for layer in linear for states in (layer.conv_states, layer.recurrent_states)]


def copy_states(cache: Cache) -> list[list[Tensor | None]]:
    """Its layers' states as they are now; none where nothing is recurrent."""
    return [[state if state is None else state.clone() for state in states.values()] for states in _state_dicts(cache)]


def record_windows(cache: Cache) -> None:
    """Let sliding windows keep what they push out, until `put_back` or `end_windows`."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.activate_past_recording(layer)


def put_back(cache: Cache, states: list[list[Tensor | None]], count: int) -> None:
    """Forget the last `count` tokens: states from `copy_states` come back, keys and values are cropped."""
    for current, saved in zip(_state_dicts(cache), states, strict=True):
        current.update(zip(current, saved, strict=True))
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.crop(layer, -count)
        elif isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -count)


def end_windows(cache: Cache) -> None:
    """Let sliding windows drop what they pushed out."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.crop(layer, 0)
