"""The hardware: its name, and the number format that it is fast at."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from time import perf_counter

import torch
from huggingface_hub.constants import HF_HOME

FASTER = 0.8  # of the seconds in float32: less is worth another format
_choice, _choices = Lock(), list[bool]()  # of cuDNN's attention, before each of those that do without it now


def fast_dtype() -> torch.dtype:
    """Choose bfloat16 on a GPU or a CPU with instructions for it (AMX or AVX-512), else float32."""
    if torch.cuda.is_available() or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


@cache
def trains_in_bf16() -> bool:
    """Tell whether a thousand rows are multiplied faster in bfloat16 than in float32 on this hardware.

    A CPU with such instructions is timed, once: a run that is resumed there goes on in the same format.
    """
    if torch.cuda.is_available() or fast_dtype() == torch.float32:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    cpu = f"{torch.backends.cpu.get_cpu_capability()}-{torch.cpu._is_amx_tile_supported()}"
    note = Path(HF_HOME) / "paradraft" / f"bf16-{platform.node()}-{cpu}-{torch.__version__}"
    with suppress(OSError):
        return note.read_text() == "faster"
    faster = _seconds(torch.bfloat16) < FASTER * _seconds(torch.float32)
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("faster" if faster else "slower")
    return faster


def _seconds(dtype: torch.dtype) -> float:
    """Measure the seconds of a matrix product of the size of a training step's: the best of some runs."""
    rows, weight = torch.ones(1024, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)
    seconds = []
    for _ in range(5):
        begun = perf_counter()
        torch.nn.functional.linear(rows, weight)
        seconds.append(perf_counter() - begun)
    return min(seconds)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Keep PyTorch's attention from cuDNN's kernels, which it prefers on Hopper, while lengths vary.

    It plans them anew for every shape: on an H200 (torch 2.11) some 45 ms each, so that the layer of an EAGLE-3 drafter took 530
    ms forward and backward, and without them 50 for twice as many texts. The choice is the process's: the first of its threads
    that enters makes it, and the last that leaves takes it back.
    """
    with _choice:
        _choices.append(torch.backends.cuda.cudnn_sdp_enabled() if not _choices else _choices[0])
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _choice:
            torch.backends.cuda.enable_cudnn_sdp(_choices.pop() and not _choices)


def input_device(model: torch.nn.Module) -> torch.device:
    """Look up the device for a model's inputs: its own, or the one on which an offloaded model computes.

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
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}{amx}, {bfloat16}), {torch.get_num_threads()} threads"
