"""Caches with linear-attention or state-space layers: a recurrent state cannot drop its last
tokens.

So it is copied before a draft is read; after a rejection the copy comes back, and the next forward
reads the accepted tokens again, in front of its own draft. A few more rows cost little; when too
many have piled up, one round goes without a draft.
"""

from torch import Tensor
from transformers import Cache, DynamicLayer, StaticLayer

from ..names import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

# the most tokens that a recurrent state may lack, which are read again with every draft; beyond it
# a round without a draft reads them into the state
MOST_UNREAD = 32


def is_recurrent(cache: Cache) -> bool:
    """Tell whether a layer of `cache` holds a recurrent state.

    The layer may have keys and values in addition.
    """
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


class States:
    """The recurrent states of a cache, and the last copy of them.

    Args:
        cache: the cache; its layers stay the same objects.
    """

    def __init__(self, cache: Cache):
        self.linear = [
            layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)
        ]
        self.saved: list[dict[int, Tensor | None]] = []

    def _by_layer(self) -> list[dict[int, Tensor | None]]:
        return [
            states
            for layer in self.linear
            for states in (layer.conv_states, layer.recurrent_states)
        ]

    def copy(self) -> None:
        """Copy all states."""
        self.saved = [
            {key: state if state is None else state.clone() for key, state in of.items()}
            for of in self._by_layer()
        ]

    def restore(self, rows: list[int]) -> None:
        """Restore the copied states of some rows of the batch."""
        for current, saved in zip(self._by_layer(), self.saved, strict=True):
            for key, state in current.items():
                if state is not None and len(rows) < len(state):
                    state[rows] = saved[key][rows]
                else:  # also where it has grown
                    current[key] = saved[key]


def crop(cache: Cache, count: int) -> None:
    """Drop the last `count` keys and values of all rows.

    Entries that windows have pushed out are dropped too; recurrent states stay as they are.
    """
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(-count)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.crop(layer, -count)
        elif isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -count)


def record_windows(cache: Cache) -> None:
    """Let sliding windows keep what they push out, until `crop`."""
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


def check_roll_back(cache: Cache) -> None:
    """Refuse caches whose layers cannot be put back.

    Raises:
        ValueError: the cache is static, or has read tokens already.
    """
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise ValueError(
            "Static caches with recurrent layers cannot roll back: leave cache_implementation "
            "unset."
        )
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if any(any(layer.has_previous_state.values()) for layer in linear):
        raise ValueError(
            "A recurrent state cannot be continued with a drafter: leave cache (past_key_values) "
            "unset."
        )
