"""The keys of a published drafter's config: those that describe its layers (Llama's, Qwen3's,
Qwen3.5's or Gemma 4's), those without effect, and those that are refused by name.

A drafter that ignores a key of its file drafts, and is wrong without a sign: it costs acceptance,
which is not compared.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    Gemma4TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from ..layers import GEMMA4, QWEN35
from .values import transformers_config

ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
# turning neighbours, as in GPT-J
PAIRED = {"is_neox_style": False, "rope_is_neox_style": False, "rope_interleaved": True}
# of windows; and of Gemma 4, whose newer configs have them by layer
OF_LAYERS = set(
    "layer_types sliding_window use_sliding_window max_window_layers global_head_dim "
    "num_global_key_value_heads".split()
)
GATED = "enable_qwen35_gated_q_proj"
# Switches of which one position is served. No tensor's name tells the meaning of the other.
SERVED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    GATED: (False,),
    "gated_q_proj": (False,),
    "log_snr_conditioning": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
# Keys of its training, keys that the tensors make superfluous, and copies from the target's own
# config.
NO_DIFFERENCE = set(
    "num_jacobi_passes xpress_num_passes xpress_topc xpress_compile_head num_speculative_steps "
    "speculators_version num_anchors max_anchors step_loss_decay loss_decay_gamma ttt_length "
    "confidence_head_alpha pure_draft_prefix_len target_model_type target_text_model_type "
    "target_model_name_or_path embed_requires_grad num_eagle_features "
    "parallel_draft_heads_num_layers attention_mode has_lm_head min_log_snr max_log_snr paradraft "
    "kind attn_output_gate full_attention_interval mamba_ssm_dtype mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings is_llama_config pretraining_tp unk_token_id unsloth_version "
    "unsloth_fixed transformers.js_config auto_map torch_dtype attn_implementation "
    "_attn_implementation _attn_implementation_autoset tie_word_embeddings head_type torchscript "
    "use_bfloat16 tf_legacy_loss pruned_heads cross_attention_hidden_size add_cross_attention "
    "is_decoder tie_encoder_decoder finetuning_task tokenizer_class prefix sep_token_id "
    "task_specific_params per_layer_config model_type speculators_model_type speculators_config "
    "transformer_layer_config parallel_drafting_mask draft_num_hidden_layers ce_weight "
    "alignment_weight alignment_warmup_steps replacement_layers replacement_probability "
    "replacement_hold_ratio replacement_end_ratio candidate_mass_threshold".split()
)
NO_DIFFERENCE |= PreTrainedConfig().to_dict().keys() | GenerationConfig().to_dict().keys()
# of configs, in addition to the one that describes layers
PARTS = ("dflash_config", "eagle_config", "dspine_config")
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}  # which may turn heads differently
ROPE_KEYS = set(
    "rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate short_factor long_factor low_freq_factor "
    "high_freq_factor partial_rotary_factor finetuned mrope_section mrope_interleaved".split()
)


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


def check_keys(said: Any) -> None:
    """Refuse a config with a key or a switch that is not served.

    A key is served if its layout obeys it, a switch in some positions only.

    Args:
        said: the `Said` of a published drafter, after all that counts was asked for.

    Raises:
        ValueError: it has one.
    """
    gated = {GATED} if said.layers.model_type == QWEN35 else ()  # as these layers are
    config = without(said.config, gated)
    described = config.get("transformer_layer_config")
    of_layers = ROPE | OF_LAYERS | type(said.layers)().to_dict().keys()
    of_layers |= said.layout.layer_names.keys()
    parts = {*PARTS, said.layout.part} - {""}
    everywhere = NO_DIFFERENCE | PAIRED.keys() | parts
    top = everywhere | said.asked[""]
    if isinstance(described, Mapping):
        _check(described, top | of_layers | _copied(described), "transformer_layer_config.")
    else:
        top |= of_layers | _copied(config)
    _check(config, top, "")
    for name in parts:
        _check(config.get(name) or {}, everywhere | said.asked[name], f"{name}.")
    check_rope(config)
    check_rope(described or {})


def check_rope(config: Mapping[str, Any]) -> None:
    """Refuse rotary parameters of a name that transformers does not have.

    Raises:
        ValueError: it has one.
    """
    for name in ("rope_parameters", "rope_scaling"):
        turned = config.get(name) or {}
        _check(turned, ROPE_KEYS | KINDS_OF_LAYERS, f"{name}.")
        for kind in KINDS_OF_LAYERS:
            _check(turned.get(kind) or {}, ROPE_KEYS, f"{name}.")


def check_described(config: Mapping[str, Any], known: set[str]) -> None:
    """Refuse unknown keys of a config whose layers the target's own class reads.

    Arguments as for `check_keys`, and the keys that are obeyed.

    Raises:
        ValueError: it has one.
    """
    _check(config, known | NO_DIFFERENCE | PAIRED.keys() | ROPE, "")
    check_rope(config)


def without(config: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Leave keys out of a config and of its parts, whose user knows that they make no difference.

    Args:
        config: the config as it was read.
        ignored: names, as `check_keys` says them, or their last parts.
    """
    last = {name.split(".")[-1] for name in ignored}
    return {
        name: without(value, last) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in last
    }


def _copied(config: Mapping[str, Any]) -> set[str]:
    """List the fields of the model that a config was copied from.

    The publishers' layers (Qwen3's, Llama's) do not use them.
    """
    if (model_type := config.get("model_type")) not in CONFIG_MAPPING:
        return set()
    return set(inspect.signature(CONFIG_MAPPING[model_type]).parameters)


def _check(config: Mapping[str, Any], known: set[str], inside: str) -> None:
    for name, value in config.items():
        if value is None:
            continue
        if name in SERVED and value not in SERVED[name]:
            raise ValueError(
                f"This drafter's config says {inside}{name} = {value!r:.50}, a variant that is not "
                "served."
            )
        if name not in known and name not in SERVED:
            raise ValueError(
                f"This drafter's config has a key that nothing here obeys: {inside}{name} = "
                f"{value!r:.50}. Ignored, it may make the drafter guess wrongly without a sign. "
                f"Where it makes no difference, pass ignore_keys=[{name!r}]."
            )
