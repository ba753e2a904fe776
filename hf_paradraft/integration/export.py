"""Make a drafter's folder for another engine."""

from enum import StrEnum
from pathlib import Path

from ..drafters import kind_of_folder
from ..files import local_folder


class Engine(StrEnum):
    """Who is to load the folder."""

    transformers = "transformers"
    vllm = "vllm"
    trtllm = "trtllm"


def export(source: str | Path, output: Path, engine: Engine, target: str | None = None, pad: bool = False) -> str:
    """Write a drafter's folder for `engine`, checked for what that trips over, and say how to run it there.

    Args:
        source: folder or Hub id of a drafter.
        output: a new folder.
        engine: who loads it.
        target: folder or Hub id; its vocabulary has to be the drafter's in vLLM and TensorRT-LLM.
        pad: widen the drafter's vocabulary to the target's.

    Returns:
        The command line or code that uses it.

    Raises:
        ValueError: what the engine would not take; nothing has been written then.
        OSError: nothing loadable in `source`.
    """
    if output.exists():
        raise ValueError(f"{output} exists: give a new folder.")
    folder = local_folder(source, {}, also=("*.bin",))
    return kind_of_folder(folder).export(folder, output, str(engine), target, pad)
