"""The target's cache: what it must be, and going back to the accepted path."""

from typing import Any

import torch
from transformers import Cache, QuantizedCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from .draft import Draft


def recording_cache(model_kwargs: dict[str, Any]) -> Cache:
    """The call's cache, made able to roll back.

    Raises:
        ValueError: there is none, or it is of a kind that cannot drop its last tokens.
    """
    cache = model_kwargs.get("past_key_values")
    if not model_kwargs.get("use_cache", True) or cache is None:
        raise ValueError("Speculative decoding needs the target's key-value cache: pass use_cache=True and a model that has one.")
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        raise ValueError(
            "This target has linear-attention or state-space layers, whose state cannot go back to before a rejected draft: "
            "generate without a drafter."
        )
    if cache.is_compileable or isinstance(cache, QuantizedCache):
        raise ValueError(
            f"Speculative decoding cannot roll back a {type(cache).__name__} yet: leave cache_implementation and "
            "past_key_values unset, or pass a DynamicCache."
        )
    cache.activate_past_recording()
    return cache


def keeps_branches(cache: Cache) -> bool:
    """Whether any path of a tree can be kept: full attention in every layer. To be asked once the cache has been filled."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def keep_path(cache: Cache, draft: Draft, path: list[int]) -> None:
    """Drop the rejected nodes; the accepted ones' entries move up, nothing is computed again.

    Args:
        cache: its last entries are those of the whole draft.
        draft: as verified.
        path: accepted nodes to keep, from the root down.
    """
    depth = len(path)
    if path == list(range(depth)):
        cache.crop(-(len(draft) - depth))  # also with 0: sliding windows shrink back to their size here
        return
    for layer in cache.layers:
        begin = layer.keys.shape[-2] - len(draft)
        nodes = torch.tensor(path, device=layer.keys.device) + begin
        for states in (layer.keys, layer.values):
            states[..., begin : begin + depth, :] = states[..., nodes, :]
    cache.crop(-(len(draft) - depth))
