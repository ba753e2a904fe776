"""A small model for a target without a sibling: some of its own layers, and a head over the tokens that it writes most often."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ...names import MODEL_FOR_CAUSAL_LM_MAPPING
from ...training.data import encode_rows, load_rows
from ...training.output import replace_model
from ...training.target import open_model, open_tokenizer
from ...training.vocabulary import answer_vocabulary
from .config import trim_head

Which = Literal["first", "even"]


def chosen_layers(count: int, of: int, which: Which = "even") -> list[int]:
    """Numbers of the layers that are kept, the first always among them.

    Raises:
        ValueError: none, or more than there are.
    """
    if not 1 <= count <= of:
        raise ValueError(f"The target has {of} layers: {count} of them cannot be kept.")
    return list(range(count)) if which == "first" else [round(index * of / count) for index in range(count)]


def with_layers(target: PreTrainedModel, layer_indices: list[int]) -> PreTrainedModel:
    """A model of some of the target's layers, with its embedding, norm and head; all weights are copies.

    Args:
        target: a causal LM whose layers are named by their numbers.
        layer_indices: which, rising.

    Raises:
        ValueError: its layers cannot be taken apart so.
    """
    config: Any = copy.deepcopy(target.config)
    text = config.get_text_config()
    for name, value in list(text.to_dict().items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # layer_types and the like
            setattr(text, name, [value[index] for index in layer_indices])
    text.num_hidden_layers = len(layer_indices)
    for name in ("quantization_config", "paradraft"):
        config.__dict__.pop(name, None)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{type(target).__name__} is no causal LM of transformers: it cannot be shrunk.")
    small = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(target.dtype)
    new_numbers = {index: number for number, index in enumerate(layer_indices)}
    weights = {}
    for name, tensor in target.state_dict().items():
        if (match := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)) is None:
            weights[name] = tensor
        elif (index := int(match[1])) in new_numbers:
            weights[f"{name[: match.start(1)]}{new_numbers[index]}{name[match.end(1) :]}"] = tensor
    wrong = small.load_state_dict(weights, strict=False)
    missing = [name for name in wrong.missing_keys if name not in (small._tied_weights_keys or {})]
    if missing or wrong.unexpected_keys:
        raise ValueError(
            f"{type(target).__name__} cannot be shrunk: its layers are not named by number, or its weights are packed ("
            f"{', '.join([*missing, *wrong.unexpected_keys][:3])}, …)."
        )
    small.generation_config = copy.deepcopy(target.generation_config)
    return small.eval()


def shrink(
    target: str | Path,
    output_dir: Path,
    layers: int,
    vocab: int | None = None,
    data: str | Path | None = None,
    which: Which = "even",
    max_length: int = 2048,
    overwrite: bool = False,
) -> PreTrainedModel:
    """Write a model of some of the target's layers, with its tokenizer; `train pard --model` makes a drafter of it.

    Args:
        target: folder, Hub id or `.gguf` file of a causal LM.
        output_dir: new or empty, unless `overwrite`; apart from the target's folder.
        layers: N.
        vocab: V', tokens that the head guesses; default: all, and then the result is a plain causal LM.
        data: the target's answers, as for training, in which tokens are counted; with `vocab`.
        which: the first layers, or evenly chosen ones.
        max_length: tokens of an answer that are counted.
        overwrite: replace the model that is there, once all is made; other files stay.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file; the output must be a folder.")
    output, source = output_dir.resolve(), Path(target).resolve()
    if source.exists() and (output.is_relative_to(source) or source.is_relative_to(output)):
        raise ValueError(f"{output_dir} is the target's folder {target}, or lies within it, or around it: name another folder.")
    if output_dir.exists() and any(output_dir.iterdir()) and not overwrite:
        raise ValueError(f"{output_dir} already has files: pass --overwrite to replace it, or name another folder.")
    if (vocab is None) != (data is None):
        raise ValueError("--vocab and --train-file go together: tokens are counted on the target's own answers.")
    tokenizer = open_tokenizer(target)
    model = open_model(target, whole=True, dtype=torch.float32)
    small = with_layers(model, chosen_layers(layers, model.config.get_text_config().num_hidden_layers, which))
    if vocab is not None and data is not None:
        rows = encode_rows(load_rows(data), tokenizer, max_length)
        trim_head(small, answer_vocabulary(rows, vocab, tokenizer, model))

    def save(folder: Path) -> None:
        small.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    replace_model(output_dir, save)
    return small
