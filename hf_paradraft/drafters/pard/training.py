"""Train a PARD drafter: a `Trainer` whose batches are parallel-draft rows."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import TrainingArguments

from ...decoding.tree_attention import additive
from ...training.row_trainer import CodConfig, RowCollator, RowTrainer, block_mask
from .model import PardDrafter


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
        own = inputs.pop("depths")
        match self.attention:
            case "flex_attention":
                inputs["attention_mask"] = block_mask(own, inputs["position_ids"])
            case "eager":  # adds its mask
                inputs["attention_mask"] = additive(inputs["attention_mask"], self.model.dtype)
        outputs = model(**inputs, use_cache=False, logits_to_keep=columns)
        losses = F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels), outputs
