"""One target forward over the draft."""

from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

# Inputs with one entry per token, and what new tokens get.
CONTINUED = {"attention_mask": "one", "position_ids": "next", "token_type_ids": "last", "mm_token_type_ids": "zero"}


def extend_to(length: int, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The per-token inputs of the whole call, once, so that a round only slices them.

    Args:
        length: tokens at most, prompt included.
        model_kwargs: the call's; tensors `(…, prompt length)` among them.
    """
    extended = {}
    for name, fill in CONTINUED.items():
        known = model_kwargs.get(name)
        if known is None:
            continue
        shape = (*known.shape[:-1], length - known.shape[-1])
        last = known[..., -1:].expand(shape)
        new = {
            "one": lambda known=known, shape=shape: known.new_ones(shape),
            "zero": lambda known=known, shape=shape: known.new_zeros(shape),
            "last": lambda last=last: last,
            "next": lambda last=last, shape=shape: last + torch.arange(1, shape[-1] + 1, device=last.device),
        }[fill]()
        extended[name] = torch.cat([known, new.to(known.dtype)], dim=-1)
    return extended


def verify(
    model: PreTrainedModel,
    ids: LongTensor,
    num_new: int | None,
    num_drafted: int,
    model_kwargs: dict[str, Any],
    per_token: dict[str, Tensor],
) -> tuple[Tensor, ModelOutput]:
    """Run the target over what its cache lacks.

    Args:
        model: the target.
        ids: int64 `(1, n + N)`, the prefix and then the draft.
        num_new: how many of the last ids the cache lacks; None in the first round of a call whose prompt has not been read.
        num_drafted: `N`.
        model_kwargs: the call's, with the cache.
        per_token: from `extend_to`.

    Returns:
        Logits `(N + 1, V)` in the target's dtype, on the device of `ids`, and the target's whole output.
    """
    kwargs = {**model_kwargs, **{name: tensor[..., : ids.shape[1]] for name, tensor in per_token.items()}}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=num_new, is_first_iteration=num_new is None, **kwargs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = num_drafted + 1
    outputs = model(**inputs, return_dict=True)
    return outputs.logits[0, -num_drafted - 1 :].to(ids.device), outputs
