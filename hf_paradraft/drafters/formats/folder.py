"""A drafter's folder: its configs and the names of its tensors, each read once, and the kind of a
published drafter that they say.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ...files import FILES, local_folder, read_json
from .files import PICKLES, names_in
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
from .values import provenance_of, read_config

# the record lies next to PEFT's own configs
CONFIG, ADAPTER, RECORD = (
    "config.json",
    "adapter_config.json",
    "paradraft.json",
)

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


class DrafterFolder:
    """A folder with a drafter's files, read when they are asked for, and not again.

    Attributes:
        path: the folder's path.
    """

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def holds(self, name: str) -> bool:
        """Tell whether a file of that name is there."""
        return (self.path / name).exists()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The `config.json`, with checked values; an error where it is missing or damaged."""
        return read_config(self.path)

    @cached_property
    def adapter(self) -> dict[str, Any]:
        """The config that PEFT gives an adapter; an error where it is missing or damaged."""
        return read_json(self.path / ADAPTER)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record of an adapter, in its folder; empty where there is none."""
        return read_json(self.path / RECORD) if self.holds(RECORD) else {}

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """How it was made, and how to use it, as `config.json` says that."""
        return provenance_of(self.config)

    @cached_property
    def names(self) -> list[str]:
        """The names of all tensors; none where there are no weights."""
        return names_in(self.path)

    @cached_property
    def identified(self) -> str | None:
        """The kind of a published drafter, as `identify` says it."""
        return identify(self.config, self.names) if self.holds(CONFIG) else None


def find_folder(repo_or_dir: str | Path, kwargs: dict[str, Any]) -> DrafterFolder:
    """Find or fetch a drafter's folder, with pickles only where they are needed.

    From the Hub, they are fetched for a drafter without safetensors, as some published ones are,
    and for a PARD-2 drafter's projection.

    Args:
        repo_or_dir: a folder, or a Hub id.
        kwargs: arguments of `local_folder`, which takes its own out.
    """
    hub = dict(kwargs)
    folder = DrafterFolder(local_folder(repo_or_dir, kwargs))
    if Path(repo_or_dir).is_dir() or not folder.holds(CONFIG):
        return folder
    if any(folder.path.glob("*.safetensors")) and identify(folder.config, ()) != PARD2:
        return folder
    return DrafterFolder(local_folder(repo_or_dir, hub, (*FILES, *PICKLES)))


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
