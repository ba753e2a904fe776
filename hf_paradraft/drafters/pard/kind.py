"""PARD, as the rest of the library knows it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ...protocol import SpeculationConfig
from ...protocol.config import TreeSize
from ..kind import Kind, Variant
from .export import export
from .model import PardDrafter
from .publish import card_fields, check_folder, describe


def _recognises(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _variants(drafter: PardDrafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    chains = [Variant(f"pard-chain-k{length}", drafter, SpeculationConfig(length, None)) for length in lengths]
    depth = max(lengths)
    names = ["auto" if size == "auto" else f"n{size}" for size in sizes]
    trees = [
        Variant(f"pard-tree-k{depth}-{name}", drafter, SpeculationConfig(depth, size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return [*chains, *trees]


def untrained(drafter: PardDrafter, seed: int = 0) -> PardDrafter:
    """A drafter of the same shape, dtype and place with random weights."""
    torch.manual_seed(seed)
    fresh = type(drafter).__bases__[1](drafter.config).to(drafter.device, drafter.dtype).eval()
    return PardDrafter.from_causal_lm(fresh, drafter.mask_token_id)


PARD = Kind(
    name="pard",
    title="PARD drafter",
    drafters=(PardDrafter,),
    recognises=_recognises,
    load=PardDrafter.from_pretrained,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=_variants,
    untrained=untrained,
    export=export,
)
