"""What a folder of a published drafter is, by its config and its tensors' names; never by its `model_type`.

Formats as their publishers write them: z-lab and SpecForge (DFlash, DSpark), DeepSpec (DSpark, DFlash, EAGLE-3), speculators,
SafeAI (EAGLE-3), AWS (P-EAGLE), AMD (PARD, PARD-2), transformers' own (DFlash).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import LongTensor, Tensor, nn

from ..files import local_folder, tensor_names
from .config_file import read_config

DFLASH, DSPARK, EAGLE3, PEAGLE = "a DFlash drafter", "a DSpark drafter", "an EAGLE-3 drafter", "a P-EAGLE drafter"
PARD2 = "a PARD-2 drafter"
SERVED = (DFLASH, DSPARK, EAGLE3, PEAGLE, PARD2)
SPECULATORS = {
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "dflash2": "a DFlash2 drafter",
    "xpress": "an XPress drafter",
    "mtp": "a drafter of MTP layers",
}
ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": "a DFlash2 drafter",
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "Eagle3Speculator": EAGLE3,
    "PEagleSpeculator": PEAGLE,
    "PEagleDraftModel": PEAGLE,
    "LlamaForCausalLMEagle3": EAGLE3,
}
DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel")
PICKLES = ("pytorch_model.bin", "warp_model.bin")


def identify(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Which kind of feature drafter this is, as "a DFlash drafter"; None if it is none that is known.

    Args:
        config: of `config.json`.
        tensors: names of all tensors of the folder.
    """
    names = list(tensors)
    if (kind := config.get("speculators_model_type")) is not None:
        return SPECULATORS.get(kind, f"a speculators drafter of type {kind}")
    if config.get("pard2") or config.get("spd_type") == "pard2" or "pard2_target_layers" in config:
        return PARD2
    if any(name.split(".")[-1] == "mask_hidden" for name in names) or "parallel_drafting_mask" in config:
        return PEAGLE
    first = (config.get("architectures") or [""])[0]
    projector = (config.get("dflash_config") or {}).get("projector_type")
    if projector not in (None, "dflash"):
        return {"dspark": DSPARK, "domino": "a Domino drafter"}.get(projector, f"a DFlash relative ({projector})")
    if (by_tensors := _by_tensors(names)) == "a DFlash2 drafter":
        return by_tensors
    if first in ARCHITECTURES:
        return DSPARK if ARCHITECTURES[first] == DFLASH and by_tensors == DSPARK else ARCHITECTURES[first]
    if first in DEEPSPEC:
        return DSPARK if config.get("markov_rank") else DFLASH
    if first.endswith("Eagle3Model"):
        return EAGLE3
    if config.get("model_type") == "muse_glimmer_assistant":
        return DFLASH
    if "dflash_config" in config:
        return DFLASH
    return by_tensors or ("an EAGLE-type drafter" if "eagle_config" in config or "eagle" in first.lower() else None)


def _by_tensors(names: list[str]) -> str | None:
    tops = {name.split(".")[0] for name in names}
    if "candidate_selector" in tops or any(".attention_conv." in name for name in names):
        return "a DFlash2 drafter"
    if tops & {"markov_head", "logit_head"}:
        return DSPARK
    if "fc" in tops or any(name.startswith("encoder.fc.") for name in names):
        if "hidden_norm" in tops or "encoder" in tops:
            return DFLASH
        return EAGLE3 if "midlayer" in tops or "lm_head" in tops else "an EAGLE-1 or EAGLE-2 drafter"
    return None


def kind_in(folder: Path) -> str | None:
    """As `identify`, of a folder; None where there is no config."""
    if not (folder / "config.json").exists():
        return None
    return identify(read_config(folder), names_in(folder))


def names_in(folder: Path) -> list[str]:
    """Names of all tensors of a folder; none where there are no weights."""
    if any(folder.glob("*.safetensors")):
        return tensor_names(folder)
    return list(unpickled(folder / PICKLES[0])) if (folder / PICKLES[0]).exists() else []


