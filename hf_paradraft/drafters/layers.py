"""A few decoder layers of transformers, without embedding and head: the body of a drafter that
reads features.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import LongTensor, Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..decoding.features import decoder_of
from ..decoding.tree_attention import attention_windows
from ..outer_names import Gemma4TextScaledWordEmbedding

QWEN35 = "qwen3_5_text"  # whose layers gate attention's output, and turn a part of each head
LLAMA = "llama"  # whose layers norm neither queries nor keys
GEMMA4 = "gemma4_text"  # whose layers norm on both sides of each part, and scale no scores
CONTEXT = 32_768  # of a target that does not say how long texts may be


def decoder_stack(
    config: PreTrainedConfig, weights: dict[str, Tensor] | None = None
) -> PreTrainedModel:
    """Build decoder layers and final norm as transformers does, fed with `inputs_embeds`.

    Args:
        config: the config of the layers.
        weights: the weights by the names that checkpoints of this class have, without the prefix
            before `layers`; default: random ones.

    Raises:
        OSError: there are weights, but not all.
        ValueError: layers that take no explicit masks, or that transformers cannot make, or weights
            without a place.
    """
    config = copy.deepcopy(config)
    config.vocab_size, config.pad_token_id, config.use_cache = 1, 0, True
    try:
        stack = AutoModel.from_config(config, trust_remote_code=False)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"transformers makes no layers of this config alone: {type(error).__name__}: {reason}"
        ) from error
    if weights is not None:
        stack = _with_weights(stack, weights)
    if attention_windows(stack) is None:
        raise ValueError(
            f"Layers of {type(stack).__name__} take no masks and positions as they are given."
        )
    stack.set_input_embeddings(nn.Identity())
    return stack.eval()


def _with_weights(stack: Any, weights: dict[str, Tensor]) -> Any:
    """Make the same layers with a checkpoint's weights.

    transformers loads them, as it fuses experts and knows older names.
    """
    dtype = next(iter(weights.values())).dtype
    # which is not used
    table = {"embed_tokens.weight": torch.zeros(1, stack.config.hidden_size, dtype=dtype)}
    loaded, info = type(stack).from_pretrained(
        None,
        config=stack.config,
        state_dict={**weights, **table},
        dtype=dtype,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"{len(missing)} weights of the layers are missing ({', '.join(missing[:3])}, …): "
            "download them again."
        )
    if more := sorted(info["unexpected_keys"]):
        raise ValueError(
            f"{len(more)} weights have no place in {type(stack).__name__} ({', '.join(more[:3])}, "
            "…): they are packed, or of a variant that is not served."
        )
    return loaded


def embedding_of(config: PreTrainedConfig, vocab_size: int) -> nn.Embedding:
    """Make an embedding for layers of this config, scaled as they read it.

    Gemma 4's is scaled by the square root of its width.
    """
    if config.model_type == GEMMA4:
        return Gemma4TextScaledWordEmbedding(
            vocab_size, config.hidden_size, None, embed_scale=config.hidden_size**0.5
        )
    return nn.Embedding(vocab_size, config.hidden_size)


def turns(stack: PreTrainedModel, states: Tensor, positions: LongTensor) -> tuple[Tensor, Tensor]:
    """Compute the rotary cosines and sines `(B, M, head)` of positions `(B, M)`.

    They have the dtype of `states`.
    """
    if stack.config.model_type == GEMMA4:
        return stack.rotary_emb(states, positions, "full_attention")
    return stack.rotary_emb(states, positions)


def sizes_of(target: PreTrainedModel) -> dict[str, Any]:
    """Read a target's sizes, for the config of layers like its own.

    These layers are Llama's, Qwen3's, or others that name the sizes so.
    """
    config = target.config.get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        raise ValueError(
            f"{type(target).__name__} has no attention heads, of which such a drafter's layers are "
            "made."
        )
    heads, rope = config.num_attention_heads, getattr(config, "rope_parameters", None) or {}
    by_layer = getattr(config, "per_layer_config", None)  # Gemma 4's layers differ in their heads
    last = by_layer[config.num_hidden_layers - 1] if by_layer else config
    rope = rope.get("full_attention", rope)  # where kinds of layers differ
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(last, "num_key_value_heads", None) or heads,
        "head_dim": getattr(last, "head_dim", None) or config.hidden_size // heads,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or CONTEXT,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        "tie_word_embeddings": False,
    }


def describe_layers(
    config: PreTrainedConfig, num_layers: int, dense: bool = True
) -> dict[str, Any]:
    """Describe `num_layers` layers of a target's own class, as a config.

    They have full attention if the target has any.

    Args:
        config: the config of the target's text.
        num_layers: D.
        dense: whether the layers have no experts; else as many as the target's last layer.

    Raises:
        ValueError: it has no such layers.
    """
    config = copy.deepcopy(config)
    name, first = config.model_type, 0
    if (kinds := getattr(config, "layer_types", None)) is not None:
        kind = next(
            (kind for kind in ("full_attention", "sliding_attention") if kind in kinds), None
        )
        kind = (getattr(config, "mtp_layer_types", None) or [kind])[0] if not dense else kind
        if kind is None:
            raise ValueError(
                f"{name} has no layer of ordinary attention, which such a drafter is made of."
            )
        try:
            config.layer_types, first = [kind] * num_layers, [*kinds, kind].index(kind)
        except AttributeError:
            raise ValueError(
                f"{name} computes the kinds of its layers, so none of them can be made alone: such "
                "a drafter is not to be had."
            ) from None
    if (experts := getattr(config, "mlp_layer_types", None)) is not None:
        config.mlp_layer_types = ["dense" if dense else experts[-1]] * num_layers
    if getattr(config, "mlp_only_layers", None) is not None:
        config.mlp_only_layers = list(range(num_layers)) if dense else []
    for key in ("first_k_dense_replace", "moe_layer_start_index"):  # the first layer with experts
        if getattr(config, key, None) is not None:
            setattr(config, key, num_layers if dense else 0)
    # Gemma 4's: layers that read another one's cache; inputs looked up for each of its layers
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(config, key, None):
            setattr(config, key, 0)
    config.num_hidden_layers = num_layers
    described = config.to_dict()
    # Gemma 4's: by the target's layers, of which one kind is left
    if overrides := described.get("per_layer_config"):
        sizes = {int(layer): sizes for layer, sizes in overrides.items()}.get(first, {})
        described |= {**sizes, "per_layer_config": {}}
    for key in ("quantization_config", "paradraft", "architectures", "_name_or_path", "dtype"):
        described.pop(key, None)
    return described


def after_attention(layer: nn.Module, states: Tensor, attended: Tensor) -> Tensor:
    """Run the rest of a layer of Gemma 4 after its attention.

    Input and attention's output are `(B, M, hidden)` each.
    """
    states = states + layer.post_attention_layernorm(attended)
    inner = layer.mlp(layer.pre_feedforward_layernorm(states))
    return (states + layer.post_feedforward_layernorm(inner)) * layer.layer_scalar


def final_norm(decoder: nn.Module) -> nn.Module:
    """Look up the norm after a decoder's last layer.

    Raises:
        ValueError: it is not where models of transformers have it.
    """
    for part in (decoder, getattr(decoder, "decoder", None)):  # OPT's stands one deeper
        for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
            if (norm := getattr(part, name, None)) is not None:
                return norm
    raise ValueError(
        f"{type(decoder).__name__} has no final norm by a name that is known: its normed states "
        "cannot be found."
    )


@torch.no_grad()
def final_scale(target: PreTrainedModel) -> Tensor:
    """Measure the factors of a target's final norm, fp32 `(hidden,)`, on the CPU.

    Its head was trained for states of that size, and a norm of ones makes every guess doubtful.
    """
    norm, size = final_norm(decoder_of(target)), target.config.get_text_config().hidden_size
    signs = torch.ones(1, size)
    signs[:, 1::2] = -1  # of mean zero and size one
    with align_module_device(norm):
        weight = next(norm.parameters(), None)
        there = signs if weight is None else signs.to(weight)
        return (0.5 * signs * (norm(there) - norm(-there)).float().cpu())[0]  # without a bias
