"""Parts of layers: norms, rotary embeddings, attention, MLPs."""

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
