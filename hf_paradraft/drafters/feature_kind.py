"""What the kinds of feature drafters have in common, as the rest of the library knows them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..hub.card import provenance_of
from .config_file import read_config
from .feature_drafter import FeatureDrafter, card_fields
from .kind import Kind, chains_and_trees
from .published import identify, kind_in, names_in, refuse_pickles

Described = Callable[[dict[str, Any], list[str]], list[tuple[str, Any]]]


def feature_kind(drafter: type[FeatureDrafter], found_as: tuple[str, ...], described: Described) -> Kind:
    """A kind of feature drafter.

    Args:
        drafter: its class.
        found_as: what `identify` calls its folders.
        described: what there is to say of a config and tensors' names.
    """

    def describe(folder: Path) -> list[tuple[str, Any]]:
        config, names = read_config(folder), names_in(folder)
        training = provenance_of(config)["training"]
        return [
            ("kind", identify(config, names)),
            *described(config, names),
            ("trained for", training.get("target") or "not recorded"),
            ("fits", "transformers with hf_paradraft, attached to its target"),
        ]

    def check(folder: Path) -> None:
        refuse_pickles(folder)
        drafter.read_folder(folder)

    return Kind(
        name=drafter.kind,
        title=drafter.title,
        drafters=(drafter,),
        recognises=lambda folder: kind_in(folder) in found_as,
        load=drafter.from_pretrained,
        check=check,
        card=lambda folder: card_fields(folder, drafter.kind, drafter.title),
        describe=describe,
        variants=partial(chains_and_trees, drafter.kind),
    )


def feature_names(features: tuple) -> str:
    """Feature keys for people."""
    names = {-1: "the embedding's output", "normed": "the normed last state"}
    return ", ".join(str(names.get(key, f"output of layer {key}")) for key in features)
