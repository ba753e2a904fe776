"""Make a drafter's folder for another engine, checked for things that it trips over."""

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafters import kind_of
from ..drafters.feature_drafter import FeatureDrafter
from ..drafters.formats.folder import DrafterFolder, find_folder
from ..drafters.formats.layout import PARD2
from ..drafters.pard.model import PardDrafter
from ..drafters.pard.pard2 import FILE, PICKLE
from ..training.output import NEW, replace_model
from ..training.target import config_of, is_packed, open_model, open_tokenizer, refuse_packed

# vLLM takes a drafter for another kind if one of these is in its path.
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
KINDS = ("dflash", "dspark", "eagle3")  # that vLLM reads in the speculators layout


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
        engine: the engine that loads it.
        target: folder or Hub id; its vocabulary has to be the drafter's in vLLM and TensorRT-LLM.
        pad: whether the drafter's vocabulary is widened to the target's.

    Returns:
        The command line or code that uses it.

    Raises:
        ValueError: the engine would not take the drafter; nothing has been written then.
        OSError: nothing loadable in `source`.
    """
    # an export that was killed leaves only its beginnings
    begun = output.is_dir() and [file.name for file in output.iterdir()] == [NEW]
    if output.is_symlink() or (output.exists() and not begun):
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
    folder = find_folder(source, {})
    kind = kind_of(folder)
    if issubclass(kind, PardDrafter):
        return _export_pard(kind, folder, output, engine, target, pad)
    if issubclass(kind, FeatureDrafter):
        if pad:
            raise ValueError(
                f"A {kind.title} guesses ids of its target's already: leave out --pad."
            )
        return _export_features(kind, folder, output, engine, target)
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


def _export_features(
    kind: Any, folder: DrafterFolder, output: Path, engine: Engine, target: str | None
) -> str:
    """Write a drafter with the rows of the target's head that it guesses by.

    The drafter guesses only a part of the target's tokens. Without these rows vLLM takes the
    target's whole head, and the drafter's ids for rows of it: then nothing is accepted.
    """
    drafter = kind.load_folder(folder)
    if (
        engine != Engine.vllm
        or kind.kind not in KINDS
        or drafter.vocabulary is None
        or drafter.head is not None
    ):
        raise ValueError(
            f"This {kind.title} has no other form to be exported to: save_pretrained writes the "
            "speculators layout, which vLLM reads where it serves that kind, and transformers "
            "needs no export."
        )
    if target is None:
        raise ValueError(
            f"This {kind.title} guesses by rows of its target's head, which vLLM wants with it: "
            "pass --target."
        )
    drafter.attach(open_model(target, dtype=drafter.dtype))
    rows = drafter.shared.head.weight.detach()[drafter.vocabulary]
    drafter.shortlist = None  # vLLM would take its file for weights
    drafter.head = nn.Linear(*reversed(rows.shape), bias=False)
    drafter.head.weight = nn.Parameter(rows)
    replace_model(output, drafter.save_pretrained)
    count = drafter.speculation_config.num_draft_tokens
    options = {"method": kind.kind, "model": str(output), "num_speculative_tokens": count}
    return (
        f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(options))}"
    )


def _export_pard(
    pard: Any, folder: DrafterFolder, output: Path, engine: Engine, target: str | None, pad: bool
) -> str:
    """Export a PARD drafter, or a PARD-2 one, whose pickled projection becomes safetensors."""
    if engine == Engine.vllm and (
        wrong := next((word for word in MISREAD if word in str(output.resolve()).lower()), None)
    ):
        raise ValueError(
            f"vLLM takes a drafter with {wrong!r} in its path for one of another kind: choose "
            "another folder."
        )
    is_pard2 = folder.identified == PARD2
    if is_pard2 and engine != Engine.transformers:
        raise ValueError(
            f"{engine} has no PARD-2 yet; --format transformers converts the repository's files."
        )
    bare = is_pard2 and not any((folder.path / name).exists() for name in (FILE, PICKLE))
    drafter = pard.load_folder(folder, dtype="auto", target_independent=bare)
    if target is not None:
        refuse_packed(target, "its config is read")
        _match_vocabulary(drafter, config_of(target).get_text_config().vocab_size, engine, pad)
    tokenizer = open_tokenizer(folder.path)

    def save(made: Path) -> None:
        drafter.save_pretrained(made)
        tokenizer.save_pretrained(made)

    replace_model(output, save)
    remark = ""
    if bare:
        remark = f"# It came without {PICKLE}: it can only draft without the target's features.\n"
    if not target and engine != Engine.transformers:
        remark = "# The vocabulary's size was not checked: --target was not given.\n"
    return remark + _command(engine, target or "TARGET", output, drafter, bare)


def _match_vocabulary(drafter: Any, wanted: int, engine: Engine, pad: bool) -> None:
    have = drafter.config.get_text_config().vocab_size
    if have == wanted or (engine == Engine.transformers and not pad):
        return
    if have > wanted:
        raise ValueError(
            f"The drafter's vocabulary of {have} is larger than the target's of {wanted}, which "
            f"{engine} refuses."
        )
    if not pad:
        raise ValueError(
            f"{engine} wants equal vocabularies, but the drafter's has {have} and the target's "
            f"{wanted}: add --pad."
        )
    drafter.resize_token_embeddings(wanted, mean_resizing=False)


def _command(engine: Engine, target: str, output: Path, drafter: Any, bare: bool) -> str:
    num_draft_tokens = drafter.speculation_config.num_draft_tokens
    if engine == Engine.vllm:
        options = {"method": "draft_model", "parallel_drafting": True, "model": str(output)}
        config = json.dumps({**options, "num_speculative_tokens": num_draft_tokens})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
    if engine == Engine.trtllm:
        return (
            "from tensorrt_llm import LLM\nfrom tensorrt_llm.llmapi import PARDDecodingConfig\n"
            f"speculation = PARDDecodingConfig(max_draft_len={num_draft_tokens}, "
            f'speculative_model="{output}", mask_token_id={drafter.mask_token_id})\n'
            f'llm = LLM("{target}", speculative_config=speculation)'
        )
    return (
        f'drafter = AutoDrafter.from_pretrained("{output}"{", target_independent=True" * bare})\n'
        "target.generate(**inputs, assistant_model=drafter)"
    )
