"""ParallelSpec, as the rest of the library knows it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...protocol.config import TreeSize
from ...training.target import refuse_missing
from ..kind import Kind, Variant, chains_and_trees
from .model import ParallelSpecDrafter
from .publish import NAME, TITLE, card_fields, check_folder, describe, is_parallelspec


def load(folder: Path, *args: Any, **kwargs: Any) -> ParallelSpecDrafter:
    """The drafter in a folder."""
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("Drafters never need remote code: leave trust_remote_code unset.")
    check_folder(folder)
    drafter, info = ParallelSpecDrafter.from_pretrained(folder, *args, use_safetensors=True, output_loading_info=True, **kwargs)
    refuse_missing(info, "ParallelSpecDrafter", folder)
    return drafter.eval()


def _variants(drafter: ParallelSpecDrafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    return chains_and_trees(NAME, drafter, sorted({min(length, drafter.most_drafts) for length in lengths}), sizes)


PARALLELSPEC = Kind(
    name=NAME,
    title=TITLE,
    drafters=(ParallelSpecDrafter,),
    recognises=is_parallelspec,
    load=load,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=_variants,
)
