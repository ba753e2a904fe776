"""Make a PARD drafter's folder for another engine, checked for what that engine trips over."""

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from ...files import FILES
from ...training.target import config_of, refuse_packed
from ..formats.values import read_config

# vLLM takes a drafter for another kind if one of these is in its path.
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
PROJECTION = "warp_model.bin"


def export(pard: Any, folder: Path, output: Path, engine: str, target: str | None, pad: bool) -> str:
    """As `integration.export.export`, of a PARD drafter, or of a PARD-2 one, whose pickled projection becomes safetensors."""
    if engine == "vllm" and (wrong := next((word for word in MISREAD if word in str(output.resolve()).lower()), None)):
        raise ValueError(f"vLLM takes a drafter with {wrong!r} in its path for one of another kind: choose another folder.")
    config = read_config(folder)
    if config.get("pard2") or config.get("spd_type") == "pard2":
        return _convert_pard2(folder, output, engine)
    if "draft_vocab_size" in config and engine != "transformers":
        raise ValueError(
            f"This drafter guesses {config['draft_vocab_size']} of {config['vocab_size']} ids, which {engine} has no place for: "
            "train one with a whole head for it."
        )
    drafter = pard.from_pretrained(folder, dtype="auto")
    if target is not None:
        refuse_packed(target, "its config is read")
        _match_vocabulary(drafter, config_of(target).get_text_config().vocab_size, engine, pad)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        drafter.save_pretrained(name)
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(name)
        _publish(Path(name), output)
    unchecked = "" if target or engine == "transformers" else "# The vocabulary's size was not checked: --target was not given.\n"
    return unchecked + _command(
        engine, target or "TARGET", output, drafter.speculation_config.num_draft_tokens, drafter.mask_token_id
    )


def _publish(made: Path, output: Path) -> None:
    """Copy a private temporary folder to where others, and their containers, may read it as the user's umask says."""
    shutil.copytree(made, output, copy_function=shutil.copyfile)
    mask = os.umask(0)
    os.umask(mask)
    output.chmod(0o777 & ~mask)


def _match_vocabulary(drafter: Any, wanted: int, engine: str, pad: bool) -> None:
    have = drafter.config.get_text_config().vocab_size
    if have == wanted or (engine == "transformers" and not pad):
        return
    if have > wanted:
        raise ValueError(f"The drafter's vocabulary of {have} is larger than the target's of {wanted}, which {engine} refuses.")
    if not pad:
        raise ValueError(f"{engine} wants equal vocabularies, but the drafter's has {have} and the target's {wanted}: add --pad.")
    drafter.resize_token_embeddings(wanted, mean_resizing=False)


def _convert_pard2(folder: Path, output: Path, engine: str) -> str:
    if engine != "transformers":
        raise ValueError(f"{engine} has no PARD-2 yet; --format transformers converts the repository's files.")
    weights = {}
    if (folder / PROJECTION).exists():
        try:
            loaded = torch.load(folder / PROJECTION, map_location="cpu", weights_only=True)
            weights = {str(name): tensor.clone().contiguous() for name, tensor in loaded.items()}
        except Exception as error:  # a foreign pickle fails in many ways
            raise OSError(f"{folder / PROJECTION} holds no weights that can be read safely: {type(error).__name__}.") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        for file in {file for pattern in FILES for file in folder.glob(pattern)}:
            shutil.copy2(file, name)
        if weights:
            save_file(weights, Path(name) / "warp_model.safetensors")
        _publish(Path(name), output)
    missing = "" if weights else f" It came without {PROJECTION}: it can only draft without the target's features."
    return f"# A PARD-2 drafter in safetensors.{missing}"


def _command(engine: str, target: str, output: Path, num_draft_tokens: int, mask_token_id: int) -> str:
    if engine == "vllm":
        options = {"method": "draft_model", "parallel_drafting": True, "model": str(output)}
        config = json.dumps({**options, "num_speculative_tokens": num_draft_tokens})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(config)}"
    if engine == "trtllm":
        return (
            "from tensorrt_llm import LLM\nfrom tensorrt_llm.llmapi import PARDDecodingConfig\n"
            f'speculation = PARDDecodingConfig(max_draft_len={num_draft_tokens}, speculative_model="{output}", '
            f'mask_token_id={mask_token_id})\nllm = LLM("{target}", speculative_config=speculation)'
        )
    return f'drafter = AutoDrafter.from_pretrained("{output}")\ntarget.generate(**inputs, assistant_model=drafter)'
