"""Make a drafter's folder for another engine."""

from enum import StrEnum
from pathlib import Path

import torch

from ..drafters import kind_of
from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.formats.folder import DrafterFolder
from ..drafters.pard.model import PardDrafter
from ..files import local_folder
from ..training.output import replace_model
from ..training.target import is_packed, open_model, open_tokenizer
from .feature_export import export_features
from .pard_export import export_pard


class Engine(StrEnum):
    """The engine that is to load the folder."""

    transformers = "transformers"
    vllm = "vllm"
    trtllm = "trtllm"


def export(
    source: str | Path, output: Path, engine: Engine, target: str | None = None, pad: bool = False
) -> str:
    """Write a drafter's folder for `engine`, and return how to run it there.

    The folder is checked for things that the engine trips over.

    Args:
        source: folder or Hub id of a drafter; or a `.gguf` file of a causal LM, which becomes a
            folder of ordinary weights.
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
    if output.exists() or output.is_symlink():
        raise ValueError(f"{output} exists: give a new folder.")
    if pad and target is None:
        raise ValueError("--pad widens a drafter's vocabulary to its target's: pass --target too.")
    if is_packed(source):
        if engine != Engine.transformers or target is not None:
            raise ValueError(
                f"{source} becomes a folder of ordinary weights, for transformers: leave out "
                "--format and --target."
            )
        return _unpack(source, output)
    folder = DrafterFolder(local_folder(source, {}, also=("*.bin",)))
    kind = kind_of(folder)
    if issubclass(kind, PardDrafter):
        return export_pard(kind, folder, output, str(engine), target, pad)
    if issubclass(kind, FeatureDrafter):
        if pad:
            raise ValueError(
                f"A {kind.title} guesses ids of its target's already: leave out --pad."
            )
        return export_features(kind, folder, output, str(engine), target)
    raise ValueError(
        f"A {kind.title} is of use in transformers alone, and there as it is: it has no other form."
    )


def _unpack(source: str | Path, output: Path) -> str:
    """Write a packed model as a folder of ordinary weights, and say how to use it."""
    model, tokenizer = open_model(source, whole=True, dtype=torch.float32), open_tokenizer(source)
    model.config.__dict__.pop("quantization_config", None)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    replace_model(output, save)
    return f"paradraft train mtp --target {output} --train-file answers.jsonl --output-dir my-layer"
