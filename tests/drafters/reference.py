"""The formulas of DFlash, DSpark and EAGLE-3, written out for one text without caches, batches or
libraries.
"""

import torch

EPS = 1e-6


def norm(states, weight):
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def turn(states, positions, theta=10000.0, neighbours=False):
    """Rotary embedding of `(rows, heads, size)`, of halves or of neighbours."""
    if neighbours:
        rates = theta ** (-torch.arange(0, states.shape[-1], 2).float() / states.shape[-1])
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones(()), positions[:, None].float() * rates)[:, None]
        return torch.view_as_real(turned).flatten(-2)
    half = states.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(queries, keys, values, seen):
    """`(rows, heads, size)` over `(columns, fewer heads, size)`; `seen` bool `(rows, columns)`."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("rhs,chs->hrc", queries, keys) / queries.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrc,chs->rhs", weights, values).flatten(1)


def mlp(weights, prefix, states):
    gate = states @ weights[f"{prefix}.gate_proj.weight"].T
    up = states @ weights[f"{prefix}.up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def heads(states, weights, name, size):
    return (states @ weights[f"{name}.weight"].T).unflatten(-1, (-1, size))


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


def code(weights, token):
    return weights["transfer_codes"][token] * weights["transfer_codes"].shape[1] ** 0.5


def predicted(weights, index, state):
    read = weights[f"injection.readouts.{index}.weight"] @ state
    return read / read.norm() * len(read) ** 0.5


def message(weights, index, state, before):
    """DSpine: one row's state with what the code before it says."""
    gate = weights["injection.receiver_gate.weight"] @ predicted(weights, index, state)
    gate = (
        gate + weights["injection.predecessor_gate.weight"] @ before + weights["injection.bias"]
    ).sigmoid()
    written = weights[f"injection.writes.{index}.weight"] @ (
        gate * (weights["injection.message.weight"] @ before)
    )
    return state + state.norm() / len(state) ** 0.5 * written


def told(weights, index, states, anchor):
    """Row 1 is told the newest token's code, each later one what the row before predicts; row 0
    nothing.
    """
    before = [anchor, *(predicted(weights, index, state) for state in states[1:-1])]
    pairs = zip(states[1:], before, strict=True)
    return torch.stack(
        [states[0], *(message(weights, index, state, other) for state, other in pairs)]
    )


def spined(config, weights, last, states, head, token):
    """Logits of each row's best tokens, as the last message from the token before them makes them;
    the others are out.
    """
    rows = []
    first = (
        norm(told(weights, last, states, code(weights, token)), weights["norm.weight"])[1:] @ head.T
    )
    for state, plain in zip(states[1:], first, strict=True):
        whole = (
            norm(message(weights, last, state, code(weights, token)), weights["norm.weight"])
            @ head.T
        )
        least = plain.sort(descending=True).values[config["dspine_config"]["top_k"] - 1]
        rows.append(whole.masked_fill(plain < least, -torch.inf))
        token = int(rows[-1].argmax())
    return torch.stack(rows)


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


def selected(weights, count, states, logits, token):
    """Logits of the best `count` tokens with the selector's scores, along the most probable ones;
    the others are out.
    """
    rows = []
    for state, row in zip(states, logits, strict=True):
        before = weights["candidate_selector.predecessor_codebook"][token]
        before = before * (weights["candidate_selector.hidden_projection.weight"] @ state)
        whole = row + weights["candidate_selector.successor_codebook"] @ before
        rows.append(
            whole.masked_fill(row < row.sort(descending=True).values[count - 1], -torch.inf)
        )
        token = int(rows[-1].argmax())
    return torch.stack(rows)


def refined(weights, states, logits, ids):
    """XPress's logits by passes over the whole block, until nothing changes: rows 1 on, row 0 being
    the newest token's.
    """
    w = {name.removeprefix("xpress_head."): tensor for name, tensor in weights.items()}
    mixing = torch.tril(w["mix.L"]) + torch.eye(len(states))
    block = torch.cat([ids[-1:], logits[1:].argmax(-1)])
    for _ in range(len(states)):
        before = torch.cat([ids[-2:-1], block[:-1]])
        mean = states.mean(0, keepdim=True).expand_as(states)
        a = torch.cat(
            [states @ w["down_h.weight"].T, mean @ w["down_g.weight"].T, w["w1.weight"][before]],
            dim=-1,
        )
        c = torch.einsum("rkj,jr->kr", mixing, a @ w["in_proj.weight"].T)
        c = c + mlp(
            {f"x.{name.removeprefix('mlp.')}": tensor for name, tensor in w.items()}, "x", c
        )
        refined = logits + c @ w["w2.weight"].T
        block = torch.cat([ids[-1:], refined[1:].argmax(-1)])
    return refined[1:]


def chained(weights, states, logits, token):
    """Logits with the bias on the token before, along the most probable tokens behind `token`."""
    rows, memory = [], torch.zeros(weights["markov_head.markov_w1.weight"].shape[1])
    for state, row in zip(states, logits, strict=True):
        e = weights["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in weights:
            gate = (
                weights["markov_head.gate_proj.weight"] @ torch.cat([state, e])
                + weights["markov_head.gate_proj.bias"]
            )
            e = gate.sigmoid() * e
        if "markov_head.joint_proj.weight" in weights:
            joint = (
                weights["markov_head.joint_proj.weight"] @ torch.cat([memory, e, state])
                + weights["markov_head.joint_proj.bias"]
            )
            a, c, o = joint.chunk(3)
            memory = a.sigmoid() * memory + (1 - a.sigmoid()) * c.tanh()
            e = o.tanh()
        rows.append(row + weights["markov_head.markov_w2.weight"] @ e)
        token = int(rows[-1].argmax())
    return torch.stack(rows)


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
