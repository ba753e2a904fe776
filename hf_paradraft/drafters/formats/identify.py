"""The kind of a published drafter's folder, by its config and its tensors' names; never by its
`model_type`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .deepspec import CLASSES
from .layout import architecture
from .transformers import MODEL_TYPE

DFLASH, DSPARK, EAGLE3 = "DFlash drafter", "DSpark drafter", "EAGLE-3 drafter"
PEAGLE = "P-EAGLE drafter"
PARD2, MTP = "PARD-2 drafter", "MTP drafter"
DFLASH2, XPRESS, DSPINE = "DFlash2 drafter", "XPress drafter", "DSpine drafter"
EAGLE4, LILICORR = "EAGLE-4 drafter", "LiLiCorr drafter"
TREEFLASH, ORTHRUS = "TreeFlash drafter", "model with Orthrus drafting"
SERVED = (DFLASH, DFLASH2, DSPARK, EAGLE3, PEAGLE, PARD2, MTP, XPRESS, DSPINE)
SPECULATORS = {
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "dflash2": DFLASH2,
    "xpress": XPRESS,
    "mtp": MTP,
}
ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "DFlashQwen3XPressModel": XPRESS,
    "DSpineDraftModel": DSPINE,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "Lfm2DSparkDraftModel": DSPARK,
    "Eagle3Speculator": EAGLE3,
    "PEagleSpeculator": PEAGLE,
    "PEagleDraftModel": PEAGLE,
    "LlamaForCausalLMEagle3": EAGLE3,
    "Qwen3XPressModel": XPRESS,
    "Qwen35DSparkModel": DSPARK,
    "LiLiCorrDraftModel": LILICORR,
    "LlamaForCausalLMEagle4": EAGLE4,
    "TreeFlashDraftModel": TREEFLASH,
    "DCOCODraftModel": "DCOCO drafter",
    "OrthrusLM": ORTHRUS,
}
# by the beginning of a tensor's name, or a part of it
TENSORS = {
    "candidate_selector.": DFLASH2,
    ".attention_conv.": DFLASH2,
    "injection.": DSPINE,
    "efficient_lm_head": EAGLE4,
    ".q_proj_diff.": ORTHRUS,
    "xpress_head.": XPRESS,
    "refiner_head.": XPRESS,
    "markov_head.": DSPARK,
    "logit_head.": DSPARK,
}
# Relatives that are not served, by the beginning of a key of theirs, at the top or in
# `dflash_config`.
RELATIVES = {"treeflash_": TREEFLASH, "lilicorr_": LILICORR, "efficient_lm_head": EAGLE4}


def identify(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Identify the kind of a published drafter, as "DFlash drafter"; None: it is unknown.

    Args:
        config: the content of `config.json`.
        tensors: names of all tensors of the folder.
    """
    names = list(tensors)
    if (kind := config.get("speculators_model_type")) is not None:
        return SPECULATORS.get(kind, f"speculators drafter of type {kind}")
    if config.get("pard2") or config.get("spd_type") == "pard2" or "pard2_target_layers" in config:
        return PARD2
    if (
        any(name.split(".")[-1] == "mask_hidden" for name in names)
        or "parallel_drafting_mask" in config
    ):
        return PEAGLE
    first = architecture(config)
    projector = (config.get("dflash_config") or {}).get("projector_type")
    if projector not in (None, "dflash"):
        return {"dspark": DSPARK, "domino": "Domino drafter"}.get(
            projector, f"DFlash relative ({projector})"
        )
    keys = [*config, *(config.get("dflash_config") or {})]
    if (
        relative := next(
            (kind for begin, kind in RELATIVES.items() for key in keys if key.startswith(begin)),
            None,
        )
    ) is not None:
        return relative
    if (by_tensors := _by_tensors(names)) in (DFLASH2, XPRESS, DSPINE, EAGLE4, ORTHRUS):
        return by_tensors
    if first in ARCHITECTURES:
        return (
            DSPARK
            if ARCHITECTURES[first] == DFLASH and by_tensors == DSPARK
            else ARCHITECTURES[first]
        )
    if first in CLASSES:
        return DSPARK if config.get("markov_rank") else DFLASH
    if first.endswith("Eagle3Model"):
        return EAGLE3
    if config.get("model_type") == MODEL_TYPE or "dflash_config" in config:
        return DFLASH
    return by_tensors or (
        "EAGLE-type drafter" if "eagle_config" in config or "eagle" in first.lower() else None
    )


def _by_tensors(names: list[str]) -> str | None:
    """Identify a kind by its tensors' names, which begin as one of a kind does, or have it within.

    EAGLE's relatives are told apart only by the tensors next to the first matrix.
    """
    for part, kind in TENSORS.items():
        if any(name.startswith(part) or (part.startswith(".") and part in name) for name in names):
            return kind
    tops = {name.split(".")[0] for name in names}
    if "fc" in tops or any(name.startswith("encoder.fc.") for name in names):
        if "hidden_norm" in tops or "encoder" in tops:
            return DFLASH
        return EAGLE3 if "midlayer" in tops or "lm_head" in tops else "EAGLE-1 or EAGLE-2 drafter"
    return None


def refuse_foreign(kind: str | None) -> None:
    """Refuse a drafter that reads the target's features where a plain causal LM is wanted.

    Args:
        kind: its title, as `identify` gives it.

    Raises:
        ValueError: it is one.
    """
    if kind is None:
        return
    who = f"{'an' if kind.startswith((*'AEIOUX', MTP)) else 'a'} {kind}"
    if kind in SERVED:
        raise ValueError(
            f"This is {who}, which reads the target's hidden states: load it with "
            "AutoDrafter.from_pretrained."
        )
    raise ValueError(f"This is {who}, which is not served here.")
