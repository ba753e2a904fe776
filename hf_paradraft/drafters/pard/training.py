"""Train a PARD drafter: a `Trainer` whose batches are parallel-draft rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from ...decoding.tree_attention import additive, attention_windows
from ...files import hub_name
from ...names import attention_of
from ...outer_names import find_adapter_config_file
from ...training.losses import cross_entropy
from ...training.rows import CodConfig, RowCollator, may_attend
from ...training.run import RunInputs, TrainingOptions, option
from ...training.target import config_of, is_packed, open_model, refuse_packed
from ...training.target_training import acceptance
from ...training.trainer import RowTrainer
from .config import MASK_KEYS
from .model import PardDrafter

logger = logging.get_logger(__name__)
JUDGED = 64  # evaluation rows whose acceptance is measured


def block_mask(depths: Tensor, positions: Tensor):
    """Make the attention mask of a padded batch as a FlexAttention `BlockMask`.

    Args:
        depths: int64 `(B, R)`, -1 for padding, which sees only itself.
        positions: int64 `(B, R)`.
    """

    def rule(batch, head, row, other):
        seen = may_attend(
            depths[batch, row], positions[batch, row], depths[batch, other], positions[batch, other]
        )
        return seen | (row == other)

    size, length = depths.shape
    # uncompiled, it goes through R² entries
    make = torch.compile(create_block_mask) if depths.is_cuda else create_block_mask
    return make(rule, size, None, length, length, device=depths.device)


class PardTrainer(RowTrainer):
    """Cross-entropy over kept rows with labels (PARD, section 3.3).

    Args:
        model: the drafter.
        args: any `TrainingArguments`.
        cod: the rows to keep in training; evaluation keeps all.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(
        self,
        model: PardDrafter,
        args: TrainingArguments,
        cod: CodConfig | None = None,
        **kwargs: Any,
    ):
        self.attention = attention_of(model)
        dense_masks = self.attention != "flex_attention"
        collator = RowCollator(model.mask_token_id, cod or CodConfig(), args.seed, dense_masks)
        super().__init__(model, args, collator, **kwargs)

    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> Tensor:
        """Implement `RowTrainer.row_losses`."""
        rows = {name: value for name, value in inputs.items() if name != "depths"}
        if self.attention == "flex_attention":
            rows["attention_mask"] = block_mask(inputs["depths"], inputs["position_ids"])
        elif self.attention == "eager":  # adds its mask
            rows["attention_mask"] = additive(inputs["attention_mask"], self.model.dtype)
        outputs = model(**rows, use_cache=False, logits_to_keep=columns)
        return cross_entropy(outputs.logits, labels)


@dataclass(kw_only=True)
class PardTraining(TrainingOptions):
    """Teach a small causal LM to draft K tokens in one forward.

    Many devices: run it under `accelerate launch`.
    """

    kind: ClassVar[str] = "pard"
    example: ClassVar[str] = (
        "--model DIR --train-file answers.jsonl --output-dir OUT --mask-token-id 4"
    )
    recorded: ClassVar[tuple[str, ...]] = ("num_depths", "cod_ratio", "cod_min_ratio")

    model: str = option("The small causal LM to teach: folder or Hub id.", read=True)
    target: str | None = option(
        "Measure acceptance against this model; needs --eval-file.", None, read=True
    )
    mask_token_id: int | None = option(
        "Id of the mask token; default: the config's or tokenizer's.", None
    )
    num_depths: int = option("K: tokens drafted in training.", 8, least=1)
    cod_ratio: float = option(
        "r of conditional output dropping; 1 keeps every row.", 0.7, above=0, most=1
    )
    cod_min_ratio: float = option(
        "r_min, the least share of rows of a depth.", 0.2, above=0, most=1
    )
    learning_rate: float = option("Peak learning rate.", 1e-4, above=0)
    lr_scheduler_type: str = option("Schedule: cosine, linear, constant, …", "linear")

    @property
    def defaults(self) -> dict[str, Any]:
        """The paper's; and fp32 but on a GPU."""
        bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        return {"weight_decay": 0.01, "adam_beta2": 0.95, "bf16": bf16}

    def check(self) -> None:
        """Implement `TrainingOptions.check`; a missing target is noticed before training."""
        super().check()
        refuse_packed(self.model, "a PARD drafter is trained of ordinary ones")
        if self.target is None:
            return
        if self.eval_file is None:
            raise ValueError(
                "Acceptance against a target is measured on evaluation rows: pass an evaluation "
                "file too."
            )
        if not is_packed(self.target) and find_adapter_config_file(self.target) is None:
            config_of(self.target)

    def open_model(self, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> PardDrafter:
        """Load the small model as a drafter, in fp32: AdamW's small steps vanish in bf16."""
        config, mask = config_of(self.model), self.mask_token_id
        if mask is None and all(getattr(config, key, None) is None for key in MASK_KEYS):
            mask = tokenizer.mask_token_id
            if mask is None:
                raise ValueError(
                    f"{self.model} names no mask token: pass --mask-token-id, an id that ordinary "
                    "text does not use."
                )
        # no mask of R² entries
        attention = {"attn_implementation": "flex_attention"} if torch.cuda.is_available() else {}
        return PardDrafter.from_causal_lm(
            self.model, mask_token_id=mask, dtype=torch.float32, **attention
        )

    def untrained(self, inputs: RunInputs) -> PardDrafter:
        """Implement `TrainingOptions.untrained`."""
        drafter = cast(PardDrafter, inputs.model)
        if attention_windows(drafter) is None and attention_of(drafter) != "flex_attention":
            raise ValueError(
                f"{type(drafter).__name__} takes no masks and positions as they are given, and is "
                "taught by rows that need them: take a model whose layers are all of ordinary "
                "attention."
            )
        if used := sum(drafter.mask_token_id in ids for ids in inputs.train_set["input_ids"]):
            logger.warning(
                "The mask token %d stands in %d of %d samples: take an id that ordinary text does "
                "not use, or the drafter takes those for guesses to "
                "make.", drafter.mask_token_id, used, len(inputs.train_set),
            )  # fmt: skip
        options = drafter.speculation_config
        options.num_draft_tokens = max(options.num_draft_tokens, self.num_depths)
        return drafter

    def trainer(self, drafter: PardDrafter, inputs: RunInputs) -> PardTrainer:
        """Implement `TrainingOptions.trainer`."""
        return PardTrainer(
            drafter,
            inputs.arguments,
            CodConfig(self.num_depths, self.cod_ratio, self.cod_min_ratio),
            **inputs.sets,
        )

    @property
    def models(self) -> dict[str, str | None]:
        """Implement `TrainingOptions.models`."""
        return {"base_model": hub_name(str(self.model)), "target": hub_name(str(self.target))}

    def measure(self, drafter: PardDrafter, inputs: RunInputs) -> dict[str, Any]:
        """Measure the acceptance of chains on evaluation rows, if there is a target."""
        if self.target is None:
            return {}
        target = open_model(self.target, dtype=drafter.dtype)
        return acceptance(target, drafter, inputs.tokenizer, inputs.eval_set, JUDGED)
