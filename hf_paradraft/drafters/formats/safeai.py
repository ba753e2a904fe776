"""SafeAI's and SpecForge's folders of EAGLE-3 and P-EAGLE, which do not say whether layers' numbers count outputs or inputs."""

from collections.abc import Mapping
from typing import Any

from .common import NO_LAYERS, eagle3_parts, feature_keys, with_draft_layers

KEYS = "eagle_config eagle_aux_hidden_state_layer_ids"


def eagle3(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Read the arguments of an `Eagle3Config` from a config in SafeAI's or SpecForge's layout.

    Raises:
        ValueError: as for `eagle3_parts`.
    """
    nested = config.get("eagle_config") or {}
    listed = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    settled = ("layers", f"{listed}, counted as outputs or inputs: settled by the target's number of layers")
    return {
        **eagle3_parts(config, nested, names, with_draft_layers(config), KEYS),
        "ambiguous": feature_keys(listed or None),
        "layout": "SafeAI or SpecForge",
        "notes": [settled if listed else NO_LAYERS],
    }
