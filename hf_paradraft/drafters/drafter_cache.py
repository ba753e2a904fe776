"""A drafter's own cache: every layer keeps every token, and one for compiled forwards grows where it turns out too short."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from ..decoding.cache import SLOTS, RaggedCache, empty_cache, static_cache, use_plain_layers
from ..decoding.compiled import compiled_on


def plain_cache(model: PreTrainedModel, num_slots: int = 0) -> Cache:
    """An empty cache for a drafter whose layers all keep every token; a static one where `num_slots` are asked for."""
    if num_slots:
        return static_cache(model, num_slots)
    cache = empty_cache(model)
    use_plain_layers(cache, 0)
    return cache


def make_room(cache: RaggedCache, count: int) -> None:
    """Let a static cache hold `count` entries behind the longest row's end; a longer one takes its place if it has to."""
    if cache.num_slots is None or cache.end + count <= (known := cache.num_slots):
        return
    num_slots = -(-(cache.end + count) // SLOTS) * SLOTS
    for index, layer in enumerate(cache.cache.layers):
        cache.cache.layers[index] = longer = StaticLayer(num_slots)
        if layer.is_initialized:
            longer.lazy_initialization(layer.keys, layer.values)
            longer.keys[:, :, :known], longer.values[:, :, :known] = layer.keys, layer.values
            longer.cumulative_length.copy_(layer.cumulative_length)


def compiled_method(method: Any) -> Any:
    """A drafter's method, compiled as the target's forward is; its first argument is a tensor, and what it gives is copied."""

    def forward(*inputs: Any) -> Any:
        outputs = compiled_on(inputs[0].device.type, method.__func__)(method.__self__, *inputs)
        return tree_map_only(Tensor, Tensor.clone, outputs)

    return forward
