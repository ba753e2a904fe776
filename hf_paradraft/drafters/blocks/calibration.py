"""Confidences that mean what they say: sequential temperature scaling (DSpark, section 3.3)."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...decoding.sampling import to_target
from ...training.anchors import AnchorCollator
from ...training.data import IGNORED
from ...training.target_states import states_of
from .slots import slots

HEATS = [0.25 * 1.12**step for step in range(26)]  # 0.25 to 4.2
BINS = 10


def calibration_error(chances: Tensor, came_true: Tensor) -> float:
    """Compute the expected calibration error of chances: |chance - rate of hits|, a mean over bins weighted by their size.

    Args:
        chances: `(n,)`, in [0, 1].
        came_true: bool `(n,)`.
    """
    places = (chances * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.double).index_add(0, places, chances.double() - came_true.double())
    return float(sums.abs().sum()) / len(chances)


def temperatures(logits: Tensor, right: Tensor) -> list[float]:
    """Choose for each depth in turn the temperature that calibrates best the chance that all guesses so far are right.

    Args:
        logits: `(n, K)`, of the confidences.
        right: bool `(n, K)`, which guesses were right behind right ones; what follows a wrong one does not count.
    """
    chances, together, heats = torch.ones(len(logits)), right.cumprod(1).bool(), []
    for depth in range(logits.shape[1]):
        trials = [chances * torch.sigmoid(logits[:, depth] / heat) for heat in HEATS]
        errors = [calibration_error(trial, together[:, depth]) for trial in trials]
        best = min(range(len(HEATS)), key=errors.__getitem__)
        heats.append(HEATS[best])
        chances = trials[best]
    return heats


@torch.no_grad()
def calibrate(drafter: Any, target: PreTrainedModel, samples: Dataset, num_anchors: int = 32) -> list[float]:
    """Choose the temperatures of a drafter's confidences, by texts that it was not trained on.

    Args:
        drafter: a trained DSpark drafter, attached.
        target: its.
        samples: from `encode_rows`.
        num_anchors: blocks in each text, at most.
    """
    collator = AnchorCollator(num_anchors, drafter.block.block_size)
    logits, right = [], []
    for sample in tqdm(samples, desc="calibrate", unit="texts", leave=False):
        batch = {name: tensor.to(drafter.device) for name, tensor in collator([sample]).items()}
        seen = torch.arange(batch["input_ids"].shape[1], device=drafter.device) < batch["lengths"][:, None]
        states = states_of(target, drafter.features, batch["input_ids"], seen)
        guesses = slots(drafter, batch, {key: values.to(drafter.dtype) for key, values in states.items()})
        best = to_target(guesses["logits"].argmax(-1), drafter.vocabulary)
        whole = (batch["labels"] != IGNORED).all(-1)
        logits.append(guesses["confidence"][whole].float().cpu())
        right.append((best == batch["labels"])[whole].cpu())
    together = torch.cat(logits)
    if not len(together):
        return [1.0] * drafter.most_drafts
    return temperatures(together, torch.cat(right))
