"""Drafters with layers of Gemma 4."""

import torch

from .heads import chained
from .layers import EPS, attend, heads, norm


def turn_in_part(states, positions, theta, share):
    """Rotary embedding whose slower frequencies, all but a share, stand still."""
    half = states.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half).float() / half)
    frequencies[int(share * half) :] = 0
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gemma4_layer(config, weights, prefix, states, inner, both, seen):
    """States behind a layer of Gemma 4: rows `inner` see columns `both`, of which they are the last
    ones.
    """
    rope, width = config["rope_parameters"]["full_attention"], config["global_head_dim"]
    name = f"{prefix}.self_attn"
    positions = torch.arange(len(both))

    def turned(rows, what, places):
        normed = norm(
            heads(rows, weights, f"{name}.{what}_proj", width),
            weights[f"{name}.{what}_norm.weight"],
        )
        return turn_in_part(normed, places, rope["rope_theta"], rope["partial_rotary_factor"])

    values = heads(
        both, weights, f"{name}.{'k' if config['attention_k_eq_v'] else 'v'}_proj", width
    )
    values = values / (values.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    # scores are not scaled
    queries = turned(inner, "q", positions[len(both) - len(inner) :]) * width**0.5
    attended = (
        attend(queries, turned(both, "k", positions), values, seen)
        @ weights[f"{name}.o_proj.weight"].T
    )
    states = states + norm(attended, weights[f"{prefix}.post_attention_layernorm.weight"])
    fed = norm(states, weights[f"{prefix}.pre_feedforward_layernorm.weight"])
    gate = fed @ weights[f"{prefix}.mlp.gate_proj.weight"].T
    up = fed @ weights[f"{prefix}.mlp.up_proj.weight"].T
    out = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ weights[
        f"{prefix}.mlp.down_proj.weight"
    ].T
    states = states + norm(out, weights[f"{prefix}.post_feedforward_layernorm.weight"])
    return states * weights[f"{prefix}.layer_scalar"]


def gemma4_head(config, weights, states):
    """Capped logits of normed states."""
    cap = config["final_logit_softcapping"]
    return cap * torch.tanh(states @ weights["lm_head.weight"].T / cap)


def gemma4_block_logits(config, weights, ids, features):
    """As `block_logits`, for DeepSpec's drafters with layers of Gemma 4."""
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    block = torch.tensor([int(ids[-1])] + [config["mask_token_id"]] * (config["block_size"] - 1))
    states = weights["embed_tokens.weight"][block] * config["hidden_size"] ** 0.5
    seen = torch.ones(len(block), len(context) + len(block), dtype=torch.bool)
    for index in range(config["num_hidden_layers"]):
        inner = norm(states, weights[f"layers.{index}.input_layernorm.weight"])
        states = gemma4_layer(
            config, weights, f"layers.{index}", states, inner, torch.cat([context, inner]), seen
        )
    states = norm(states, weights["norm.weight"])
    logits = gemma4_head(config, weights, states)
    return chained(weights, states, logits, int(ids[-1])) if config["markov_rank"] else logits


def gemma4_eagle_logits(config, weights, ids, features, count):
    """As `eagle_logits`, for DeepSpec's head with a layer of Gemma 4."""
    fused, ids, rows = features @ weights["fc.weight"].T, ids.clone(), []
    for _ in range(count):
        e = weights["embed_tokens.weight"][ids[1:]] * config["hidden_size"] ** 0.5
        e = norm(e, weights["layers.0.input_layernorm.weight"])
        both = torch.cat([e, norm(fused, weights["layers.0.hidden_norm.weight"])], dim=-1)
        seen = torch.ones(len(fused), len(fused), dtype=torch.bool).tril()
        states = gemma4_layer(config, weights, "layers.0", fused, both, both, seen)
        rows.append(gemma4_head(config, weights, norm(states[-1], weights["norm.weight"])))
        ids = torch.cat([ids, rows[-1].argmax()[None]])
        fused = torch.cat([fused, states[-1:]])
    return torch.stack(rows)
