"""The common parts of publishers' configs: the drafter's own layers, its mask token, its heads."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from ...protocol.drafter import FeatureKey
from ..layers import GEMMA4, QWEN35
from .keys import BLOCKS, EAGLE3, ROPE, check_keys, in_pairs, without
from .values import transformers_config

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
NO_LAYERS = ("layers", "default: 2, L // 2 and L - 3 of the target's tuple of states, for none are named")
NOT_GEMMA4 = {"model_type", "dtype", "per_layer_config", "layer_types", "num_kv_shared_layers"}


def layers_config(described: Mapping[str, Any], tensors: Iterable[str]) -> PreTrainedConfig:
    """Make the config of Gemma 4's, Qwen3.5's, Qwen3's (queries and keys normed) or Llama's layers, by tensors and architecture.

    Raises:
        ValueError: something that is no layer's config.
    """
    names = list(tensors)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if not isinstance(size := described.get(name), int):
            raise ValueError(f"The drafter's config has no {name} (it is {size!r}): save or download it again.")
    first = (described.get("architectures") or [""])[0]
    if any(name.endswith("layer_scalar") for name in names) or str(first).startswith("Gemma4"):
        return _gemma4_config(described)
    if first == "Qwen35DSparkModel":
        return _qwen35_config(described)
    kind = Qwen3Config if any(name.endswith("q_norm.weight") for name in names) else LlamaConfig
    fields = (kind().to_dict().keys() | ROPE) - {"model_type", "dtype"}
    values = {name: value for name, value in described.items() if name in fields}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(name), Mapping):
            values[name] = _of_texts(values[name])
    kinds = described.get("layer_types")
    if kinds is not None:  # Llama's own config has none, and goes by them all the same
        values["layer_types"] = kinds[: described["num_hidden_layers"]]
    if "sliding_attention" in (values.get("layer_types") or ()):
        if described.get("sliding_window") is None:
            raise ValueError("The drafter's config has sliding layers and no sliding_window: save or download it again.")
        values |= {"sliding_window": described["sliding_window"], "use_sliding_window": True}
    elif kind is LlamaConfig:
        values.pop("layer_types", None)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return transformers_config(kind, values)


def _of_texts(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary parameters as they are for texts: of positions in several dimensions (mrope) all are alike there."""
    plain = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {name: "default" if value == "mrope" and name in ("type", "rope_type") else value for name, value in plain.items()}


