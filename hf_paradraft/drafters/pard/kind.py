"""PARD, as the rest of the library knows it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..kind import Kind, chains_and_trees
from .export import export
from .model import PardDrafter
from .publish import card_fields, check_folder, describe


def _recognises(folder: Path) -> bool:
    return (folder / "config.json").exists()


def untrained(drafter: PardDrafter, seed: int = 0) -> PardDrafter:
    """A drafter of the same shape, dtype and place with random weights."""
    torch.manual_seed(seed)
    fresh: Any = type(drafter)(drafter.config)
    fresh = fresh.to(drafter.device, drafter.dtype).eval()
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
    variants=partial(chains_and_trees, "pard"),
    untrained=untrained,
    export=export,
)
