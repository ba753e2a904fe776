"""Layers of Gemma 4, which DeepSpec's drafters for it have: norms on both sides of each part, unscaled scores, keys as values."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Gemma4TextConfig, PreTrainedConfig

from .config_file import transformers_config

GEMMA4 = "gemma4_text"
ITS_OWN = "layer_scalar"  # a tensor that other layers do not have
LEFT_OUT = {"model_type", "dtype", "per_layer_config", "layer_types", "num_kv_shared_layers"}


def is_gemma4(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Whether a drafter's layers are Gemma 4's: by its tensors, or, where there are none, by its architecture."""
    first = (config.get("architectures") or [""])[0]
    return any(name.endswith(ITS_OWN) for name in tensors) or str(first).startswith("Gemma4")


def gemma4_config(described: Mapping[str, Any]) -> PreTrainedConfig:
    """The layers' own config: all of full attention, with the heads of the target's full layers.

    Raises:
        ValueError: layers with experts or with inputs of their own, which DeepSpec has none of.
    """
    for name, what in (("enable_moe_block", "experts"), ("hidden_size_per_layer_input", "inputs for each layer")):
        if described.get(name):
            raise ValueError(f"This drafter has layers of Gemma 4 with {what} ({name}), which are not served.")
    known = Gemma4TextConfig().to_dict().keys() - LEFT_OUT
    own = {name: value for name, value in described.items() if name in known}
    listed = described.get("per_layer_config")  # of newer files: the target's layers that differ, of which full ones are wider
    layers = [layer for layer in listed.values() if isinstance(layer, Mapping)] if isinstance(listed, Mapping) else []
    wide: Mapping[str, Any] = max(layers, key=lambda layer: layer.get("head_dim", 0), default={})
    heads = {
        "global_head_dim": described.get("global_head_dim") or wide.get("head_dim") or own.get("head_dim"),
        "num_global_key_value_heads": described.get("num_global_key_value_heads") or wide.get("num_key_value_heads"),
    }
    kinds = ["full_attention"] * described["num_hidden_layers"]
    ours = {"layer_types": kinds, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    return transformers_config(Gemma4TextConfig, {**own, **heads, **ours})


def behind_attention(layer: nn.Module, states: Tensor, attended: Tensor) -> Tensor:
    """What a layer makes of its input and of what its attention gave, `(B, M, hidden)` each."""
    states = states + layer.post_attention_layernorm(attended)
    inner = layer.mlp(layer.pre_feedforward_layernorm(states))
    return (states + layer.post_feedforward_layernorm(inner)) * layer.layer_scalar
