"""SafeAI's and SpecForge's folders of EAGLE-3 and P-EAGLE, which do not say whether layers' numbers count outputs or inputs."""

from collections.abc import Mapping
from typing import Any

from .common import eagle3_parts, feature_keys, layers_config


def eagle3(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Arguments of an `Eagle3Config`.

    Raises:
        ValueError: as for `eagle3_parts`.
    """
    nested = config.get("eagle_config") or {}
    described = {**config, "num_hidden_layers": config.get("draft_num_hidden_layers", config.get("num_hidden_layers"))}
    listed = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    if listed:
        note = f"{list(listed)}, counted as outputs or inputs: settled by the target's number of layers"
    else:
        note = "default: 2, L // 2 and L - 3 of the target's tuple of states, for none are named"
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    return {
        **eagle3_parts(config, nested, names, layers_config(described, names)),
        "ambiguous": feature_keys(listed or None),
        "num_draft_tokens": next((method.get("speculative_tokens") for method in methods), None),
        "layout": "SafeAI or SpecForge",
        "notes": [("layers", note)],
    }
