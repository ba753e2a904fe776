"""Targets and drafters with linear-attention or state-space layers: a recurrent state cannot drop its last tokens.

So it is copied before a draft is read; after a rejection the copy comes back, and the next forward reads the accepted tokens
again, in front of its own draft. A few more rows cost little; when too many have piled up, one round goes without a draft.
"""

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin, StaticLayer

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


def stop_recording(cache: Cache) -> None:
    """Let sliding windows and states drop what they push out as it comes, as they do by themselves."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionCacheLayerMixin):
            layer.record_past = False


def check_roll_back(cache: Cache) -> None:
    """Refuse caches whose layers cannot be put back.

    Raises:
        ValueError: a static one, or one that has read something already.
    """
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError("Static caches beside recurrent layers cannot roll back: leave cache_implementation unset.")
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if any(any(layer.has_previous_state.values()) for layer in linear):
        raise ValueError("A recurrent state cannot be continued with a drafter: leave past_key_values unset.")
