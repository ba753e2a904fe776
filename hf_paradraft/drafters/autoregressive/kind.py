"""Autoregressive drafters, as the rest of the library knows them."""

from functools import partial
from pathlib import Path

from ..config_file import read_config
from ..kind import Kind, chains_and_trees
from .drafter import AutoregressiveDrafter
from .publish import KIND, card_fields, check_folder, describe, is_autoregressive


def _recognises(folder: Path) -> bool:
    return (folder / "config.json").exists() and is_autoregressive(read_config(folder))


AUTOREGRESSIVE = Kind(
    name=KIND,
    title="autoregressive drafter",
    drafters=(AutoregressiveDrafter,),
    recognises=_recognises,
    load=AutoregressiveDrafter.from_pretrained,
    check=check_folder,
    card=card_fields,
    describe=describe,
    variants=partial(chains_and_trees, KIND),
)
