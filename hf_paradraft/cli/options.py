"""Options, the console, and the loading of models, for all commands."""

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..auto import AutoDrafter, fitting
from ..copies import Memory
from ..demo import FAMILY
from ..drafters.mtp.model import MtpDrafter
from ..drafters.ngram import NgramDrafter
from ..drafters.ppd.prompted import PromptedDrafter
from ..hardware import fast_dtype
from ..protocol import Drafter
from ..training.target import open_model, open_tokenizer

console, err_console = Console(), Console(stderr=True)


class Dtype(StrEnum):
    """The number format of weights.

    `auto` is bfloat16 where the hardware multiplies it well, else float32.
    """

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def chosen(self) -> torch.dtype:
        """Look up the dtype of torch."""
        return fast_dtype() if self == Dtype.auto else getattr(torch, self)

    @property
    def placement(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`: this dtype, on the GPUs if there are any."""
        return {
            "dtype": self.chosen,
            **({"device_map": "auto"} if torch.cuda.is_available() else {}),
        }


Target = Annotated[
    str | None, typer.Option(help="Folder or Hub id of the big model; default: the embedded one.")
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter", help="Folder or Hub id of a drafter for it; repeatable: compared in one run."
    ),
]
AnyDrafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A drafter's folder or Hub id; ngram: copies; mtp: layers that the target brings.",
    ),
]
References = Annotated[
    list[Path] | None,
    typer.Option("--reference", help="A text file that drafts are copied from too; repeatable."),
]
Parent = Annotated[
    str | None,
    typer.Option(help="An autoregressive small model, for transformers' assisted generation."),
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="bfloat16 or float32; auto takes what this hardware is fast at.")
]
NewTokens = Annotated[int, typer.Option(min=1, help="New tokens at most.")]
MaxLength = Annotated[
    int, typer.Option(min=2, help="Tokens of a sample at most; longer ones are cut.")
]


def sane_temperature(value: Any) -> Any:
    """Refuse a temperature that is no finite number, or so near to 0 that logits overflow.

    The value is one temperature, several or none.

    Raises:
        typer.BadParameter: one is.
    """
    if any(
        not (t == 0 or 1e-3 <= t < math.inf)
        for t in (value if isinstance(value, list) else [value or 0])
    ):
        raise typer.BadParameter("a temperature is 0, which is greedy, or a number from 0.001 on.")
    return value


def use_threads(count: int | None) -> int | None:
    """Let torch use so many CPU threads; None: as many as it takes."""
    if count is not None:
        torch.set_num_threads(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        min=1, callback=use_threads, help="CPU threads; one each where several run at a time."
    ),
]
Temperature = Annotated[float, typer.Option(min=0, callback=sane_temperature, help="0 is greedy.")]


def open_target(
    name: str, placement: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a folder, a Hub id or a `.gguf` file.

    The weights of a `.gguf` file are kept packed where there is a kernel.

    Raises:
        OSError, ValueError: nothing loadable there; of a GGUF file, the reason.
    """
    model = open_model(name, **placement)
    usual = {
        "use_cache": True,
        "return_dict_in_generate": False,
        "output_attentions": False,
        "output_hidden_states": False,
    }
    model.generation_config.update(**usual)  # whatever its training wrote into its config
    return model, open_tokenizer(name)


def copy_from(files: Sequence[Path] | None, models: "Models") -> Memory | None:
    """Let a command's drafters copy from text files.

    Raises:
        typer.BadParameter: one is no text.
    """
    if not files:
        return None
    memory = Memory(1 << 22)
    for file in files:
        try:
            text = file.expanduser().read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{file} cannot be read as text in UTF-8: {error}") from error
        memory.add(models.tokenizer(text, add_special_tokens=False)["input_ids"])
    for drafter in (models.drafter, *models.others):
        drafter.memory = memory
    return memory


@dataclass
class Models:
    """A target, a drafter for it, and the models that they are compared with.

    Attributes:
        target, drafter: the loaded models, in evaluation mode.
        parent: an autoregressive small model, or None.
        tokenizer: the target's.
        others: more drafters for it: those that were named, or that come with this library.
    """

    target: PreTrainedModel
    drafter: Drafter
    parent: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    others: list[Drafter]


def load(
    target: str | None,
    drafter: str | None,
    dtype: Dtype,
    parent: str | None = None,
    others: Sequence[str] = (),
) -> Models:
    """Load the models that a command names, or the embedded family if it names none.

    Args:
        target, drafter: folders or Hub ids; a target's drafter is looked for where none is named.
        dtype: the number format of all weights.
        parent: an autoregressive small model, a folder or Hub id.
        others: more drafters for the target.

    Raises:
        typer.BadParameter: a drafter without a target, or a file as a target.
    """
    embedded = target is None
    if embedded:
        if drafter is not None or parent is not None:
            raise typer.BadParameter(
                "--drafter goes with --target, and --parent with both; the embedded family has "
                "its own."
            )
        target, drafter, parent = (str(FAMILY / name) for name in ("target", "pard", "draft"))
    elif Path(target).is_file() and not target.endswith(".gguf"):
        raise typer.BadParameter(
            f"--target {target} is a file: name the folder that it lies in, or a .gguf file."
        )
    placement = dtype.placement
    model, tokenizer = open_target(target, placement)
    draft: Drafter
    if drafter == "ngram":
        draft = NgramDrafter()
    elif drafter == "mtp":
        draft = MtpDrafter.from_target(model)
    elif drafter is None:
        draft, why = fitting(model, **placement)
        err_console.print(why)
    else:
        draft = AutoDrafter.from_pretrained(drafter, **placement)
    small = open_model(parent, **placement) if parent else None
    more = (
        _load_ppd_drafters(small)
        if embedded
        else [AutoDrafter.from_pretrained(name, **placement) for name in others]
    )
    return Models(model, draft, small, tokenizer, more)


def load_public(dtype: Dtype) -> Models:
    """Load a public chat model, fetched once, and the drafters for it that come with this library.

    Raises:
        OSError: it cannot be fetched.
    """
    from ..demo import PUBLIC
    from ..demo.public_model import get_public

    models = load(str(get_public()), str(PUBLIC / "eagle3"), dtype)
    models.others.append(AutoDrafter.from_pretrained(PUBLIC / "ppd"))
    return models


def _load_ppd_drafters(parent: PreTrainedModel) -> list[Drafter]:
    """Load the embedded PPD drafters: the target's, and one on a copy of the small model."""
    with warnings.catch_warnings():
        # PEFT 0.21 still asks for it
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        prompted = PromptedDrafter(
            PeftModel.from_pretrained(copy.deepcopy(parent), FAMILY / "ppd-draft")
        )
    return [AutoDrafter.from_pretrained(FAMILY / "ppd"), prompted]
