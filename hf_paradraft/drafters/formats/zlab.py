"""Folders of z-lab and SpecForge: DFlash, and DSpark by the same classes."""

from collections.abc import Mapping
from typing import Any

from .common import block_parts, feature_keys, guesses_from_anchor

KEYS = (
    "dflash_config projector_type target_layer_ids use_swa swa_window_size is_causal causal final_logit_softcapping "
    "input_embedding_scale output_multiplier use_aux_hidden_state logits_start sample_from_anchor"
)
PROJECTORS = (None, "dflash", "dspark")


def spread(count: int, layers: int) -> tuple[int, ...]:
    """Choose the layers that are read where a config names none: `count` of them, evenly from 1 to L - 3."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) for index in range(count))


def blocks(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the arguments of a `BlockConfig` from a config in z-lab's or SpecForge's layout.

    Raises:
        ValueError: something is missing that may not be assumed, or a relative that is not served.
    """
    nested = config.get("dflash_config") or {}
    projector = nested.get("projector_type")
    if projector not in PROJECTORS:
        raise ValueError(f"A relative of DFlash (projector_type {projector!r}) that is not served.")
    described = dict(config)
    windowed = bool(nested.get("use_swa")) and not config.get("layer_types")
    if windowed:
        described["layer_types"] = ["sliding_attention"] * config.get("num_hidden_layers", 0)
        described["sliding_window"] = nested.get("swa_window_size") or config.get("sliding_window")
    parts = block_parts(config, nested, names, described, KEYS)
    kinds = tuple(dict.fromkeys(getattr(parts["layers"], "layer_types", None) or ["full_attention"]))
    said = next((value for value in (config.get("is_causal"), nested.get("causal")) if value is not None), None)
    if said is None:
        causal = tuple(kind for kind in kinds if kind == "sliding_attention" and not windowed)
    else:
        causal = kinds if said else ()
    features, notes = feature_keys(nested.get("target_layer_ids", config.get("target_layer_ids"))), []
    if features is None:
        count, total = config.get("num_hidden_layers"), parts["target_layers"]
        if count is None or total is None:
            raise ValueError("This DFlash drafter names neither its layers (target_layer_ids) nor num_target_layers.")
        features = spread(count, total)
        notes.append(("layers", "default: none are named"))
    dspark = projector == "dspark" or any(name.startswith(("markov_head.", "logit_head.")) for name in names)
    dspark = dspark or "DSpark" in (config.get("architectures") or [""])[0]
    from_anchor = guesses_from_anchor({**config, **nested})
    return {
        **parts,
        "features": features,
        "fill_in": not (dspark if from_anchor is None else from_anchor),
        "causal": causal,
        "softcap": nested.get("final_logit_softcapping"),
        "embedding_scale": nested.get("input_embedding_scale") or 1.0,
        "logit_scale": nested.get("output_multiplier"),
        "layout": "SpecForge" if dspark else "z-lab",
        "notes": notes,
    }
