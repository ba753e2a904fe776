"""The keys of a published `config.json` that are obeyed, or that make no difference: any other may mean another network.

A drafter that ignores a key of its file drafts, and is wrong without a sign: what it costs is acceptance, which nobody compares.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
WINDOWS = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
FULL_LAYERS = {"global_head_dim", "num_global_key_value_heads"}  # of Gemma 4, whose newer configs have them by layer
PAIRED = {"is_neox_style": False, "rope_is_neox_style": False, "rope_interleaved": True}  # the values that say so
BLOCKS = (
    "block_size mask_token_id dspark_noise_token_id target_hidden_size num_target_layers draft_vocab_size markov_rank "
    "markov_head_type enable_confidence_head confidence_head_with_markov conv_kernel_size conv_group_size selector_rank "
    "selector_top_k xpress_rank xpress_mlp_ratio xpress_mlp_hidden xpress_block_size"
)
EAGLE3 = (
    "draft_vocab_size draft_num_hidden_layers target_hidden_size num_target_layers norm_before_residual norm_before_fc fc_norm "
    "norm_output use_aux_hidden_state mask_token_id pard_token ptd_token_id parallel_drafting_mask final_logit_softcapping"
)
SPECULATORS = "speculators_model_type speculators_version speculators_config transformer_layer_config"
# Switches of which one position is served. What the other would mean is in no tensor's name.
SERVED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False,),
    "enable_qwen35_gated_q_proj": (False,),
    "gated_q_proj": (False,),
    "log_snr_conditioning": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
    "projector_type": ("dflash", "dspark"),
    "shift_label": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
# How it was trained, what the tensors say themselves, and what is copied from the target's own config.
NO_DIFFERENCE = set(
    "num_jacobi_passes xpress_num_passes xpress_topc xpress_compile_head num_speculative_steps "
    "num_anchors max_anchors step_loss_decay loss_decay_gamma ttt_length confidence_head_alpha pure_draft_prefix_len "
    "target_model_type target_text_model_type target_model_name_or_path embed_requires_grad num_eagle_features "
    "parallel_draft_heads_num_layers attention_mode has_lm_head min_log_snr max_log_snr paradraft kind "
    "attn_output_gate full_attention_interval mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings "
    "is_llama_config pretraining_tp unk_token_id unsloth_version unsloth_fixed transformers.js_config auto_map torch_dtype "
    "attn_implementation _attn_implementation _attn_implementation_autoset tie_word_embeddings head_type torchscript "
    "use_bfloat16 tf_legacy_loss pruned_heads cross_attention_hidden_size add_cross_attention is_decoder tie_encoder_decoder "
    "finetuning_task tokenizer_class prefix sep_token_id task_specific_params per_layer_config model_type".split()
)
NO_DIFFERENCE |= PreTrainedConfig().to_dict().keys() | GenerationConfig().to_dict().keys()
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}  # which may turn heads differently
ROPE_KEYS = set(
    "rope_theta rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate short_factor long_factor low_freq_factor high_freq_factor partial_rotary_factor finetuned "
    "mrope_section mrope_interleaved".split()
)


def in_pairs(described: Mapping[str, Any]) -> bool:
    """Tell whether rotary embeddings turn neighbours (GPT-J), and not the halves of a head (GPT-NeoX), which is the default.

    Args:
        described: the part of a config that describes the drafter's layers.
    """
    return any(described.get(name) is said for name, said in PAIRED.items())


def check_keys(config: Mapping[str, Any], obeyed: str, layers: type[PreTrainedConfig] | None) -> None:
    """Refuse a config with a key that its format does not obey, or a switch in a position that is not served.

    Args:
        config: of a published drafter; parts of it are looked into.
        obeyed: names of keys, with spaces between.
        layers: the class of its layers' config, whose fields are obeyed; None: the target's own class reads them.

    Raises:
        ValueError: it has one.
    """
    known, described = {*obeyed.split(), *NO_DIFFERENCE, *PAIRED}, config.get("transformer_layer_config")
    of_layers = ROPE if layers is None else ROPE | WINDOWS | FULL_LAYERS | layers().to_dict().keys()
    if isinstance(described, Mapping):
        if layers is not None:
            _check(described, known | of_layers | _copied(described), "transformer_layer_config.")
    else:
        known |= of_layers | _copied(config)
    _check(config, known, "")
    for name in ("dflash_config", "eagle_config"):
        _check(config.get(name) or {}, known, f"{name}.")
    for part in (config, described if layers is not None and isinstance(described, Mapping) else {}):
        for name in ("rope_parameters", "rope_scaling"):
            turned = part.get(name) or {}
            _check(turned, ROPE_KEYS | KINDS_OF_LAYERS, f"{name}.")
            for kind in KINDS_OF_LAYERS:
                _check(turned.get(kind) or {}, ROPE_KEYS, f"{name}.")


def without(config: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    """Leave keys out of a config and of its parts, whose user knows that they make no difference.

    Args:
        config: as it was read.
        ignored: names, as `check_keys` says them, or their last parts.
    """
    last = {name.split(".")[-1] for name in ignored}
    return {
        name: without(value, last) if isinstance(value, Mapping) else value for name, value in config.items() if name not in last
    }


def _copied(config: Mapping[str, Any]) -> set[str]:
    """List the fields of the model that a config was copied from, which the publishers' layers (Qwen3's, Llama's) do not use."""
    if (model_type := config.get("model_type")) not in CONFIG_MAPPING:
        return set()
    return set(inspect.signature(CONFIG_MAPPING[model_type]).parameters)


def _check(config: Mapping[str, Any], known: set[str], inside: str) -> None:
    for name, value in config.items():
        if name in SERVED and value is not None and value not in SERVED[name]:
            raise ValueError(f"This drafter's config says {inside}{name} = {value!r:.50}, a variant that is not served.")
        if value is not None and name not in known and name not in SERVED:
            raise ValueError(
                f"This drafter's config has a key that nothing here obeys: {inside}{name} = {value!r:.50}. Ignored, it may make "
                f"the drafter guess wrongly without a sign. Where it makes no difference, pass ignore_keys=[{name!r}]."
            )
