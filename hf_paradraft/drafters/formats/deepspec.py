"""DeepSpec's folders: DSpark, DFlash and EAGLE-3, whose numbers of layers count outputs."""

from collections.abc import Mapping
from typing import Any

from .common import block_parts, eagle3_parts, feature_keys, guesses_from_anchor, with_draft_layers

BLOCK_KEYS = "target_layer_ids final_logit_softcapping logits_start sample_from_anchor dflash_query_causal"
EAGLE3_KEYS = "target_layer_ids ttt_length eagle_config"


def blocks(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the arguments of a `BlockConfig` from a config in DeepSpec's layout.

    Raises:
        ValueError: something is missing that may not be assumed.
    """
    features = feature_keys(config.get("target_layer_ids"))
    if features is None:
        raise ValueError("This DeepSpec drafter names no layers (target_layer_ids): download it again.")
    parts, from_anchor = block_parts(config, {}, names, config, BLOCK_KEYS), guesses_from_anchor(config)
    kinds = tuple(dict.fromkeys(getattr(parts["layers"], "layer_types", None) or ["full_attention"]))
    return {
        **parts,
        "features": features,
        "fill_in": from_anchor is False,
        "causal": kinds if config.get("dflash_query_causal") else (),
        "softcap": config.get("final_logit_softcapping"),
        "layout": "DeepSpec",
    }


def eagle3(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the arguments of an `Eagle3Config` from a config in DeepSpec's layout.

    Raises:
        ValueError: as for `eagle3_parts`.
    """
    return {
        **eagle3_parts(config, config.get("eagle_config") or {}, names, with_draft_layers(config), EAGLE3_KEYS),
        "features": feature_keys(config["target_layer_ids"]),
        "num_draft_tokens": config.get("ttt_length"),
        "layout": "DeepSpec",
    }
