"""Train UNO adapters: the frozen model teaches its own rows over noise what it would say at their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import BoolTensor, LongTensor, Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ...protocol import SpeculationConfig
from ...training.run import RunInputs, option
from ..ppd.guess import ask_at
from ..ppd.training import AdapterTraining, DistanceTrainer
from ..ppd.tuner import check_embeds_once
from .adapter import PlainRows, spare
from .model import UnoDrafter


class UnoTrainer(DistanceTrainer):
    """KL from the model's own distributions to its guesses over noise, teacher and student in one forward.

    Args:
        model: with LoRA; all else is frozen.
        args: any `TrainingArguments`.
        distances: tokens of noise behind each place.
        points: places in each text, at most.
        decay: as for `DistanceTrainer`.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(self, model: PeftModel, args: TrainingArguments, distances: int, points: int, decay: float, **kwargs: Any):
        super().__init__(model, args, distances, points, decay, **kwargs)
        self.plain = PlainRows()
        spare(model, self.plain)

    def guess(self, model: Any, ids: LongTensor, points: LongTensor) -> tuple[Tensor, Tensor, LongTensor, BoolTensor]:
        """Implement `DistanceTrainer.guess`."""
        base = self.accelerator.unwrap_model(model).get_base_model()
        self.plain.count = ids.shape[1]  # the text's own rows are its teachers
        noise = torch.randint(base.config.get_text_config().vocab_size, (len(ids), points.shape[1] * self.m), device=ids.device)
        return ask_at(model, base, ids, points, base.get_input_embeddings()(noise), self.m)


@dataclass(kw_only=True)
class UnoTraining(AdapterTraining):
    """Train LoRA that lets a model guess over noise: the model verifies without it, and stays as it is."""

    kind: ClassVar[str] = "uno"
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT"

    num_draft_tokens: int = option("K: tokens that are guessed, the first by the model itself.", 4, least=2)
    rank: int = option("Of the adapter.", 32, least=1)
    learning_rate: float = option("Peak learning rate.", 1e-3, above=0)

    def prepare(self, inputs: RunInputs) -> tuple[PeftModel, UnoTrainer]:
        """Implement `TrainingOptions.prepare`."""
        check_embeds_once(inputs.model)
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(inputs.model, config)
        sets = {"train_dataset": inputs.train_set, "eval_dataset": inputs.eval_set}
        return adapted, UnoTrainer(adapted, inputs.arguments, self.num_draft_tokens - 1, self.points, self.decay, **sets)

    def record(self) -> dict[str, Any]:
        """Implement `TrainingOptions.record`."""
        return {**super().record(), "num_draft_tokens": self.num_draft_tokens, "rank": self.rank}

    def save(self, drafter: PeftModel, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], folder: Any) -> None:
        """Implement `TrainingOptions.save`."""
        made = self.result(drafter)
        made.remember(record)
        made.save_pretrained(folder)

    def measure(self, drafter: PeftModel, inputs: RunInputs) -> dict[str, Any]:
        """Nothing beside the loss and the guesses at each distance."""
        return {}

    def result(self, drafter: PeftModel) -> UnoDrafter:
        """The drafter that the adapter is."""
        tensors = {name: tensor.detach() for name, tensor in get_peft_model_state_dict(drafter).items()}
        return UnoDrafter(drafter.active_peft_config, tensors, SpeculationConfig(self.num_draft_tokens))
