"""An adapter that is on only in noise: the first row of every text passes the model's own layers,
the others LoRA's too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

# by position, so that drafts can be repeated
NOISE = torch.randint(2**31, (4096,), generator=torch.Generator().manual_seed(0), device="cpu")


def noise_at(positions: LongTensor, vocab_size: int) -> LongTensor:
    """Look up noise tokens `(…)` for positions `(…)`, uniform over the vocabulary.

    A position always has the same token.
    """
    return NOISE.to(positions.device)[positions % len(NOISE)] % vocab_size


def _after_the_first(layer: Any) -> Callable[..., Tensor]:
    """Make the forward of a LoRA layer without the adapter in the first row of every text."""
    adapted = type(layer).forward

    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if rows.ndim != 3:
            raise ValueError(
                "This target's layers see rows without their texts, in which an UNO adapter cannot "
                "be switched on."
            )
        own, noise = rows[:, :1].contiguous(), rows[:, 1:].contiguous()
        return torch.cat(
            [layer.base_layer(own, *args, **kwargs), adapted(layer, noise, *args, **kwargs)], dim=1
        )

    return forward


def with_adapter(
    target: PreTrainedModel, config: LoraConfig, tensors: dict[str, Tensor]
) -> PreTrainedModel:
    """Copy a target with an adapter in all rows of a text but the first.

    The copy shares the target's weights, and the target stays as it is.

    Args:
        target: the model that the adapter belongs to.
        config: the adapter's config.
        tensors: the adapter's tensors, as PEFT saves them.

    Raises:
        ValueError: the adapter has no place in the target.
    """
    if any(".experts." in name for name in tensors):
        raise ValueError(
            "This UNO adapter changes experts, which see tokens without their places: such "
            "adapters are not served."
        )
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in (*target.parameters(), *target.buffers())
    }
    trained = {name for name, parameter in target.named_parameters() if parameter.requires_grad}
    network = copy.deepcopy(target, shared)
    try:
        with torch.random.fork_rng():  # a caller's seed is for the text
            adapted = get_peft_model(network, copy.deepcopy(config))
        result = set_peft_model_state_dict(adapted, tensors)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"This UNO adapter does not fit {type(target).__name__}: it was made for another "
            f"target. {error!s:.300}"
        ) from error
    finally:
        for name, parameter in target.named_parameters():  # which PEFT froze
            parameter.requires_grad_(name in trained)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"This UNO adapter does not fit {type(target).__name__}: {len(result.unexpected_keys)} "
            f"of its weights have no place there, and {len(missing)} are missing."
        )
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = _after_the_first(layer)
    return network.eval()
