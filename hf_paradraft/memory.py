"""How much memory was in use."""

from contextlib import suppress
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


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
