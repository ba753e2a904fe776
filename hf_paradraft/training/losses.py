"""What a drafter is punished for: a wrong token, or a guess that the target would reject."""

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor

from .data import IGNORED

ROWS = 256  # of which the target's distribution over all tokens is held at once


def cross_entropy(logits: Tensor, labels: LongTensor) -> Tensor:
    """Of each row, `(…)`; 0 where it has no label.

    Args:
        logits: `(…, V')`.
        labels: int64 `(…)`.
    """
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels)


def rejection(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Total variation `½ ‖p - q‖₁`, the chance that rejection sampling rejects a draft, of each row `(…)`.

    Args:
        logits: `(…, V')`, the drafter's.
        probabilities: `(…, V')`, the target's, of the same tokens; what is missing to 1 is of tokens that are not drafted.
    """
    q = logits.float().softmax(-1)
    missing = 1 - probabilities.sum(-1)
    return 0.5 * ((probabilities - q).abs().sum(-1) + missing.clamp(min=0))


@torch.no_grad()
def target_probabilities(states: Tensor, head, vocabulary: LongTensor | None) -> Tensor:
    """The target's distributions at its normed states, float32 `(…, V')`.

    Args:
        states: `(…, hidden)`.
        head: gives logits `(…, V)` of them.
        vocabulary: int64 `(V',)`, the tokens that are wanted; None: all.
    """
    found = []
    for some in states.flatten(0, -2).split(ROWS):
        p = head(some).float().softmax(-1)
        found.append(p if vocabulary is None else p[:, vocabulary.to(p.device)])
    return torch.cat(found).unflatten(0, states.shape[:-1])
