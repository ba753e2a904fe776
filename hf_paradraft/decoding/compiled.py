"""Compiled forwards, for static caches: shapes stay the same from round to round, so each is
compiled once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..protocol.drafter import FeatureKey
from .features import Features

SHAPES = 64  # compiled for all models of a process; PyTorch's own limit of 8 is soon reached


def compiled_forward(model: PreTrainedModel, features: Features) -> Callable:
    """Compile `model.forward`, with CUDA graphs on a GPU.

    Beyond `SHAPES` different shapes it runs uncompiled.

    Args:
        model: any model.
        features: an entered collector; its states are outputs of the compiled forward, and are
            copied, since the next one writes over them.
    """
    run = compiled_on(model.device.type, _forward)

    def forward(**inputs: Any) -> Any:
        outputs, rows = run(model, features, **inputs)
        features.rows = {key: states.clone() for key, states in rows.items()}
        return outputs

    return forward


def compiled_on(device: str, forward: Callable) -> Callable:
    """Compile a function for a kind of device, with CUDA graphs if that is `cuda`."""
    limits = torch._dynamo.config  # of this thread
    limits.recompile_limit = max(limits.recompile_limit, SHAPES)
    return _compiled(forward, "reduce-overhead" if device == "cuda" else None)


@cache
def _compiled(forward: Callable, mode: str | None) -> Callable:
    """Compile a function once for all models; the compiled function holds none of them."""
    return torch.compile(forward, dynamic=False, mode=mode)


def _forward(
    model: PreTrainedModel, features: Features, **inputs: Any
) -> tuple[Any, dict[FeatureKey, Tensor]]:
    outputs = model.forward(**inputs)
    return outputs, {key: features.rows[key] for key in features.keys}
