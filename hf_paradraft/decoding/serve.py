"""Which verifier serves a call."""

from typing import Any

import torch
from torch import LongTensor
from transformers import PreTrainedModel

from ..protocol import SpeculationConfig
from .cache import RaggedCache, cache_of_call, static_cache, use_plain_layers
from .features import Features
from .recurrent import RecurrentVerifier, check_continues, check_roll_back
from .states import is_recurrent
from .tree_attention import TreeAttention, attention_windows, or_sdpa
from .verify import ChainVerifier, TreeVerifier, extend_to


def make_verifier(
    model: PreTrainedModel,
    input_ids: LongTensor,
    limit: int,
    config: SpeculationConfig,
    model_kwargs: dict[str, Any],
    features: Features | None = None,
    most_rows: int | None = None,
) -> ChainVerifier | TreeVerifier:
    """The verifier that serves this call: trees and batches where model, cache and inputs allow it.

    Args:
        model: the target.
        input_ids: int64 `(B, n)`, the prompts.
        limit: tokens at most.
        config: the drafter's.
        model_kwargs: of this call, with the cache, which may be changed.
        features: what the drafter reads.
        most_rows: that a round may have beside the root's; default: the most tokens of a draft.

    Raises:
        ValueError: the cache cannot roll back, or a batch is asked for where only one row can be served.
    """
    batch_size, begin = input_ids.shape
    most_rows = max(config.max_nodes, most_rows or 0)
    windows, num_slots = attention_windows(model), limit + 2 + most_rows
    cache = cache_of_call(model_kwargs)
    per_token = extend_to(limit + 1, model_kwargs)
    if is_recurrent(cache):
        if batch_size > 1:
            raise ValueError(f"{type(model).__name__} has recurrent layers and is served one prompt at a time with a drafter.")
        check_roll_back(cache)
        check_continues(model, "past_key_values" if "past_key_values" in model_kwargs else "cache_params")
        return RecurrentVerifier(model, model_kwargs, per_token, begin, begin)
    explicit = (
        windows is not None
        and per_token.keys() <= {"attention_mask", "position_ids"}
        and all(tensor.ndim == 2 for tensor in per_token.values())
    )
    if config.compile and explicit and cache.get_seq_length() == 0:
        cache.layers = static_cache(model, num_slots).layers  # in the caller's own object, if it is one
    cache.activate_past_recording()
    explicit = explicit and use_plain_layers(cache, num_slots)
    chains = ChainVerifier(model, model_kwargs, per_token, begin, begin - int(cache.get_seq_length()))
    if not explicit:
        if batch_size > 1 or cache.is_compileable:
            raise ValueError(
                f"{type(model).__name__} with {model.config.get_text_config()._attn_implementation} attention and these inputs "
                "can be served one prompt at a time and with a dynamic cache only: call generate once per prompt, without "
                f"cache_implementation{or_sdpa(model)}."
            )
        return chains
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    positions = per_token["position_ids"][:, begin - 1] if "position_ids" in per_token else mask.long().sum(1) - 1
    attention = TreeAttention(windows, mask, positions.expand(batch_size), model.dtype)
    last = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ragged = RaggedCache(cache, batch_size, begin)
    row_counts = config.row_counts(most_rows) if cache.is_compileable else None
    return TreeVerifier(model, model_kwargs, ragged, attention, features, chains, last, row_counts)