def refuse_foreign(config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Refuse a drafter that reads the target's features where a plain causal LM is wanted; arguments as for `identify`.

    Raises:
        ValueError: it is one.
    """
    if (found := identify(config, tensors)) is None:
        return
    if found in SERVED:
        raise ValueError(f"This is {found}, which reads the target's hidden states: load it with AutoDrafter.from_pretrained.")
    raise ValueError(f"This is {found}, which is not served here.")


def drafter_folder(repo_or_dir: str | Path, kwargs: dict[str, Any]) -> Path:
    """As `local_folder`; a repository without safetensors comes with the pickles that published drafters have, and a PARD-2 one
    with its projection."""
    hub = dict(kwargs)
    folder = local_folder(repo_or_dir, kwargs)
    if Path(repo_or_dir).is_dir() or not (folder / "config.json").exists():
        return folder
    if any(folder.glob("*.safetensors")) and identify(read_config(folder), ()) != PARD2:
        return folder
    return local_folder(repo_or_dir, hub, PICKLES)


def weights_in(folder: Path, name: str = "pytorch_model.bin") -> dict[str, Tensor]:
    """All tensors of a folder: of its safetensors, or of its pickle, read without running anything.

    Raises:
        OSError: there are none, or a file is damaged, or a pickle of more than tensors.
    """
    if any(folder.glob("*.safetensors")):
        tensor_names(folder)  # says which file is damaged
        found: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= load_file(file)
        return found
    if not (folder / name).exists():
        raise OSError(f"{folder} has neither a .safetensors file nor a {name}: download or save it again.")
    return unpickled(folder / name)


def unpickled(file: Path) -> dict[str, Tensor]:
    """A pickle of tensors by name.

    Raises:
        OSError: it is damaged, or one of something else.
    """
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
            raise ValueError("it holds more than tensors")
    except Exception as error:  # a foreign pickle fails in many ways
        raise OSError(
            f"{file} holds no weights that can be read safely ({type(error).__name__}): ask its publisher for safetensors."
        ) from error
    return {str(name): tensor for name, tensor in loaded.items()}


def check_width(weights: dict[str, Tensor], num_features: int, target_hidden_size: int, title: str) -> None:
    """Refuse a first matrix that reads another number of features than the config names.

    Raises:
        ValueError: it does.
    """
    width, fc = num_features * target_hidden_size, weights.get("fc.weight")
    if fc is not None and (fc.ndim != 2 or fc.shape[1] != width):
        raise ValueError(
            f"This {title}'s fc reads {fc.shape[-1]} numbers, and {num_features} layers of {target_hidden_size} are {width}: its "
            "config belongs to another drafter, or names too few layers."
        )


def load_strictly(module: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Put all of `tensors` into `module`, in the dtype in which they were saved.

    Raises:
        OSError: some are missing.
        ValueError: some have no place there, or another shape.
    """
    have = dict(module.state_dict())
    if missing := sorted(have.keys() - tensors.keys()):
        raise OSError(f"{what} lacks {len(missing)} of its weights ({', '.join(missing[:3])}, …): download or convert it again.")
    if more := sorted(tensors.keys() - have.keys()):
        raise ValueError(f"{what} has {len(more)} tensors that have no place in it ({', '.join(more[:3])}, …): it is a variant.")
    for name, own in tensors.items():
        if own.shape != have[name].shape:
            raise ValueError(f"{what}: {name} is {tuple(own.shape)}, and its config asks for {tuple(have[name].shape)}.")
    module.to(tensors.get("fc.weight", next(iter(tensors.values()))).dtype)
    module.load_state_dict(tensors)


def vocabulary_of(offsets: Tensor, mask: Tensor | None, vocab_size: int | None) -> LongTensor:
    """The target's id of each draft id, from the offset table `d2t`.

    Args:
        offsets: int64 `(V',)`; draft id `j` is the target's `j + offsets[j]`.
        mask: bool `(V,)`, `t2d`: which of the target's ids are drafted; None where there is none.
        vocab_size: V, if it is known.

    Raises:
        ValueError: it is no offset table.
    """
    ids = torch.arange(len(offsets)) + offsets.long()
    most = vocab_size if mask is None else len(mask)
    increases = bool((ids[1:] > ids[:-1]).all())
    if not increases or int(ids.min()) < 0 or (most is not None and int(ids.max()) >= most):
        raise ValueError(
            "d2t is no table of offsets (the target's id minus the draft's own, rising ids): it may hold the ids themselves. "
            "Subtract arange(len(d2t)) from it."
        )
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids):
        raise ValueError("d2t and t2d speak of different tokens: the conversion of this drafter went wrong.")
    return ids


def proposal(algorithm: str, num_draft_tokens: int, target: str | None) -> dict[str, Any]:
    """What engines ask of a folder in the speculators layout: how many tokens are drafted, and for which model.

    Args:
        algorithm: the kind.
        num_draft_tokens: K.
        target: its name on the Hub, if it is known; vLLM wants one.
    """
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
        "verifier": {"name_or_path": target, "architectures": []},
    }


def refuse_pickles(folder: Path) -> None:
    """Refuse to publish a folder whose weights are pickled.

    Raises:
        OSError: they are.
    """
    if not any(folder.glob("*.safetensors")):
        raise OSError(f"{folder} has no .safetensors file: load the drafter and save_pretrained it, and publish that.")
