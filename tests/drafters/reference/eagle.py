"""EAGLE-3."""

import torch

from .layers import attend, heads, mlp, norm, turn


def eagle_logits(config, weights, ids, features, embedding, count):
    """EAGLE-3 behind a text: `(count, V')`, each step behind the most probable token; everything is
    read anew at every step.
    """
    weights = {name.replace("midlayer", "layers.0"): tensor for name, tensor in weights.items()}
    embedding = weights.get("embed_tokens.weight", embedding)
    width = config.get("transformer_layer_config", config)["head_dim"]
    name = "layers.0.self_attn"
    if "fc_norm.0.weight" in weights:
        parts = features.chunk(3, dim=-1)
        features = torch.cat(
            [norm(part, weights[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)],
            dim=-1,
        )
    fused = features @ weights["fc.weight"].T
    ids, guesses = ids.clone(), []
    for _ in range(count):
        e = norm(embedding[ids[1:]], weights["layers.0.input_layernorm.weight"])
        n = norm(fused, weights["layers.0.hidden_norm.weight"])
        both, positions = torch.cat([e, n], dim=-1), torch.arange(len(fused))
        queries = heads(both, weights, f"{name}.q_proj", width)
        keys = heads(both, weights, f"{name}.k_proj", width)
        if f"{name}.q_norm.weight" in weights:
            queries = norm(queries, weights[f"{name}.q_norm.weight"])
            keys = norm(keys, weights[f"{name}.k_norm.weight"])
        seen = positions[None] <= positions[:, None]
        values = heads(both, weights, f"{name}.v_proj", width)
        neighbours = config.get("rope_interleaved", False)
        queries, keys = (turn(rows, positions, neighbours=neighbours) for rows in (queries, keys))
        attended = attend(queries, keys, values, seen)
        states = (n if config.get("norm_before_residual") else fused) + attended @ weights[
            f"{name}.o_proj.weight"
        ].T
        states = states + mlp(
            weights,
            "layers.0.mlp",
            norm(states, weights["layers.0.post_attention_layernorm.weight"]),
        )
        last = norm(states[-1], weights["norm.weight"])
        guesses.append(weights["lm_head.weight"] @ last)
        best = int(guesses[-1].argmax())
        token = best + int(weights["d2t"][best]) if "d2t" in weights else best
        ids = torch.cat([ids, torch.tensor([token])])
        fused = torch.cat([fused, (last if config.get("norm_output") else states[-1])[None]])
    return torch.stack(guesses)
