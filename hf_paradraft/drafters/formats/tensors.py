"""Names of published drafters' tensors, as each publisher writes them, and as they are called
here.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

# Statistics, masks over the vocabulary's padding and copies of the target's are no weights of a
# drafter's.
LEFT_OUT = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")
# read, and not written: the speculators layout has other names
OLDER = (
    "encoder.",
    "logit_head.",
    "midlayer.",
    "xpress_head.",
)
BLOCKS = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "embed_tokens.": "embedding.",
    "lm_head.": "head.",
    "norm.": "stack.norm.",
    "layers.": "stack.layers.",
    **{
        f"{head}.{theirs}.": f"markov.{ours}."
        for head in ("logit_head", "markov_head")
        for theirs, ours in (
            ("markov_w1", "before"),
            ("markov_w2", "after"),
            ("gate_proj", "gate"),
            ("joint_proj", "joint"),
        )
    },
    "confidence_head.proj.": "confidence.",
    "candidate_selector.": "selector.",
    "refiner_head.": "refiner.",
    "xpress_head.w1.": "refiner.token_embed.",
    "xpress_head.w2.": "refiner.readout.",
    "xpress_head.mix.L": "refiner.mix_l",
    **{f"xpress_head.mlp.{part}_proj.": f"refiner.mlp_{part}." for part in ("gate", "up", "down")},
    "xpress_head.": "refiner.",
}
EAGLE3 = {
    "midlayer.hidden_norm.": "hidden_norm.",
    "layers.0.hidden_norm.": "hidden_norm.",
    "midlayer.": "stack.layers.0.",
    "layers.": "stack.layers.",
    "norm.": "stack.norm.",
    "embed_tokens.": "embedding.",
    "lm_head.": "head.",
}


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename published weights to this library's names.

    Unknown names stay, so that strict loading reports them.

    Args:
        tensors: the tensors as published.
        table: publishers' prefixes, and ours.
    """
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {
        _with_prefix(name, table): tensor for name, tensor in bare.items() if name not in LEFT_OUT
    }


def published(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename weights to the names of the speculators layout; arguments as for `renamed`."""
    back = {ours: theirs for theirs, ours in table.items() if not theirs.startswith(OLDER)}
    return {_with_prefix(name, back): tensor for name, tensor in tensors.items()}


def _with_prefix(name: str, table: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in table if name.startswith(prefix)), None)
    return name if prefix is None else table[prefix] + name.removeprefix(prefix)


def neighbours_to_halves(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Reorder weights for a rotary embedding that turns halves instead of neighbours.

    Their scores stay the same.

    Args:
        tensors: the tensors of a drafter; the rows of each head's queries and keys, and of their
            norms, change places.
        head_dim: numbers of a head.
    """
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    turned = re.compile(r"self_attn\.(q|k)_(proj|norm)\.(weight|bias)$")
    return {
        name: tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
        if turned.search(name)
        else tensor
        for name, tensor in tensors.items()
    }
