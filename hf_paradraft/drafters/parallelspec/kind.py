"""ParallelSpec, as the rest of the library knows it."""

from functools import partial
from pathlib import Path
from typing import Any

from ...training.target import refuse_missing
from ..kind import Kind, chains_and_trees
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


PARALLELSPEC = Kind(
    name=NAME,
    title=TITLE,
    drafters=(ParallelSpecDrafter,),
    recognises=is_parallelspec,
    load=load,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=partial(chains_and_trees, NAME),
)
