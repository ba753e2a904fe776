"""The keys of a published drafter's config: obeyed, without effect, or refused by name.

A drafter that ignores a key of its file drafts, and is wrong without a sign: it costs acceptance,
which is not compared.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from ..layers import QWEN35
from .layer_configs import PAIRED, ROPE

# of windows; and of Gemma 4, whose newer configs have them by layer
OF_LAYERS = {
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "global_head_dim",
    "num_global_key_value_heads",
}
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
PARTS = (
    "dflash_config",
    "eagle_config",
    "dspine_config",
)
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}  # which may turn heads differently
ROPE_KEYS = set(
    "rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate short_factor long_factor low_freq_factor "
    "high_freq_factor partial_rotary_factor finetuned mrope_section mrope_interleaved".split()
)


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
