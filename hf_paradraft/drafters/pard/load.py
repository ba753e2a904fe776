"""Loading a PARD drafter's weights: exactly those that belong to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...files import INDEX, WHOLE, refuse_missing, tensor_files


def load_whole(load: Callable[..., Any], name: str, folder: Path, config: PreTrainedConfig, args: tuple, kwargs: dict) -> Any:
    """Load a model with exactly the weights that lie in a folder, of safetensors alone: pickles may lie beside them.

    Args:
        load: `from_pretrained` of its class.
        name: of that class in transformers.
        folder, config: of the drafter.
        args, kwargs: for `load`.

    Raises:
        OSError: weights are missing.
        ValueError: the config is another class's, or there are weights that the class has no place for.
    """
    if (wanted := config.architectures or []) and wanted[0] != name:
        raise ValueError(
            f"{folder} holds a {wanted[0]}, and its config is that of a {name}: it is no PARD drafter, which is a plain "
            "causal LM."
        )
    if (folder / WHOLE).exists() and folder / WHOLE not in tensor_files(folder).values():
        raise ValueError(
            f"{folder} has weights in one piece and in several ({WHOLE}, {INDEX}), and transformers reads the former: remove "
            "those that do not belong there."
        )
    drafter, info = load(folder, *args, config=config, output_loading_info=True, **{**kwargs, "use_safetensors": True})
    refuse_missing(info, name, folder)
    if more := sorted(info["unexpected_keys"]):
        raise ValueError(
            f"The {name} in {folder} has no place for {len(more)} of the model's weights ({', '.join(more[:3])}, …): it is no "
            "PARD drafter, or another kind."
        )
    return drafter
