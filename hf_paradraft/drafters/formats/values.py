"""A drafter's `config.json`, by any publisher: one table of the values that it may have, looked at
before anything is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import ROPE_INIT_FUNCTIONS, PreTrainedConfig

from ...files import read_json
from ...outer_names import ACT2FN
from ...protocol.config import MOST

WIDE, LONG = 2**22, 2**31  # of a width, of a text: a number beyond it is a mistake, or a joke
LAYERS, HEADS, LARGE = 1024, 4096, 1e18


@dataclass(frozen=True)
class Rule:
    """A rule for a value of a config.

    Attributes:
        holds: tells whether a value obeys it.
        words: the rule in words, for people.
    """

    holds: Callable[[Any], bool]
    words: str


def _whole(least: int, most: int) -> Rule:
    return Rule(
        lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def _list(rule: Rule, words: str, least: int = 1) -> Rule:
    return Rule(
        lambda value: (
            isinstance(value, list) and len(value) >= least and all(map(rule.holds, value))
        ),
        words,
    )


def _sizes(most: int) -> Rule:
    """Make the rule of a size from 1 to `most`: one for all layers, or a list with one each."""
    single = _whole(1, most)
    several = _list(single, single.words)
    return Rule(lambda value: single.holds(value) or several.holds(value), single.words)


def _optional(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.words}, or null")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_dtype(name: str) -> bool:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return name == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
NUMBER = Rule(_number, "a number above 0")
SHARE = Rule(lambda value: _number(value) and value <= 1, "a number above 0, at most 1")
DTYPE = Rule(
    lambda value: isinstance(value, str) and _is_dtype(value), "a floating number format of torch"
)
ACTIVATION = Rule(
    lambda value: isinstance(value, str) and value in ACT2FN, "an activation that transformers has"
)
ROPE = Rule(
    # of mrope's several positions a token, a text has one
    lambda value: isinstance(value, str) and value in {"default", "mrope", *ROPE_INIT_FUNCTIONS},
    "a rotary embedding that transformers has",
)
WORD = Rule(lambda value: isinstance(value, str) and value.isprintable(), "a printable text")
WORDS = _list(WORD, "a list of texts", least=0)
NAMED = Rule(lambda value: isinstance(value, Mapping), "an object with names")
LAYER_LIST = _list(_whole(-1, LAYERS), f"a list of layers' numbers, from -1 to {LAYERS}")

POSITIVE, COUNT = _whole(1, WIDE), _whole(1, LAYERS)
SAID = (
    (
        POSITIVE,
        "hidden_size vocab_size backbone_hidden_size num_centroids centroid_intermediate_top_k",
    ),
    (COUNT, "num_hidden_layers draft_num_hidden_layers num_masks"),
    (_sizes(HEADS), "num_attention_heads"),
    (_sizes(WIDE), "intermediate_size"),
    (
        Rule(lambda value: _number(value) and value <= LARGE, f"a number above 0, up to {LARGE:g}"),
        "rope_theta",
    ),
    (WORD, "style"),
    (ROPE, "rope_type"),
    (_whole(0, MOST), "num_draft_tokens"),
    (ACTIVATION, "hidden_act hidden_activation"),
    (NAMED, "full_attention sliding_attention"),
)
MAY_BE_NULL = (
    (_sizes(HEADS), "num_key_value_heads num_global_key_value_heads"),
    (POSITIVE, "head_dim global_head_dim target_hidden_size draft_vocab_size"),
    (COUNT, "num_target_layers target_layers block_size ttt_length speculative_tokens"),
    (_whole(1, LONG), "max_position_embeddings sliding_window swa_window_size"),
    (
        _whole(0, WIDE),
        "mask_token_id dspark_noise_token_id pard_token ptd_token_id markov_rank conv_group_size "
        "selector_rank selector_top_k xpress_rank xpress_mlp_hidden top_k transfer_rank "
        "message_size",
    ),
    (_whole(0, LAYERS), "conv_kernel_size xpress_mlp_ratio xpress_block_size logits_start"),
    (
        NUMBER,
        "rms_norm_eps initializer_range output_multiplier input_embedding_scale "
        "final_logit_softcapping",
    ),
    (SHARE, "partial_rotary_factor"),
    (
        FLAG,
        "enable_qwen35_gated_q_proj attention_bias attention_k_eq_v is_causal causal causal_head "
        "dflash_query_causal use_swa "
        "use_sliding_window use_aux_hidden_state norm_before_residual norm_before_fc fc_norm "
        "norm_output sample_from_anchor is_neox_style rope_is_neox_style "
        "sliding_window_non_causal enable_confidence_head confidence_head_with_markov "
        "tie_word_embeddings never_slower compile overlap prompt_lookup graft trace pard2 "
        "target_independent enable_moe_block output_hidden_states output_attentions use_cache",
    ),
    # without, transformers' own causal LMs raise
    (Rule(lambda value: value is True, "true"), "return_dict"),
    (DTYPE, "dtype torch_dtype"),
    (WORD, "model_type speculators_model_type markov_head_type projector_type spd_type kind"),
    (WORDS, "architectures layer_types"),
    (
        LAYER_LIST,
        "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids",
    ),
    (
        NAMED,
        "transformer_layer_config dflash_config eagle_config dspine_config layers rope_parameters "
        "rope_scaling speculators_config text_config per_layer_config",
    ),
    (_list(NAMED, "a list of objects with names", least=0), "proposal_methods"),
)
RULES: dict[str, Rule] = {name: rule for rule, names in SAID for name in names.split()}
RULES |= {name: _optional(rule) for rule, names in MAY_BE_NULL for name in names.split()}
# In which the same names mean the same; elsewhere, as in a vision part, they may not.
NESTED = {name for name, rule in RULES.items() if rule.words.startswith(NAMED.words)}
NESTED |= {"proposal_methods", "paradraft", "speculation_config"}


def check_config(config: Mapping[str, Any], file: Path, inside: str = "") -> None:
    """Refuse a value that no layout has.

    Args:
        config: the config as it was read.
        file: its file, for the message.
        inside: the names that lead to it, each with a dot.

    Raises:
        ValueError: a value is none; the message names file, key and value.
    """
    for name, value in config.items():
        rule = RULES.get(name)
        if rule is not None and not rule.holds(value):
            raise ValueError(
                f"{file}: {inside}{name} is {value!r:.150}, and has to be {rule.words}."
            )
        if name in NESTED:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Mapping):
                    check_config(part, file, f"{inside}{name}.")


def check_dtype(dtype: Any) -> None:
    """Refuse anything but the name of a number format, or the format itself.

    Raises:
        ValueError: it is none.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype) and not DTYPE.holds(dtype):
        raise ValueError(f"dtype is {dtype!r:.50}, and has to be {DTYPE.words}.")


def transformers_config(
    make: Callable[..., PreTrainedConfig], values: Mapping[str, Any]
) -> PreTrainedConfig:
    """Make a config of transformers from values that a file has.

    Raises:
        ValueError: transformers makes none of them.
    """
    try:
        return make(**values)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"transformers makes no layers of this config: {type(error).__name__}: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a drafter's folder, and check its values.

    Raises:
        OSError: it is missing or not JSON.
        ValueError: a value of it is none; the message names file, key and value.
    """
    config = read_json(folder / "config.json")
    check_config(config, folder / "config.json")
    return config


def provenance_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config's `paradraft` section, with its nested parts as dicts.

    These are `training`, its `acceptance`, and `speculation_config`. Whatever else stands there
    counts as nothing.
    """
    section = _named(config.get("paradraft"))
    training = _named(section.get("training"))
    if "acceptance" in training:
        training["acceptance"] = _named(training["acceptance"])
    if "speculation_config" in section:
        section["speculation_config"] = _named(section["speculation_config"])
    return {**section, "training": training}


def _named(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
