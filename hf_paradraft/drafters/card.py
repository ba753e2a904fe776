"""The card of a kind's folder: its base, its use, its training."""

from typing import Any

from ..hub.card import CardFields
from .formats.folder import DrafterFolder
from .formats.values import provenance_of


def card_fields(kind: Any, folder: DrafterFolder) -> CardFields:
    """Collect the fields of a model card that are the drafter's own.

    Args:
        kind: class of the drafter.
        folder: the folder of a whole drafter.

    Raises:
        OSError, ValueError: a damaged file.
    """
    config = kind.read_description(folder)
    provenance = provenance_of(
        {"paradraft": folder.record} if kind.is_adapter and folder.record else config
    )
    base = provenance["training"].get(kind.made_from)
    return CardFields(
        template=kind.template,
        library_name="peft"
        if kind.is_adapter
        else "transformers"
        if kind.has_tokenizer
        else "hf-paradraft",
        relation="adapter" if kind.is_adapter else "finetune",
        base_model=base or (config.get("base_model_name_or_path") if kind.is_adapter else None),
        kind=kind.kind,
        name=folder.path.resolve().name,
        provenance=provenance,
        values={"config": config, "title": kind.title, "about": kind.about},
    )