def _gemma4_config(described: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the config of Gemma 4's layers, all of full attention, with the heads of the target's full layers.

    Raises:
        ValueError: layers with experts or with inputs of their own, which DeepSpec has none of.
    """
    for name, what in (("enable_moe_block", "experts"), ("hidden_size_per_layer_input", "inputs for each layer")):
        if described.get(name):
            raise ValueError(f"This drafter has layers of Gemma 4 with {what} ({name}), which are not served.")
    fields = Gemma4TextConfig().to_dict().keys() - NOT_GEMMA4
    values = {name: value for name, value in described.items() if name in fields}
    listed = described.get("per_layer_config")  # of newer files: the target's layers that differ, of which full ones are wider
    layers = [layer for layer in listed.values() if isinstance(layer, Mapping)] if isinstance(listed, Mapping) else []
    wide: Mapping[str, Any] = max(layers, key=lambda layer: layer.get("head_dim", 0), default={})
    values |= {
        "global_head_dim": described.get("global_head_dim") or wide.get("head_dim") or values.get("head_dim"),
        "num_global_key_value_heads": described.get("num_global_key_value_heads") or wide.get("num_key_value_heads"),
        "layer_types": ["full_attention"] * described["num_hidden_layers"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    return transformers_config(Gemma4TextConfig, values)


def _qwen35_config(described: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the config of Qwen3.5's layers, all of full attention: gated queries, norms as offsets from 1, partly turned heads."""
    fields = Qwen3_5TextConfig().to_dict().keys() - {"model_type", "dtype", "layer_types"}
    values = {name: value for name, value in described.items() if name in fields}
    if isinstance(values.get("rope_parameters"), Mapping):
        values["rope_parameters"] = _of_texts(values["rope_parameters"])
    return transformers_config(Qwen3_5TextConfig, {**values, "layer_types": ["full_attention"] * described["num_hidden_layers"]})


def paired(described: Mapping[str, Any], layers: PreTrainedConfig) -> bool:
    """Tell whether the weights' rotary embedding turns neighbours, as for `in_pairs`.

    Raises:
        ValueError: it does in layers of Gemma 4 or Qwen3.5, of which it turns a part.
    """
    if (found := in_pairs(described)) and layers.model_type in (GEMMA4, QWEN35):
        raise ValueError(
            f"This drafter has layers of {layers.model_type} with an interleaved rotary embedding, which are not served."
        )
    return found


def with_draft_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config with the drafter's own number of layers, where `num_hidden_layers` may be the target's."""
    return {**config, "num_hidden_layers": config.get("draft_num_hidden_layers", config.get("num_hidden_layers"))}


def feature_keys(ids: Any, offset: int = 0) -> tuple[FeatureKey, ...] | None:
    """Make feature keys of a file's numbers of layers, which count outputs after `offset` is added; None where there are none.

    Raises:
        ValueError: a number below the first one.
    """
    if ids is None:
        return None
    if min(ids) + offset < -1:
        raise ValueError(f"The drafter's layer list is {ids}, which counts from {-1 - offset}: save or download it again.")
    return tuple(index + offset for index in ids)


def mask_token(*configs: Mapping[str, Any]) -> int:
    """Look up the id of a drafter's mask token, under any of the names that it has.

    Raises:
        ValueError: none is named.
    """
    for config in configs:
        for name in MASK_KEYS:
            if config.get(name) is not None:
                return config[name]
    raise ValueError(
        "This drafter's config names no mask token (mask_token_id): it cannot be guessed. Ask its publisher, and add it there."
    )


def guesses_from_anchor(config: Mapping[str, Any]) -> bool | None:
    """Tell whether a block's first row, the newest token's, guesses the next one; None where the config does not say."""
    if (start := config.get("logits_start")) is not None:
        return start == 0
    return config.get("sample_from_anchor")


def block_size(*configs: Mapping[str, Any]) -> int:
    """Look up the number of rows of a block.

    Raises:
        ValueError: it is not named, or too small for a guess.
    """
    for config in configs:
        for name in ("block_size", "xpress_block_size"):
            if (config.get(name) or 0) >= 2:
                return config[name]
    raise ValueError("The drafter's config has no block_size of at least 2: save or download it again.")


def neighbours_to_halves(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Turn weights whose rotary embedding turns neighbours into such as give the same scores where it turns halves.

    Args:
        tensors: of a drafter; the rows of each head's queries and keys, and of their norms, change places.
        head_dim: numbers of a head.
    """
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    turned = re.compile(r"self_attn\.(q|k)_(proj|norm)\.(weight|bias)$")
    return {
        name: tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) if turned.search(name) else tensor
        for name, tensor in tensors.items()
    }


def smaller(size: int | None, vocab_size: int) -> int | None:
    """Return a draft vocabulary's size V', or None where it is V."""
    return size if size is not None and size < vocab_size else None


