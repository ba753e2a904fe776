"""A drafter's own cache: every layer keeps every token, and one for compiled forwards grows where it turns out too short."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

from ..decoding.cache import SLOTS, RaggedCache, empty_cache, static_cache, use_plain_layers
from ..decoding.compiled import compiled_on
from ..hardware import input_device


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


_continues: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def check_continues(model: PreTrainedModel) -> None:
    """Try once whether `model` reads several tokens behind a state as it reads them one after the other; not all can.

    Args:
        model: a drafter.

    Raises:
        ValueError: it does not.
    """
    if model not in _continues:
        training = model.training
        model.eval()
        try:
            together, alone = (_read_in_parts(model, sizes) for sizes in ((4, 4), (4, 1, 1, 1, 1)))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model raises that was not written for it
            _continues[model] = False
        else:
            tolerance = 1e-3 if model.dtype == torch.float32 else 0.3  # a forgotten state makes logits that have little in common
            _continues[model] = bool((together - alone).abs().max() < tolerance * together.std())
        finally:
            model.train(training)
    if not _continues[model]:
        raise ValueError(
            f"{type(model).__name__} does not read several tokens behind its recurrent state as it does one by one, so it can "
            "not draft: use another one."
        )


def _read_in_parts(model: PreTrainedModel, sizes: tuple[int, ...]) -> Tensor:
    """Logits `(1, n, V)` float32 of some tokens, read in so large parts."""
    cache = DynamicCache(config=model.config.get_text_config())
    parts = []
    for part in torch.arange(sum(sizes), device=input_device(model))[None].split(sizes, dim=1):
        ids = (part + 1) % model.config.get_text_config().vocab_size
        parts.append(model(ids, use_cache=True, past_key_values=cache, position_ids=part).logits.float())
    return torch.cat(parts, dim=1)
