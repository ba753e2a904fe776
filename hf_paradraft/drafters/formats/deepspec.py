"""DeepSpec's folders: DSpark, DFlash and EAGLE-3, whose numbers of layers count outputs."""

from collections.abc import Mapping
from typing import Any

from .common import block_parts, eagle3_parts, feature_keys, with_draft_layers


def blocks(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Arguments of a `BlockConfig`.

    Raises:
        ValueError: something is missing that may not be assumed.
    """
    features = feature_keys(config.get("target_layer_ids"))
    if features is None:
        raise ValueError("This DeepSpec drafter names no layers (target_layer_ids): download it again.")
    return {
        **block_parts(config, {}, names, config),
        "features": features,
        "fill_in": False,
        "softcap": config.get("final_logit_softcapping"),
        "layout": "DeepSpec",
    }


def eagle3(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Arguments of an `Eagle3Config`.

    Raises:
        ValueError: as for `eagle3_parts`.
    """
    return {
        **eagle3_parts(config, config.get("eagle_config") or {}, names, with_draft_layers(config)),
        "features": feature_keys(config["target_layer_ids"]),
        "num_draft_tokens": config.get("ttt_length"),
        "layout": "DeepSpec",
    }
