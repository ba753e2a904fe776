"""A PPD adapter's folder: whether it is whole, and what is to be said of it."""

from pathlib import Path
from typing import Any

from ...files import read_json, tensor_names
from ...hub.card import CardFields, provenance_of
from .config import PpdConfig


def read_adapter(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` of a PPD adapter.

    Raises:
        OSError: it is missing or not JSON.
        ValueError: an adapter of another kind.
    """
    config = read_json(folder / "adapter_config.json")
    if (kind := config.get("peft_type")) != "PPD":
        raise ValueError(f"{folder} is a PEFT adapter of type {kind}, not a drafter: use PEFT's own PeftModel for it.")
    return config


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a whole PPD adapter.

    Raises:
        OSError: something is missing or damaged.
        ValueError: it is something else.
    """
    read_adapter(folder)
    if not (folder / "adapter_model.safetensors").exists():
        raise OSError(f"{folder} has no adapter_model.safetensors: save the adapter there again.")
    tensor_names(folder)


def card_fields(folder: Path) -> CardFields:
    """For its model card."""
    config = read_adapter(folder)
    record = folder / "paradraft.json"
    provenance = provenance_of({"paradraft": read_json(record)} if record.exists() else config)
    return CardFields(
        template="ppd.jinja",
        library_name="peft",
        relation="adapter",
        base_model=provenance.get("training", {}).get("base_model") or config.get("base_model_name_or_path"),
        methods=("ppd",),
        provenance=provenance,
        values={"config": config},
    )


def describe(folder: Path) -> list[tuple[str, Any]]:
    """What there is to say of a folder with at least an `adapter_config.json`."""
    read_adapter(folder)
    adapter = PpdConfig.from_pretrained(str(folder))
    first = adapter.accuracy and ", ".join(f"{100 * row[0]:.0f} %" for row in adapter.accuracy)
    return [
        ("kind", "PPD adapter (prompt tokens)"),
        ("base model", adapter.base_model_name_or_path or "not recorded"),
        ("prompt tokens", f"{adapter.num_prompt_tokens} × {adapter.num_ensembles}"),
        ("base's embedding", f"{adapter.vocab_size} × {adapter.hidden_size}"),
        ("right, by distance", first or "not calibrated"),
        ("fits", "transformers with hf_paradraft and PEFT"),
    ]
