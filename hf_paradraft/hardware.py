"""The hardware: its name, and the number format that it is fast at."""

import torch


def fast_dtype() -> torch.dtype:
    """Choose bfloat16 on a GPU or a CPU with instructions for it (AMX or AVX-512), else float32."""
    if (
        torch.cuda.is_available()
        or torch.cpu._is_amx_tile_supported()
        or torch.cpu._is_avx512_bf16_supported()
    ):
        return torch.bfloat16
    return torch.float32


def input_device(model: torch.nn.Module) -> torch.device:
    """Look up the device for a model's inputs.

    It is the model's own, or the one on which an offloaded model computes.

    Args:
        model: of transformers, in one piece or dispatched by accelerate.
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
    bfloat16 = "bf16 instructions" if fast_dtype() == torch.bfloat16 else "no bf16 instructions"
    return (
        f"CPU ({torch.backends.cpu.get_cpu_capability()}{amx}, {bfloat16}), "
        f"{torch.get_num_threads()} threads"
    )
