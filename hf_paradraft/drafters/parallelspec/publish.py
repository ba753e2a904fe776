"""A ParallelSpec drafter's folder: whether it is whole, and what is to be said of it."""

from pathlib import Path
from typing import Any

from ...files import tensor_names
from ...hub.card import CardFields, provenance_of
from ..config_file import read_config
from ..feature_drafter import card_fields as feature_card

NAME, TITLE = "parallelspec", "ParallelSpec drafter"


def is_parallelspec(folder: Path) -> bool:
    """Whether a folder holds one."""
    return (folder / "config.json").exists() and read_config(folder).get("model_type") == NAME


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not whole.

    Raises:
        OSError: something is missing or damaged.
    """
    if not is_parallelspec(folder):
        raise OSError(f"{folder} holds no ParallelSpec drafter.")
    if "mask_embeddings" not in tensor_names(folder):
        raise OSError(f"{folder} lacks the drafter's masks: save it again.")


def card_fields(folder: Path) -> CardFields:
    """For its model card."""
    return feature_card(folder, NAME, TITLE)


def describe(folder: Path) -> list[tuple[str, Any]]:
    """What there is to say of a folder with at least a `config.json`."""
    config = read_config(folder)
    layers, training = config.get("layers") or {}, provenance_of(config)["training"]
    return [
        ("kind", TITLE),
        ("style", config.get("style")),
        ("reads", "the normed last state" if config.get("style") == "eagle" else "tokens alone"),
        ("own layers", f"{layers.get('num_hidden_layers')} × {layers.get('hidden_size')} of {layers.get('model_type')}"),
        ("masks", f"{config.get('num_masks')}, so {config.get('num_masks', 0) + 1} guesses"),
        ("guesses ids", f"{config.get('draft_vocab_size') or layers.get('vocab_size')} of {layers.get('vocab_size')}"),
        ("trained for", training.get("target") or "not recorded"),
        ("fits", "transformers with hf_paradraft, attached to its target"),
    ]
