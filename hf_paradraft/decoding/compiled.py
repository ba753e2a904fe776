"""Compiled forwards over static caches: shapes stay the same from round to round, so each is compiled once."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

SLOTS = 256  # caches are this long, or a multiple: calls of different lengths share a compiled forward
SHAPES = 64  # of all models in a process that are compiled; PyTorch's own limit of 8 is soon reached


def compiled_forward(model: PreTrainedModel) -> Callable:
    """`model.forward`, compiled; with CUDA graphs on a GPU. Beyond `SHAPES` different ones it runs uncompiled."""
    limits = torch._dynamo.config  # of this thread
    limits.recompile_limit = max(limits.recompile_limit, SHAPES)
    return partial(_compiled("reduce-overhead" if model.device.type == "cuda" else None), model)


@cache
def _compiled(mode: str | None) -> Callable:
    """One function for all models: it holds none of them."""
    return torch.compile(_forward, dynamic=False, mode=mode)


def _forward(model: PreTrainedModel, **inputs: Any) -> Any:
    return model.forward(**inputs)


def static_cache(model: PreTrainedModel, num_slots: int) -> StaticCache:
    """An empty cache of at least `num_slots` slots whose layers all keep every token."""
    num_slots = -(-num_slots // SLOTS) * SLOTS
    cache = StaticCache(config=model.config, max_cache_len=num_slots)
    cache.layers = [StaticLayer(num_slots) for _ in cache.layers]
    return cache
