"""Losses of drafters: a wrong token, or a guess that the target would reject."""

import torch.nn.functional as F
from torch import LongTensor, Tensor

from .data import IGNORED


def cross_entropy(logits: Tensor, labels: LongTensor) -> Tensor:
    """Compute the cross-entropy of each row, `(…)`; 0 for a row without a label.

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
