"""Autoregressive drafters, as the rest of the library knows them."""

from collections.abc import Sequence
from pathlib import Path

from ...files import read_config
from ...protocol import SpeculationConfig
from ...protocol.config import TreeSize
from ..kind import Kind, Variant
from .drafter import AutoregressiveDrafter
from .publish import KIND, card_fields, check_folder, describe, is_autoregressive


def _recognises(folder: Path) -> bool:
    return (folder / "config.json").exists() and is_autoregressive(read_config(folder))


def _variants(drafter: AutoregressiveDrafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    chains = [Variant(f"{KIND}-chain-k{length}", drafter, SpeculationConfig(length, None)) for length in lengths]
    names = ["auto" if size == "auto" else f"n{size}" for size in sizes]
    depth = max(lengths)
    trees = [
        Variant(f"{KIND}-tree-k{depth}-{name}", drafter, SpeculationConfig(depth, size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return [*chains, *trees]


AUTOREGRESSIVE = Kind(
    name=KIND,
    title="autoregressive drafter",
    drafters=(AutoregressiveDrafter,),
    recognises=_recognises,
    load=AutoregressiveDrafter.from_pretrained,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=_variants,
)
