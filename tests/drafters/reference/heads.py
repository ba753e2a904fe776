"""Heads whose guesses depend on the token before: DSpark's, DSpine's, DFlash2's, XPress's."""

import torch

from .layers import mlp, norm


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
