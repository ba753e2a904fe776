"""Configs of drafters' own layers, as publishers describe them: Llama's, Qwen3's, Qwen3.5's or
Gemma 4's.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import (
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from ..layers import GEMMA4, QWEN35
from .values import transformers_config

ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
# turning neighbours, as in GPT-J
PAIRED = {
    "is_neox_style": False,
    "rope_is_neox_style": False,
    "rope_interleaved": True,
}


def layers_config(described: Mapping[str, Any], names: Collection[str]) -> PreTrainedConfig:
    """Make the config of a drafter's layers, by tensors and architecture.

    The layers are Gemma 4's, Qwen3.5's, Qwen3's (queries and keys normed) or Llama's.

    Raises:
        ValueError: something that is no layer's config.
    """
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if not isinstance(size := described.get(name), int):
            raise ValueError(
                f"The drafter's config has no {name} (it is {size!r}): save or download it again."
            )
    first = (described.get("architectures") or [""])[0]
    if any(name.endswith("layer_scalar") for name in names) or str(first).startswith("Gemma4"):
        return _gemma4_config(described)
    if first == "Qwen35DSparkModel":  # queries are gated, norms offsets from 1, heads partly turned
        values = _fields(described, Qwen3_5TextConfig().to_dict().keys())
        return transformers_config(Qwen3_5TextConfig, values | _full_layers(described))
    kind = Qwen3Config if any(name.endswith("q_norm.weight") for name in names) else LlamaConfig
    values = _fields(described, kind().to_dict().keys() | ROPE)
    kinds = described.get("layer_types")
    if kinds is not None:  # Llama's own config has none, and goes by them all the same
        values["layer_types"] = kinds[: described["num_hidden_layers"]]
    if "sliding_attention" in (values.get("layer_types") or ()):
        if described.get("use_sliding_window") is False:
            raise ValueError(
                "The drafter's config has sliding layers and use_sliding_window false: it is one "
                "or the other."
            )
        if described.get("sliding_window") is None:
            raise ValueError(
                "The drafter's config has sliding layers and no sliding_window: save or download "
                "it again."
            )
        values |= {"sliding_window": described["sliding_window"], "use_sliding_window": True}
    elif kind is LlamaConfig:
        values.pop("layer_types", None)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return transformers_config(kind, values)


def _fields(described: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Take the fields of a class of layers from a description.

    Rotary parameters are those for texts: positions in several dimensions (mrope) are all alike
    there.
    """
    values = {
        name: value
        for name, value in described.items()
        if name in fields and name not in ("model_type", "dtype")
    }
    for name in ("rope_scaling", "rope_parameters"):
        if rope := values.get(name):
            values[name] = {
                key: "default" if value == "mrope" else value
                for key, value in rope.items()
                if key not in ("mrope_section", "mrope_interleaved")
            }
    return values


def _full_layers(described: Mapping[str, Any]) -> dict[str, Any]:
    """Say that all layers have full attention."""
    return {"layer_types": ["full_attention"] * described["num_hidden_layers"]}


def _gemma4_config(described: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the config of Gemma 4's layers, all of full attention.

    Their heads are those of the target's full layers.

    Raises:
        ValueError: layers with experts or with inputs of their own, which DeepSpec has none of.
    """
    for name, what in (
        ("enable_moe_block", "experts"),
        ("hidden_size_per_layer_input", "inputs for each layer"),
    ):
        if described.get(name):
            raise ValueError(
                f"This drafter has layers of Gemma 4 with {what} ({name}), which are not served."
            )
    values = _fields(described, Gemma4TextConfig().to_dict().keys() - {"per_layer_config"})
    # of newer files: the target's layers that differ, of which full ones are wider
    listed = (described.get("per_layer_config") or {}).values()
    layers = [layer for layer in listed if isinstance(layer, Mapping)]
    wide: Mapping[str, Any] = max(layers, key=lambda layer: layer.get("head_dim", 0), default={})
    values |= {
        "global_head_dim": described.get("global_head_dim")
        or wide.get("head_dim")
        or values.get("head_dim"),
        "num_global_key_value_heads": described.get("num_global_key_value_heads")
        or wide.get("num_key_value_heads"),
        **_full_layers(described),
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    return transformers_config(Gemma4TextConfig, values)


def paired(described: Mapping[str, Any], layers: PreTrainedConfig) -> bool:
    """Tell whether the rotary embedding turns neighbours (GPT-J), not a head's halves (GPT-NeoX).

    Raises:
        ValueError: it does in layers of Gemma 4 or Qwen3.5, of which it turns a part.
    """
    if (
        found := any(described.get(name) is said for name, said in PAIRED.items())
    ) and layers.model_type in (GEMMA4, QWEN35):
        raise ValueError(
            f"This drafter has layers of {layers.model_type} with an interleaved rotary embedding, "
            "which are not served."
        )
    return found


def with_draft_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe layers by a config whose `num_hidden_layers` may be the target's."""
    own = config.get("draft_num_hidden_layers")
    return config if own is None else {**config, "num_hidden_layers": own}
