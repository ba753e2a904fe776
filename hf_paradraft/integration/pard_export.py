"""Make a PARD drafter's folder for another engine, checked for what that engine trips over."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..drafters.formats.files import unpickled
from ..drafters.formats.folder import DrafterFolder
from ..drafters.pard.pard2 import FILE, PICKLE
from ..files import FILES
from ..training.target import config_of, open_tokenizer, refuse_packed

# vLLM takes a drafter for another kind if one of these is in its path.
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")


def export_pard(
    pard: Any, folder: DrafterFolder, output: Path, engine: str, target: str | None, pad: bool
) -> str:
    """Export a PARD drafter, or a PARD-2 one, whose pickled projection becomes safetensors."""
    if engine == "vllm" and (
        wrong := next((word for word in MISREAD if word in str(output.resolve()).lower()), None)
    ):
        raise ValueError(
            f"vLLM takes a drafter with {wrong!r} in its path for one of another kind: choose "
            "another folder."
        )
    if folder.config.get("pard2") or folder.config.get("spd_type") == "pard2":
        return _convert_pard2(folder.path, output, engine)
    drafter = pard.load_folder(folder, dtype="auto")
    if target is not None:
        refuse_packed(target, "its config is read")
        _match_vocabulary(drafter, config_of(target).get_text_config().vocab_size, engine, pad)
    with _new_folder(output) as made:
        drafter.save_pretrained(made)
        open_tokenizer(folder.path).save_pretrained(made)
    unchecked = (
        ""
        if target or engine == "transformers"
        else "# The vocabulary's size was not checked: --target was not given.\n"
    )
    return unchecked + _command(
        engine,
        target or "TARGET",
        output,
        drafter.speculation_config.num_draft_tokens,
        drafter.mask_token_id,
    )


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a private folder to write into, then copy it to `output`.

    Others and containers may read `output` as the umask says.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        yield Path(name)
        shutil.copytree(name, output, copy_function=shutil.copyfile)
    mask = os.umask(0)
    os.umask(mask)
    output.chmod(0o777 & ~mask)


def _match_vocabulary(drafter: Any, wanted: int, engine: str, pad: bool) -> None:
    have = drafter.config.get_text_config().vocab_size
    if have == wanted or (engine == "transformers" and not pad):
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


def _convert_pard2(folder: Path, output: Path, engine: str) -> str:
    if engine != "transformers":
        raise ValueError(
            f"{engine} has no PARD-2 yet; --format transformers converts the repository's files."
        )
    weights = unpickled(folder / PICKLE) if (folder / PICKLE).exists() else {}
    with _new_folder(output) as made:
        for file in {file for pattern in FILES for file in folder.glob(pattern)}:
            shutil.copy2(file, made)
        if weights:
            save_file(
                {name: tensor.clone().contiguous() for name, tensor in weights.items()}, made / FILE
            )
    missing = (
        ""
        if weights
        else f" It came without {PICKLE}: it can only draft without the target's features."
    )
    return f"# A PARD-2 drafter in safetensors.{missing}"


def _command(
    engine: str, target: str, output: Path, num_draft_tokens: int, mask_token_id: int
) -> str:
    if engine == "vllm":
        options = {"method": "draft_model", "parallel_drafting": True, "model": str(output)}
        config = json.dumps({**options, "num_speculative_tokens": num_draft_tokens})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
    if engine == "trtllm":
        return (
            "from tensorrt_llm import LLM\nfrom tensorrt_llm.llmapi import PARDDecodingConfig\n"
            f"speculation = PARDDecodingConfig(max_draft_len={num_draft_tokens}, "
            f'speculative_model="{output}", mask_token_id={mask_token_id})\n'
            f'llm = LLM("{target}", speculative_config=speculation)'
        )
    return (
        f'drafter = AutoDrafter.from_pretrained("{output}")\n'
        "target.generate(**inputs, assistant_model=drafter)"
    )
