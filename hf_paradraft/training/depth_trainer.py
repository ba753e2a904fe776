"""The trainer of drafters that guess at several depths: one flat mean over all guesses of a step,
and a figure for each depth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import TrainingArguments

from .epochs import CountEpochs, ResumableTrainer


class DepthTrainer(ResumableTrainer):
    """A trainer on guesses at `count` depths; evaluation reports `eval_{figure}_depth_d`.

    Args:
        model: what is called with batches.
        args: any `TrainingArguments`; columns are kept and samples grouped by length.
        collator: has an attribute `epoch`.
        count: K.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    figure: str

    def __init__(
        self, model: Any, args: TrainingArguments, collator: Any, count: int, **kwargs: Any
    ):
        args.remove_unused_columns = False
        super().__init__(model=model, args=args, data_collator=collator, **kwargs)
        self.add_callback(CountEpochs(collator))
        self.model_accepts_loss_kwargs = (
            True  # the loss is divided by the guesses of all accumulated batches
        )
        self._loss_shifts_labels = (
            False  # so that Trainer counts every label: a guess's label is its own
        )
        self._figures = torch.zeros(count, 2, dtype=torch.float64)  # sum and count of each depth

    def mean(
        self, losses: Tensor, count: int | Tensor, num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        """Average the weighted losses of a batch that has `count` guesses.

        They are divided by the guesses of the whole step, if those are known.
        """
        guesses = int(count if num_items_in_batch is None else num_items_in_batch)
        loss = losses.sum() / max(1, guesses)  # there may be none
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # the count is everyone's, and gradients are averaged
            loss = loss * self.accelerator.num_processes
        return loss

    def judge(self, values: Tensor, depths: LongTensor) -> None:
        """Keep the figures `(n,)` of guesses that are evaluated."""
        if self.model.training:
            return
        for depth in range(len(self._figures)):
            here = values[depths == depth]
            self._figures[depth] += torch.tensor([here.sum().item(), here.numel()])

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Run `Trainer.evaluate`, and add the mean figure of each depth."""
        self._figures.zero_()
        metrics = super().evaluate(*args, **kwargs)
        totals = self.accelerator.reduce(self._figures.to(self.args.device)).tolist()
        by_depth = {
            f"eval_{self.figure}_depth_{depth}": total / count
            for depth, (total, count) in enumerate(totals)
            if count
        }
        self.log(by_depth)
        return {**metrics, **by_depth}
