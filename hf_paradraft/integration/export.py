"""Make a drafter's folder for another engine, checked for what that engine trips over."""

import json
import shlex
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from ..drafters.pard import PardDrafter
from .files import FILES, local_folder, read_config

# vLLM takes a drafter for another kind if one of these is in its path.
MISREAD = ("eagle-", "eagle3", "dflash", "dspark")
PROJECTION = "warp_model.bin"


class Engine(StrEnum):
    """Who is to load the folder."""

    transformers = "transformers"
    vllm = "vllm"
    trtllm = "trtllm"


def export(source: str | Path, output: Path, engine: Engine, target: str | None = None, pad: bool = False) -> str:
    """Write a PARD drafter for `engine`, and say how to run it there.

    Args:
        source: folder or Hub id of a PARD drafter, or of a PARD-2 one, whose pickled projection becomes safetensors.
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
    if engine is Engine.vllm and (wrong := next((word for word in MISREAD if word in str(output.resolve()).lower()), None)):
        raise ValueError(f"vLLM takes a drafter with {wrong!r} in its path for one of another kind: choose another folder.")
    folder = local_folder(source, {}, also=(PROJECTION,))
    config = read_config(folder)
    if config.get("pard2") or config.get("spd_type") == "pard2":
        return _convert_pard2(folder, output, engine)
    drafter = PardDrafter.from_pretrained(folder, dtype="auto")
    if target is not None:
        _match_vocabulary(
            drafter, AutoConfig.from_pretrained(target, trust_remote_code=False).get_text_config().vocab_size, engine, pad
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        drafter.save_pretrained(name)
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(name)
        shutil.copytree(name, output)
    unchecked = (
        "" if target or engine is Engine.transformers else "# The vocabulary's size was not checked: --target was not given.\n"
    )
    return unchecked + _command(
        engine, target or "TARGET", output, drafter.speculation_config.num_draft_tokens, drafter.mask_token_id
    )


def _match_vocabulary(drafter: PardDrafter, wanted: int, engine: Engine, pad: bool) -> None:
    have = drafter.config.get_text_config().vocab_size
    if have == wanted or (engine is Engine.transformers and not pad):
        return
    if have > wanted:
        raise ValueError(f"The drafter's vocabulary of {have} is larger than the target's of {wanted}, which {engine} refuses.")
    if not pad:
        raise ValueError(f"{engine} wants equal vocabularies, but the drafter's has {have} and the target's {wanted}: add --pad.")
    drafter.resize_token_embeddings(wanted, mean_resizing=False)


def _convert_pard2(folder: Path, output: Path, engine: Engine) -> str:
    if engine is not Engine.transformers:
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
        shutil.copytree(name, output)
    missing = "" if weights else f" It came without {PROJECTION}: it can only draft without the target's features."
    return f"# A PARD-2 drafter in safetensors.{missing} hf_paradraft does not load PARD-2 yet."


def _command(engine: Engine, target: str, output: Path, num_draft_tokens: int, mask_token_id: int) -> str:
    if engine is Engine.vllm:
        options = {"method": "draft_model", "parallel_drafting": True, "model": str(output)}
        options = json.dumps({**options, "num_speculative_tokens": num_draft_tokens})
        return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(options)}"
    if engine is Engine.trtllm:
        return (
            "from tensorrt_llm import LLM\nfrom tensorrt_llm.llmapi import PARDDecodingConfig\n"
            f'speculation = PARDDecodingConfig(max_draft_len={num_draft_tokens}, speculative_model="{output}", '
            f'mask_token_id={mask_token_id})\nllm = LLM("{target}", speculative_config=speculation)'
        )
    return f'drafter = pd.AutoDrafter.from_pretrained("{output}")\ntarget.generate(**inputs, assistant_model=drafter)'
