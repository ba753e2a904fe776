"""A PARD drafter's folder: whether it is whole, and what is to be said of it."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ...files import tensor_names
from ...hub.card import CardFields, provenance_of
from ..causal_lm import check_files
from ..config_file import read_config
from ..published import PARD2, identify, refuse_foreign
from .mask_token import MASK_KEYS, read_mask_token_id


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a whole PARD drafter with its tokenizer.

    Raises:
        OSError: something is missing or damaged.
        ValueError: it is something else.
    """
    config = read_config(folder)
    check_files(folder)
    if identify(config, ()) != PARD2:
        refuse_foreign(config, tensor_names(folder))
    elif not (folder / "warp_model.safetensors").exists():
        raise ValueError(f"{folder} is a PARD-2 drafter without warp_model.safetensors: load it and save_pretrained it.")
    read_mask_token_id(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def card_fields(folder: Path) -> CardFields:
    """For its model card."""
    config = read_config(folder)
    provenance = provenance_of(config)
    options = provenance.get("speculation_config")
    return CardFields(
        template="pard.jinja",
        library_name="transformers",
        relation="finetune",
        base_model=provenance.get("training", {}).get("base_model"),
        methods=("pard",),
        provenance=provenance,
        values={
            "config": config,
            "num_draft_tokens": options.get("num_draft_tokens", 12) if isinstance(options, dict) else 12,
            "mask_token_id": next((config[key] for key in MASK_KEYS if config.get(key) is not None), None),
        },
    )


def describe(folder: Path) -> list[tuple[str, Any]]:
    """What there is to say of a folder with at least a `config.json`."""
    raw = read_config(folder)
    reads = raw.get("pard2_target_layers") if identify(raw, ()) == PARD2 else None
    if reads is None:
        refuse_foreign(raw, tensor_names(folder) if any(folder.glob("*.safetensors")) else ())
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    ours = provenance_of(raw)
    training = ours.get("training", {})
    fits = "transformers with hf_paradraft"
    if "draft_vocab_size" in raw:
        fits += " alone: vLLM and TensorRT-LLM have no place for a head over fewer ids"
    else:
        fits += "; vLLM and TensorRT-LLM with a target of the same vocabulary size"
    tau = training.get("acceptance", {}).get("mean_emitted")
    return [
        ("kind", "PARD drafter" if reads is None else "PARD-2 drafter"),
        *([] if reads is None else [("reads", f"entries {reads} of the target's hidden states, -1 the normed last one")]),
        ("architecture", ", ".join(raw.get("architectures") or ["?"])),
        ("mask token", read_mask_token_id(config)),
        ("vocabulary", config.get_text_config().vocab_size),
        *([("guesses ids", raw["draft_vocab_size"])] if "draft_vocab_size" in raw else []),
        ("adapted from", training.get("base_model") or "not recorded"),
        ("trained with K", training.get("num_depths") or "not recorded"),
        ("τ on held-out rows", f"{tau:.2f}" if isinstance(tau, float) else "not recorded"),
        ("drafts K", (ours.get("speculation_config") or {}).get("num_draft_tokens", 12)),
        ("fits", fits),
    ]