def block_parts(
    config: Mapping[str, Any], nested: Mapping[str, Any], names: list[str], described: Mapping[str, Any], obeyed: str
) -> dict[str, Any]:
    """Read the common part of all layouts of blocks: layers, sizes, and heads.

    Args:
        config: of the drafter.
        nested: a part of it that is looked into first.
        names: of its tensors.
        described: the part of it that its layers are described in.
        obeyed: further keys, which this layout has.

    Raises:
        ValueError: heads that the tensors lack, or of a type that is not served, or a key that nothing obeys.
    """
    merged, layers = {**config, **nested}, layers_config(described, names or ["q_norm.weight"])
    rank = merged.get("markov_rank") or 0
    has_markov = any(name.startswith(("markov_head.", "logit_head.")) for name in names)
    if names and bool(rank) != has_markov:
        raise ValueError(f"The config says markov_rank={rank}, but the tensors {'have' if has_markov else 'lack'} that head.")
    kind = merged.get("markov_head_type") or "vanilla"
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"A Markov head of type {kind!r} is not served: vanilla, gated and rnn are.")
    has_confidence = any(name.startswith("confidence_head.") for name in names)
    for name, heads in (("selector_rank", ("candidate_selector.",)), ("xpress_rank", ("refiner_head.", "xpress_head."))):
        if names and bool(merged.get(name)) != any(tensor.startswith(heads) for tensor in names):
            raise ValueError(f"The config says {name}={merged.get(name)}, and the tensors say otherwise: download it again.")
    refiner = merged.get("xpress_rank") or 0
    parts = {
        "layers": layers,
        "in_pairs": paired(described, layers),
        "conv_kernel_size": merged.get("conv_kernel_size") or 0,
        "conv_group_size": merged.get("conv_group_size") or 0,
        "selector_rank": merged.get("selector_rank") or 0,
        "selector_top_k": merged.get("selector_top_k") or 16,
        "refiner_rank": refiner,
        "refiner_size": merged.get("xpress_mlp_hidden") or refiner * (merged.get("xpress_mlp_ratio") or 2),
        "target_hidden_size": merged.get("target_hidden_size") or layers.hidden_size,
        "target_layers": merged.get("num_target_layers"),
        "vocab_size": layers.vocab_size,
        "draft_vocab_size": smaller(merged.get("draft_vocab_size"), layers.vocab_size),
        "block_size": block_size(nested, config),
        "mask_token_id": mask_token(nested, config),
        "markov_rank": int(rank),
        "markov_type": kind,
        "confidence": has_confidence or (not names and bool(merged.get("enable_confidence_head"))),
        "confidence_with_markov": bool(rank) and bool(merged.get("confidence_head_with_markov", rank)),
    }
    gated = {"enable_qwen35_gated_q_proj"} if layers.model_type == QWEN35 else ()  # as these layers are
    check_keys(without(config, gated), f"{BLOCKS} {obeyed}", type(layers))
    return parts


def eagle3_parts(
    config: Mapping[str, Any], nested: Mapping[str, Any], names: list[str], described: Mapping[str, Any], obeyed: str
) -> dict[str, Any]:
    """Read the common part of all layouts of EAGLE-3 and P-EAGLE; arguments as for `block_parts`.

    Raises:
        ValueError: a P-EAGLE drafter without a mask token, or a variant that is not served, or a key that nothing obeys.
    """
    layers = layers_config(described, names)
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(
            "This EAGLE drafter reads the last state alone (use_aux_hidden_state false): a variant that is not served."
        )
    parallel = any(name.split(".")[-1] == "mask_hidden" for name in names) or config.get("speculators_model_type") == "peagle"
    vocab_size = config.get("vocab_size") or layers.vocab_size
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    parts = {
        "layers": layers,
        "in_pairs": paired(described, layers),
        "target_hidden_size": config.get("target_hidden_size") or layers.hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": smaller(config.get("draft_vocab_size"), vocab_size),
        "target_layers": config.get("num_target_layers"),
        "norm_before_residual": bool(config.get("norm_before_residual", nested.get("norm_before_residual", False))),
        "norm_before_fc": bool(config.get("norm_before_fc", nested.get("norm_before_fc", False))) or "input_norm.weight" in names,
        "fc_norm": bool(config.get("fc_norm", False)) or "fc_norm.0.weight" in names,
        "norm_output": bool(config.get("norm_output", False)),
        "mask_token_id": mask_token(config) if parallel else None,
        "num_draft_tokens": next((method.get("speculative_tokens") for method in methods), None),
        "softcap": config.get("final_logit_softcapping") if layers.model_type == GEMMA4 else None,
    }
    check_keys(config, f"{EAGLE3} {obeyed}", type(layers))
    return parts
