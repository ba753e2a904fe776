"""Train prompt tokens: the frozen model teaches them what it would say at their place (PPD, section 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import TrainingArguments

from ...training.epochs import CountEpochs, ResumableTrainer
from .guess import check_takes_masks, guess_at
from .rows import insertion_points


@dataclass
class PpdTraining:
    """Options of training.

    Args:
        points: where prompts are inserted in each text, at most.
        decay: α, the weight of distance `i` (from 0) is `αⁱ`.
        hard_labels: learn the text's own tokens, instead of the model's distribution; for comparison; the paper finds it worse.

    Raises:
        ValueError: an option out of range.
    """

    points: int = 32
    decay: float = 0.8
    hard_labels: bool = False

    def __post_init__(self):
        if self.points < 1 or not 0 < self.decay <= 1:
            raise ValueError(f"points must be at least 1 and decay in (0, 1], but they are {self.points} and {self.decay}.")


class PromptCollator:
    """Encoded samples to a padded batch of texts with their insertion points.

    Args:
        num_prompt_tokens: m.
        points: at most, in each text.
        seed: of the choice; the same sample in the same epoch always gets the same points.
    """

    def __init__(self, num_prompt_tokens: int, points: int, seed: int = 0):
        self.m, self.points, self.seed, self.epoch = num_prompt_tokens, points, seed, 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Texts padded on the right, and points padded with -1.

        Returns:
            `input_ids` int64 `(B, n)` and `points` int64 `(B, P)`, positions of labelled tokens or the one before.
        """
        width = max(len(sample["input_ids"]) for sample in samples)
        ids = [F.pad(torch.tensor(sample["input_ids"]), (0, width - len(sample["input_ids"]))) for sample in samples]
        points = []
        for sample in samples:
            generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63)
            # A chat's prompt is never written, so there is nothing to guess in it.
            begin = max(0, next(t for t, label in enumerate(sample["labels"]) if label != -100) - 1)
            found = begin + insertion_points(len(sample["input_ids"]) - begin, self.m, self.points, generator)
            points.append(F.pad(found, (0, self.points - len(found)), value=-1))
        return {"input_ids": torch.stack(ids), "points": torch.stack(points)}


class PpdTrainer(ResumableTrainer):
    """KL from the model's own distributions to the prompts' guesses, teacher and student in one forward.

    Args:
        model: with an active PPD adapter; all else is frozen.
        args: any `TrainingArguments`.
        options: see `PpdTraining`.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    def __init__(self, model: PeftModel, args: TrainingArguments, options: PpdTraining | None = None, **kwargs: Any):
        args.remove_unused_columns = False
        self.options, self.config = options or PpdTraining(), model.active_peft_config
        check_takes_masks(model.get_base_model())
        collator = PromptCollator(self.config.num_prompt_tokens, self.options.points, args.seed)
        super().__init__(model=model, args=args, data_collator=collator, **kwargs)
        self.add_callback(CountEpochs(collator))

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch: Any = None):
        """`Σ αⁱ KL(Pᵢ ‖ Qᵢ)`, a mean over points; with hard labels, cross-entropy instead."""
        base = self.accelerator.unwrap_model(model).get_base_model()
        model.eval()  # a teacher without dropout; prompts have none
        guesses, teachers, tokens, _ = guess_at(model, base, self.config, inputs["input_ids"], inputs["points"])
        if self.options.hard_labels:
            losses = F.cross_entropy(guesses.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
        else:
            losses = F.kl_div(guesses.log_softmax(-1), teachers.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        weights = self.options.decay ** torch.arange(losses.shape[1], device=losses.device)
        loss = (losses * weights).sum(1).sum() / max(1, len(losses))
        return (loss, (guesses, teachers)) if return_outputs else loss

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss, and at each distance `i` (from 1) how often the target's own choice is the guess (`@i_top1`) or among five."""
        model = self.model.eval()
        losses, hits = [], []
        for inputs in self.get_eval_dataloader(eval_dataset):
            inputs = self._prepare_inputs(inputs)
            loss, (guesses, teachers) = self.compute_loss(model, inputs, return_outputs=True)
            losses.append(loss)
            top = guesses.topk(min(5, guesses.shape[-1]), dim=-1).indices == teachers.argmax(-1, keepdim=True)
            hits.append(torch.stack([top[..., 0], top.any(-1)], dim=-1).float())
        rates = torch.cat(hits).mean(0).tolist()
        metrics = {f"{metric_key_prefix}_loss": torch.stack(losses).mean().item()}
        for distance, (first, five) in enumerate(rates, 1):
            metrics |= {f"{metric_key_prefix}_@{distance}_top1": first, f"{metric_key_prefix}_@{distance}_top5": five}
        self.log(dict(metrics))
        return metrics
