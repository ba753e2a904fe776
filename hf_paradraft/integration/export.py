"""Make a drafter's folder for another engine."""

from enum import StrEnum
from pathlib import Path
from typing import Any

from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.kinds import kind_of_folder
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
    folder: Any = local_folder(source, {}, also=("*.bin",))
    kind = kind_of_folder(folder)
    if kind.export is None:
        if any(issubclass(drafter, FeatureDrafter) for drafter in kind.drafters):
            raise ValueError(
                f"A {kind.title} has no other form to be exported to: save_pretrained writes the speculators layout, which vLLM "
                "reads where it serves that kind, and transformers needs no export."
            )
        raise ValueError(f"A {kind.title} is of use in transformers alone, and there as it is: {engine} has nothing of the kind.")
    return kind.export(folder, output, str(engine), target, pad)
