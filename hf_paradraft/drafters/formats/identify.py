"""The kind of a published drafter's folder, by its config and its tensors' names; never by its
`model_type`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from .layout import (
    DFLASH,
    DFLASH2,
    DSPARK,
    DSPINE,
    EAGLE3,
    MTP,
    PARD2,
    PEAGLE,
    XPRESS,
    architecture,
)
from .publishers import BLOCK_LAYOUTS, EAGLE3_LAYOUTS, MUSE

EAGLE4, LILICORR = "EAGLE-4 drafter", "LiLiCorr drafter"
TREEFLASH, ORTHRUS = "TreeFlash drafter", "model with Orthrus drafting"
SPECULATORS = {
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "dflash2": DFLASH2,
    "xpress": XPRESS,
    "mtp": MTP,
}
SERVED = {*SPECULATORS.values(), DSPINE}
NOT_SERVED = {
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


def identify(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Identify the kind of a published drafter, as "DFlash drafter"; None: it is unknown.

    Args:
        config: the content of `config.json`.
        names: names of all tensors of the folder.
    """
    if (kind := config.get("speculators_model_type")) is not None:
        return SPECULATORS.get(kind, f"speculators drafter of type {kind}")
    if config.get("pard2") or config.get("spd_type") == "pard2" or "pard2_target_layers" in config:
        return PARD2
    if (
        any(name.split(".")[-1] == "mask_hidden" for name in names)
        or "parallel_drafting_mask" in config
    ):
        return PEAGLE
    nested = config.get("dflash_config") or {}
    projector = nested.get("projector_type")
    if projector not in (None, "dflash"):
        return {"dspark": DSPARK, "domino": "Domino drafter"}.get(
            projector, f"DFlash relative ({projector})"
        )
    for begin, kind in RELATIVES.items():
        if any(key.startswith(begin) for key in (*config, *nested)):
            return kind
    marked = [kind for part, kind in TENSORS.items() if any(_has(name, part) for name in names)]
    if marked and marked[0] != DSPARK:
        return marked[0]
    layouts, first = (*BLOCK_LAYOUTS, *EAGLE3_LAYOUTS), architecture(config)
    kinds = [layout.classes[first] for layout in layouts if first in layout.classes]
    kind = kinds[0] if kinds else NOT_SERVED.get(first)
    if kind == DFLASH and (marked or config.get("markov_rank")):
        return DSPARK
    if kind is not None:
        return kind
    if first.endswith("Eagle3Model"):
        return EAGLE3
    if config.get("model_type") == MUSE or "dflash_config" in config:
        return DFLASH
    if marked:
        return DSPARK
    tops = {name.split(".")[0] for name in names}
    if {"fc", "hidden_norm"} <= tops or any(name.startswith("encoder.fc.") for name in names):
        return DFLASH
    if "fc" in tops:  # next to the first matrix of EAGLE's relatives
        return EAGLE3 if tops & {"midlayer", "lm_head"} else "EAGLE-1 or EAGLE-2 drafter"
    return "EAGLE-type drafter" if "eagle_config" in config or "eagle" in first.lower() else None


def _has(name: str, part: str) -> bool:
    """Tell whether a tensor's name has a part: one with a leading dot within, else at its start."""
    return part in name if part.startswith(".") else name.startswith(part)


def refuse_foreign(kind: str | None) -> None:
    """Refuse a drafter that is no causal LM, as PARD's and PARD-2's are.

    Args:
        kind: its title, as `identify` gives it.

    Raises:
        ValueError: it is one.
    """
    if kind in (None, PARD2):
        return
    who = f"{'an' if kind.startswith((*'AEIOUX', MTP)) else 'a'} {kind}"
    if kind in SERVED:
        raise ValueError(
            f"This is {who}, which reads the target's hidden states: load it with "
            "AutoDrafter.from_pretrained."
        )
    raise ValueError(f"This is {who}, which is not served here.")
