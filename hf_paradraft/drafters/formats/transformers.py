"""transformers' own DFlash assistants."""

from collections.abc import Mapping
from typing import Any

from .common import block_parts, feature_keys


def blocks(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the arguments of a `BlockConfig` from the config of a DFlash assistant of transformers.

    Raises:
        ValueError: something is missing that may not be assumed.
    """
    kinds = config.get("layer_types") or ["sliding_attention"] * config.get("num_hidden_layers", 5)
    features = feature_keys(config.get("target_layer_ids"))
    if features is None:
        raise ValueError("This DFlash assistant names no layers (target_layer_ids): save it again.")
    return {
        **block_parts(config, {}, names, {**config, "layer_types": kinds, "use_sliding_window": True}, "target_layer_ids"),
        "features": features,
        "fill_in": True,
        "layout": "transformers",
    }
