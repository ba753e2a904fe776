"""Compiled forwards over static caches: shapes stay the same from round to round, so each is compiled once."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

SLOTS = 256  # caches are this long, or a multiple: calls of different lengths share a compiled forward
_forwards: WeakKeyDictionary[PreTrainedModel, Callable] = WeakKeyDictionary()


def compiled_forward(model: PreTrainedModel) -> Callable:
    """`model.forward`, compiled; with CUDA graphs on a GPU. The same object for every call of this model."""
    if model not in _forwards:
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        _forwards[model] = torch.compile(model.forward, dynamic=False, fullgraph=True, mode=mode)
    return _forwards[model]


def static_cache(model: PreTrainedModel, num_slots: int) -> StaticCache:
    """An empty cache of at least `num_slots` slots whose layers all keep every token."""
    num_slots = -(-num_slots // SLOTS) * SLOTS
    cache = StaticCache(config=model.config, max_cache_len=num_slots)
    cache.layers = [StaticLayer(num_slots) for _ in cache.layers]
    return cache
