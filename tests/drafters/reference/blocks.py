"""DFlash and DSpark."""

import torch

from .heads import chained, code, refined, selected, spined, told
from .layers import attend, heads, mlp, norm, turn


def block_logits(config, weights, ids, features, embedding, head):
    """DFlash and DSpark behind a text: `(drafts, V)`, along the most probable tokens.

    ids `(n,)`, features `(n - 1, m · d)`.
    """
    weights = {
        name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): tensor
        for name, tensor in weights.items()
    }
    weights = {
        name.replace("logit_head", "markov_head"): tensor for name, tensor in weights.items()
    }
    nested = config.get("dflash_config", {})
    size = nested.get("block_size") or config.get("block_size")
    neighbours = config.get("rope_is_neox_style") is False
    mask = nested.get("mask_token_id", config.get("mask_token_id"))
    embedding = weights.get("embed_tokens.weight", embedding)
    head = weights.get("lm_head.weight", head)
    gated = config.get("architectures") == ["Qwen35DSparkModel"]
    if gated:  # norms are offsets from one
        weights = {
            name: tensor + 1 if name.endswith("norm.weight") else tensor
            for name, tensor in weights.items()
        }
    kinds = (
        config.get("layer_types")
        or ["sliding_attention" if nested.get("use_swa") else "full_attention"]
        * config["num_hidden_layers"]
    )
    window = config.get("sliding_window", nested.get("swa_window_size"))
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    size = size or config["xpress_block_size"]
    before = len(context)
    states = embedding[torch.tensor([int(ids[-1])] + [mask] * (size - 1))]
    positions = torch.arange(before + size)
    for index, kind in enumerate(kinds):
        name, width = f"layers.{index}.self_attn", config["head_dim"]
        inner = norm(states, weights[f"layers.{index}.input_layernorm.weight"])
        inner, behind = convolved(weights, f"layers.{index}.attention_conv", inner)
        both = torch.cat([context, inner])
        queries = heads(inner, weights, f"{name}.q_proj", 2 * width if gated else width)
        gate, turning = queries[..., width:], width // 2 if gated else width
        queries = norm(queries[..., :width], weights[f"{name}.q_norm.weight"])
        keys = norm(heads(both, weights, f"{name}.k_proj", width), weights[f"{name}.k_norm.weight"])
        queries, keys = (
            torch.cat(
                [turn(rows[..., :turning], places, neighbours=neighbours), rows[..., turning:]],
                dim=-1,
            )
            for rows, places in ((queries, positions[before:]), (keys, positions))
        )
        rows, columns = positions[before:, None], positions[None]
        seen = torch.ones(size, before + size, dtype=torch.bool)
        sliding = kind == "sliding_attention"
        if sliding:
            seen &= columns > rows - window
        causal = (
            config.get("is_causal") or config.get("dflash_query_causal") or nested.get("causal")
        )
        unsaid = config.get("is_causal") is None and not nested.get("use_swa")
        if causal or (sliding and unsaid and "dflash_config" in config):
            seen &= columns <= rows
        attended = attend(queries, keys, heads(both, weights, f"{name}.v_proj", width), seen)
        attended = attended * gate.flatten(1).sigmoid() if gated else attended
        states = states + behind(attended @ weights[f"{name}.o_proj.weight"].T)
        inner = norm(states, weights[f"layers.{index}.post_attention_layernorm.weight"])
        inner, behind = convolved(weights, f"layers.{index}.mlp_conv", inner)
        states = states + behind(mlp(weights, f"layers.{index}.mlp", inner))
        if f"injection.readouts.{index}.weight" in weights and index + 1 < len(kinds):
            states = told(weights, index, states, code(weights, int(ids[-1])))
    if "transfer_codes" in weights:
        return spined(config, weights, len(kinds) - 1, states, head, int(ids[-1]))
    states = norm(states, weights["norm.weight"])
    if "xpress_head.w1.weight" in weights:
        return refined(weights, states, states @ head.T, ids)
    first = nested.get("projector_type") == "dspark" or config["architectures"][0].endswith(
        ("DSparkModel", "DSparkDraftModel")
    )
    first = config.get("sample_from_anchor", first)
    states = states if first else states[1:]
    logits = states @ head.T
    if "candidate_selector.predecessor_codebook" in weights:
        scale, cap = nested["output_multiplier"], nested["final_logit_softcapping"]
        return selected(
            weights,
            nested["selector_top_k"],
            states,
            cap * torch.tanh(scale * logits / cap),
            int(ids[-1]),
        )
    return (
        logits
        if "markov_head.markov_w1.weight" not in weights
        else chained(weights, states, logits, int(ids[-1]))
    )


def convolved(weights, name, states):
    """Rows behind the first convolution, and what runs the second; nothing where there are none."""
    if f"{name}.base_kernel" not in weights:
        return states, lambda rows: rows
    base = weights[f"{name}.base_kernel"]
    taps, width = base.shape[1:]
    made = (states @ weights[f"{name}.kernel_projection.weight"].T).unflatten(-1, (2, taps, -1))

    def run(rows, which):
        out = torch.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(taps, row + 1)):
                for channel in range(width):
                    group = channel // (width // made.shape[-1])
                    out[row, channel] += (
                        base[which, tap, channel] + made[row, which, tap, group]
                    ) * rows[row - tap, channel]
        return out

    return run(states, 0), lambda rows: run(rows, 1)
