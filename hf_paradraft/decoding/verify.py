"""One target forward over the draft."""

import inspect
from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from .draft import Draft

PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def extend_to(length: int, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The per-token inputs of the whole call, once, so that a round only slices them.

    New tokens are seen (mask 1), stand at the next positions, and have the last token's type, or none of the multimodal ones.

    Args:
        length: tokens at most, prompt included.
        model_kwargs: the call's; tensors `(…, prompt length)` among them.
    """
    extended = {}
    for name in PER_TOKEN:
        if (known := model_kwargs.get(name)) is None:
            continue
        new = known[..., -1:].repeat(*[1] * (known.ndim - 1), length - known.shape[-1])
        if name == "attention_mask":
            new.fill_(1)
        elif name == "position_ids":
            new += torch.arange(1, new.shape[-1] + 1, device=new.device)
        elif name == "mm_token_type_ids":
            new.zero_()
        extended[name] = torch.cat([known, new], dim=-1)
    return extended


# Positions counted from the cache's length, whatever position_ids says: a tree's rows would be misplaced.
COUNT_FROM_CACHE = {"gpt_neo", "llama4", "llama4_text"}


def supports_branches(model: PreTrainedModel, per_token: dict[str, Tensor]) -> bool:
    """Whether `model` takes a mask and positions as given: SDPA or eager attention, in full, with positions by number."""
    config = model.config.get_text_config()
    return (
        config._attn_implementation in ("sdpa", "eager")
        and config.model_type not in COUNT_FROM_CACHE
        and not getattr(config, "alibi", False)
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        and "position_ids" in inspect.signature(model.forward).parameters
        and per_token.keys() <= {"attention_mask", "position_ids"}
        and all(tensor.ndim == 2 for tensor in per_token.values())
    )


def tree_inputs(draft: Draft, known: int, per_token: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Mask and positions for the last known token and the tree below it.

    Args:
        draft: N nodes.
        known: n, tokens before the draft.
        per_token: from `extend_to`: the call's own 2-D mask, or none, and its positions.
        dtype: of the additive mask.

    Returns:
        `attention_mask` `(1, 1, N + 1, n + N)`, 0 where a row may attend, and `position_ids` int64 `(1, N + 1)`.
    """
    size = len(draft) + 1
    sees = numpy.eye(size, dtype=bool)  # a row per node: itself and its ancestors
    sees[:, 0] = True
    depth = [0] * size
    for node, parent in enumerate(draft.parents, 1):
        sees[node] |= sees[parent + 1]
        depth[node] = depth[parent + 1] + 1
    device = draft.tokens.device
    mask = torch.zeros(1, 1, size, known - 1 + size, dtype=dtype, device=device)
    mask[..., known - 1 :].masked_fill_(~torch.from_numpy(sees).to(device), torch.finfo(dtype).min)
    if (padding := per_token.get("attention_mask")) is not None:
        mask[..., :known].masked_fill_(padding[:, None, None, :known].to(device) == 0, torch.finfo(dtype).min)
    given = per_token.get("position_ids")
    last = known - 1 if given is None else given[:, known - 1 : known].to(device)
    return {"attention_mask": mask, "position_ids": torch.tensor([depth], device=device) + last}


def verify(
    model: PreTrainedModel,
    prefix: LongTensor,
    draft: Draft,
    num_new: int | None,
    first: bool,
    model_kwargs: dict[str, Any],
    per_token: dict[str, Tensor],
) -> tuple[Tensor, ModelOutput]:
    """Run the target over what its cache lacks: the end of the prefix, and the draft.

    Args:
        model: the target.
        prefix: int64 `(1, n)`.
        draft: N nodes; anything but a chain needs `supports_branches`, `keeps_branches` and `num_new = 1 + N`.
        num_new: how many of the n + N ids the cache lacks; None for all.
        first: whether this is the call's first forward, which reads images and embeddings too.
        model_kwargs: the call's, with the cache.
        per_token: from `extend_to`.

    Returns:
        Logits `(N + 1, V)` in the target's dtype, on the prefix's device, and the target's whole output.
    """
    ids = torch.cat([prefix, draft.tokens[None]], dim=1)
    if draft.is_chain:
        by_token = {name: tensor[..., : ids.shape[1]] for name, tensor in per_token.items()}
    else:
        by_token = tree_inputs(draft, prefix.shape[1], per_token, model.dtype)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=num_new, is_first_iteration=first, **{**model_kwargs, **by_token}
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = len(draft) + 1
    outputs = model(**inputs, return_dict=True)
    return outputs.logits[0, -len(draft) - 1 :].to(ids.device), outputs
