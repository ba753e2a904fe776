"""An autoregressive drafter's folder: a plain causal LM whose config says under `paradraft` that it is one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files import tensor_names
from ...hub.card import CardFields, provenance_of
from ..causal_lm import check_files
from ..config_file import read_config

KIND = "autoregressive"


def is_autoregressive(config: Mapping[str, Any]) -> bool:
    """Whether the config is that of a saved autoregressive drafter."""
    return provenance_of(config).get("kind") == KIND


def options_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How it was saved to be used; None for an ordinary model."""
    return provenance_of(config).get("speculation_config") if is_autoregressive(config) else None


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not whole.

    Raises:
        OSError: something is missing or damaged.
    """
    check_files(folder)
    tensor_names(folder)


def card_fields(folder: Path) -> CardFields:
    """For its model card."""
    config = read_config(folder)
    provenance = provenance_of(config)
    return CardFields(
        template="autoregressive.jinja",
        library_name="transformers",
        relation="finetune",
        base_model=provenance["training"].get("base_model"),
        methods=(KIND,),
        provenance=provenance,
        values={"config": config},
    )


def describe(folder: Path) -> list[tuple[str, Any]]:
    """What there is to say of a folder with at least a `config.json`."""
    config = read_config(folder)
    options = options_of(config)
    return [
        ("kind", "autoregressive drafter"),
        ("architecture", ", ".join(config.get("architectures") or ["?"])),
        ("vocabulary", config.get("vocab_size", "?")),
        ("drafts K", (options or {}).get("num_draft_tokens", "not recorded")),
        ("fits", "transformers with hf_paradraft; as a plain model, any engine's autoregressive speculation"),
    ]
