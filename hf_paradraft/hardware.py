"""The hardware: its name, the number format that it is fast at, and weights laid out for it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def fast_dtype() -> torch.dtype:
    """Choose bfloat16 on a GPU or a CPU with instructions for it (AMX or AVX-512), else float32."""
    return torch.bfloat16 if torch.cuda.is_available() or _has_bfloat16() else torch.float32


def _has_bfloat16() -> bool:
    """Tell whether the CPU has instructions for bfloat16."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def input_device(model: torch.nn.Module) -> torch.device:
    """Look up the device for a model's inputs.

    It is the model's own, or the one on which an offloaded model computes.

    Args:
        model: a model of transformers, in one piece or dispatched by accelerate.
    """
    if model.device.type != "meta":
        return model.device
    parts = (getattr(part, "_hf_hook", None) for part in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in parts)
    return torch.device(next((place for place in places if place is not None), "cpu"))


def device_name(device: torch.device) -> str:
    """Name the GPU, or the CPU's instruction set and the threads torch uses on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    bfloat16 = "bf16 instructions" if _has_bfloat16() else "no bf16 instructions"
    return (
        f"CPU ({torch.backends.cpu.get_cpu_capability()}{amx}, {bfloat16}), "
        f"{torch.get_num_threads()} threads"
    )


class PackedProduct:
    """A linear layer's product with its weight packed, in the place of its `forward`.

    The weight is laid out once for a CPU's matrix products (oneDNN's), which else lay it out anew
    in every product. The layer's type stays an ordinary one.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        self.weight, self.packed = (0, 0), torch.empty(0)

    def __call__(self, states: Tensor) -> Tensor:
        weight = self.layer.weight
        # its product is a sum of rows, as they lie
        vector = states.dtype == torch.float32 and states[..., 0].numel() == 1
        if vector or torch.is_grad_enabled() or weight.dtype != self.dtype:
            return linear(states, weight, self.layer.bias)
        if self.weight != (now := (weight.data_ptr(), weight._version)):  # it was moved or changed
            self.weight, self.packed = now, torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return torch.ops.mkldnn._linear_pointwise(
            states, self.packed, self.layer.bias, "none", [], ""
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedProduct, (self.layer, self.dtype)


def pack(model: nn.Module) -> int:
    """Pack the weights of a model's ordinary linear layers, for decoding.

    Forwards of several rows are 1.2 to 1.8 times as fast then, in bf16 those of one row too
    (docs/measurements/engine.md). Logits differ by rounding, so drafted texts are those of plain
    decoding with the packed model. The weights are held twice.

    Args:
        model: a model in fp32, or in bf16 on a CPU with instructions for it; layers on a GPU,
            quantised or wrapped ones stay as they are.

    Returns:
        The number of layers that were packed.

    Raises:
        ValueError: no layer can be packed here.
    """
    dtypes = [torch.float32, *([torch.bfloat16] if _has_bfloat16() else [])]
    count = 0
    for part in model.modules():
        weight = getattr(part, "weight", None)
        ordinary = (
            type(part) is nn.Linear and type(weight) is nn.Parameter and "forward" not in vars(part)
        )
        if (
            ordinary
            and weight.device.type == "cpu"
            and weight.dtype in dtypes
            and not weight.is_inference()
        ):
            part.forward, count = PackedProduct(part, weight.dtype), count + 1
    if not count:
        raise ValueError(
            f"{type(model).__name__} has no weights that can be packed here: float32 ones, or "
            "bfloat16 ones where the CPU has instructions for it (AVX-512 or AMX), of ordinary "
            "linear layers on a CPU."
        )
    return count
