"""Batches of training rows, and the trainer that learns from them: PARD's and ParallelSpec's
alike.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import BoolTensor, LongTensor, Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import TrainingArguments

from .data import IGNORED
from .rows import SHAPES, ChoosingCollator, cod_keep_mask, draft_rows, may_attend, useful_rows
from .trainer import DepthTrainer
from .vocabulary import places_in


@dataclass
class CodConfig:
    """Conditional output dropping (PARD, section 3.4).

    Args:
        num_depths: K, tokens drafted in training.
        ratio: r; 1 drops nothing.
        min_ratio: r_min.
    """

    num_depths: int = 8
    ratio: float = 0.7
    min_ratio: float = 0.2

    def __post_init__(self):
        # raises for what is out of range
        cod_keep_mask(1, self.num_depths, self.ratio, self.min_ratio)


class RowCollator(ChoosingCollator):
    """A collator of encoded samples to one padded batch of rows.

    Args:
        mask_token_id: the drafter's.
        cod: which rows to keep.
        seed: of the choice.
        dense_masks: build boolean masks; without them the model's forward needs `block_mask`.
        vocabulary: int64 `(V',)`, the ids that the drafter can guess; labels are places in it, and
            others are not learned.
    """

    def __init__(
        self,
        mask_token_id: int,
        cod: CodConfig,
        seed: int = 0,
        dense_masks: bool = True,
        vocabulary: LongTensor | None = None,
    ):
        super().__init__(seed)
        self.mask_token_id, self.cod, self.dense_masks = mask_token_id, cod, dense_masks
        self.vocabulary = None if vocabulary is None else vocabulary.cpu()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Pad to the longest.

        Returns:
            `input_ids`, `position_ids`, `labels` and `depths`, int64 `(B, R)`, padding rows with
            label -100 and depth -1, and with `dense_masks`, `attention_mask`, bool `(B, 1, R, R)`.
        """
        rows = [self.rows(sample) for sample in samples]
        width = max(len(sample["input_ids"]) for sample in rows)
        width += -width % SHAPES

        def pad(name: str, value: int) -> Tensor:
            return torch.stack(
                [
                    F.pad(sample[name], (0, width - len(sample[name])), value=value)
                    for sample in rows
                ]
            )

        depths, positions = pad("depths", -1), pad("position_ids", 0)
        batch = {
            "input_ids": pad("input_ids", 0),
            "position_ids": positions,
            "labels": pad("labels", -100),
            "depths": depths,
        }
        if not self.dense_masks:
            return batch
        # padding rows see themselves: no empty softmax
        mask = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
        for index, sample in enumerate(rows):
            depth, position = sample["depths"], sample["position_ids"]
            length = len(sample["depths"])
            mask[index, :length, :length] = may_attend(
                depth[:, None], position[:, None], depth, position
            )
        return {**batch, "attention_mask": mask[:, None]}

    def keep(self, seq_len: int, generator: torch.Generator) -> BoolTensor:
        """Choose which rows of a sample to train on, bool `(K, seq_len)`."""
        return cod_keep_mask(
            seq_len, self.cod.num_depths, self.cod.ratio, self.cod.min_ratio, generator
        )

    def rows(self, sample: dict[str, Any]) -> dict[str, Tensor]:
        """Make the training rows of one sample, with their `depths`."""
        ids, labels = torch.tensor(sample["input_ids"]), torch.tensor(sample["labels"])
        if self.vocabulary is not None:
            labels = places_in(self.vocabulary, labels)
        keep = useful_rows(self.keep(len(ids), self.generator(sample)), labels)
        return draft_rows(ids, labels, self.mask_token_id, keep)


def block_mask(depths: Tensor, positions: Tensor):
    """Make the attention mask of a padded batch as a FlexAttention `BlockMask`.

    Args:
        depths: int64 `(B, R)`, -1 for padding, which sees itself alone.
        positions: int64 `(B, R)`.
    """

    def rule(batch, head, row, other):
        allowed = may_attend(
            depths[batch, row], positions[batch, row], depths[batch, other], positions[batch, other]
        )
        return (allowed & (depths[batch, row] >= 0) & (depths[batch, other] >= 0)) | (row == other)

    size, length = depths.shape
    # uncompiled, it goes through R² entries
    make = torch.compile(create_block_mask) if depths.is_cuda else create_block_mask
    return make(rule, size, None, length, length, device=depths.device)


class RowTrainer(DepthTrainer):
    """A trainer on the labelled rows of a `RowCollator`.

    A kind of drafter defines the loss of a row.

    Args:
        model: the drafter.
        args: any `TrainingArguments`.
        collator: of its rows.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(self, model: Any, args: TrainingArguments, collator: RowCollator, **kwargs: Any):
        super().__init__(model, args, collator, collator.cod.num_depths, **kwargs)

    @abstractmethod
    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> Tensor:
        """Compute the loss of each row `(B, C)`, 0 where it has no label.

        Args:
            model: wrapped, if there are several processes.
            inputs: the batch, without labels.
            labels, depths: int64 `(B, C)`.
            columns: int64 `(C,)`, of the rows that have a label somewhere.
        """

    def guess_losses(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `DepthTrainer.guess_losses`.

        Logits are computed only for columns that have a label somewhere, and for a few more that
        make their number a multiple of `SHAPES`.
        """
        labels = inputs.pop("labels")
        wanted = (labels != IGNORED).any(0)
        count = int(wanted.sum())
        columns = wanted.byte().argsort(descending=True, stable=True)[: count + -count % SHAPES]
        labels, depths = labels[:, columns], inputs["depths"][:, columns]
        losses = self.row_losses(model, inputs, labels, depths, columns)
        learned = labels != IGNORED
        return losses, losses[learned], depths[learned]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Implement `DepthTrainer.evaluate`, over all rows of every depth."""
        collator: Any = self.data_collator
        dropping, collator.cod = collator.cod, CodConfig(collator.cod.num_depths, 1.0, 1.0)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            collator.cod = dropping
