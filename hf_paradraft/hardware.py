"""What the hardware is called, which number format it is fast at, how much memory was in use, and which cores are ours."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


def fast_dtype() -> torch.dtype:
    """bfloat16 on a GPU or a CPU with instructions for it (AMX or AVX-512), else float32."""
    if torch.cuda.is_available() or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def input_device(model: torch.nn.Module) -> torch.device:
    """Where a model's inputs belong: its own device, or where an offloaded one, whose weights are elsewhere, computes.

    Args:
        model: of transformers, in one piece or dispatched by accelerate.
    """
    if model.device.type != "meta":
        return model.device
    parts = (getattr(part, "_hf_hook", None) for part in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in parts)
    return torch.device(next((place for place in places if place is not None), "cpu"))


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's instruction set and the threads torch uses on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    amx = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    bfloat16 = "bf16 instructions" if fast_dtype() == torch.bfloat16 else "no bf16 instructions"
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}{amx}, {bfloat16}), {torch.get_num_threads()} threads"


def reset_peak_memory(device: torch.device) -> None:
    """Forget what `peak_memory` would say; does nothing where the system does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif PROCESS.exists():
        with suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")  # the high-water mark of resident memory


def peak_memory(device: torch.device) -> int | None:
    """Bytes in use at most since the reset: a GPU's allocations, or the process's resident memory on Linux, else None.

    Where the system allows no reset it is the most since the process began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def keep_to_last_cores(count: int) -> None:
    """Let this process run on the last `count` of the cores that it may use, if there are more and the system allows it."""
    if sys.platform == "linux" and count < len(cores := sorted(os.sched_getaffinity(0))):
        with suppress(OSError):
            os.sched_setaffinity(0, cores[-count:])
