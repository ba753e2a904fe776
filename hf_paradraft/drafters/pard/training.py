"""Train a PARD drafter: a `Trainer` whose batches are parallel-draft rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainingArguments

from ...decoding.tree_attention import additive
from ...training.row_trainer import CodConfig, RowCollator, RowTrainer, block_mask
from .model import PardDrafter


def read_rows(model: Any, inputs: dict[str, Any], columns: Tensor, attention: str, dtype: torch.dtype) -> Any:
    """A causal LM's outputs for a batch of rows, with logits `(B, C, V')`.

    Args:
        model: wrapped, if there are several processes.
        inputs: of a `RowCollator`, without labels.
        columns: int64 `(C,)`, of the rows whose logits are wanted.
        attention: transformers' name of how it attends.
        dtype: of the model.
    """
    inputs = {**inputs}
    depths = inputs.pop("depths")
    match attention:
        case "flex_attention":
            inputs["attention_mask"] = block_mask(depths, inputs["position_ids"])
        case "eager":  # adds its mask
            inputs["attention_mask"] = additive(inputs["attention_mask"], dtype)
    return model(**inputs, use_cache=False, logits_to_keep=columns)


class PardTrainer(RowTrainer):
    """Cross-entropy over kept rows with labels (PARD, section 3.3).

    Args:
        model: the drafter.
        args: any `TrainingArguments`.
        cod: which rows to keep in training; evaluation keeps all.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(self, model: PardDrafter, args: TrainingArguments, cod: CodConfig | None = None, **kwargs: Any):
        self.attention = model.config._attn_implementation
        dense_masks = self.attention != "flex_attention"
        collator = RowCollator(model.mask_token_id, cod or CodConfig(), args.seed, dense_masks, model.vocabulary)
        super().__init__(model, args, collator, **kwargs)

    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> tuple[Tensor, Any]:
        """As `RowTrainer.row_losses`."""
        outputs = read_rows(model, inputs, columns, self.attention, self.model.dtype)
        losses = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels), outputs
