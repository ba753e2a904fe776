"""Losses of drafters: a wrong token, a guess that the target would reject, or another distribution
than the target's.
"""

from typing import Literal

import torch.nn.functional as F
from torch import LongTensor, Tensor

from .rows import IGNORED

Loss = Literal["ce", "tv"]
LOSSES = "ce: cross-entropy; tv: 0.1 of it and 0.9 of the chance that the target rejects a guess."


def cross_entropy(logits: Tensor, labels: LongTensor) -> Tensor:
    """Compute the cross-entropy of each row, `(…)`; 0 for a row without a label.

    Args:
        logits: the drafter's, `(…, V')`.
        labels: the right tokens, int64 `(…)`.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view_as(labels)


def rejection(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Compute the total variation `½ ‖p - q‖₁` of each row `(…)`.

    The total variation is the chance that rejection sampling rejects a draft.

    Args:
        logits: `(…, V')`, the drafter's.
        probabilities: `(…, V')`, the target's, of the same tokens; the rest to 1 is the share of
            tokens that are not drafted.
    """
    q = logits.float().softmax(-1)
    missing = 1 - probabilities.sum(-1)
    return 0.5 * ((probabilities - q).abs().sum(-1) + missing.clamp(min=0))


def divergence(logits: Tensor, teachers: Tensor) -> Tensor:
    """Compute `KL(p ‖ q)` of each row `(…)`, of the teacher's `p` and the drafter's `q`.

    Both are given as logits `(…, V)`.
    """
    return F.kl_div(
        logits.log_softmax(-1), teachers.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)


def mixed(loss: Loss, wrong: Tensor, rejected: Tensor) -> Tensor:
    """Compute the loss of that name, of each row `(n,)`.

    Args:
        loss: the loss's name.
        wrong: the cross-entropy, `(n,)`.
        rejected: the total variation, `(n,)`, from `rejection`.
    """
    return wrong if loss == "ce" else 0.1 * wrong + 0.9 * rejected
