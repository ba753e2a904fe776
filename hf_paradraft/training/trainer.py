"""The trainers of all kinds: a resumed run equals a whole one; losses are means over guesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import Trainer, TrainingArguments

from ..decoding.tree_attention import without_cudnn_attention
from ..outer_names import LengthGroupedSampler
from .rows import IGNORED, SHAPES, ChoosingCollator, CodConfig


class LengthGroups(LengthGroupedSampler):
    """Samples of similar length together, in an order that depends only on the seed and the epoch.

    transformers' own draws its order from the global generator, so a run that is resumed in a later
    epoch gets another one.

    Args:
        lengths: the lengths of all samples.
        batch_size: the samples of an optimiser step.
        seed: the seed of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order depends on; Trainer calls this before each epoch."""
        self.generator.manual_seed(1_000_003 * self.seed + epoch)


class ResumableTrainer(Trainer):
    """A `Trainer` whose resumed run equals the uninterrupted run.

    Datasets have a column `length`; all of their columns are kept. Training stops where the loss is
    no number any more, before weights that are none are saved.
    """

    def __init__(self, model: Any, args: TrainingArguments, **kwargs: Any):
        args.remove_unused_columns = False
        super().__init__(model=model, args=args, **kwargs)

    @without_cudnn_attention()
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`: every batch has another shape."""
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Implement `Trainer.training_step`.

        Raises:
            ValueError: the loss is not finite.
        """
        loss = super().training_step(*args, **kwargs)
        if not loss.isfinite():
            raise ValueError(
                f"The loss is {loss.item()} in step {self.state.global_step + 1}: lower the "
                f"learning rate ({self.args.learning_rate:g}). What was saved before is as it was."
            )
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except RuntimeError as error:  # torch says so in words of its own
            raise OSError(
                f"{self.args.output_dir} could not be written: is the disk full? ({error})"
            ) from error

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Compute only the loss: logits over every row would be large and of no use."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # else it is resumed, and has made all its steps
        if self.state.global_step < self.state.max_steps:
            epoch = int(self.state.epoch or 0)
            # Trainer does not reach it if a run of several processes is resumed
            self.train_sampler.set_epoch(epoch)
            if isinstance(self.data_collator, ChoosingCollator):
                self.data_collator.epoch = epoch
            super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any) -> LengthGroups:
        batch_size = (
            self.args.train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size
        )
        self.train_sampler = LengthGroups(list(train_dataset["length"]), batch_size, self.args.seed)
        return self.train_sampler


class DepthTrainer(ResumableTrainer, ABC):
    """A trainer on guesses at several depths; evaluation reports `eval_{figure}_depth_d`.

    Args:
        model: the module that is called with batches.
        args: any `TrainingArguments`; samples are grouped by length.
        collator: makes batches with `labels`, one for each guess.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    figure = "loss"

    def __init__(
        self, model: Any, args: TrainingArguments, collator: ChoosingCollator, **kwargs: Any
    ):
        super().__init__(model, args, data_collator=collator, **kwargs)
        # the loss is divided by the guesses of all accumulated batches
        self.model_accepts_loss_kwargs = True
        # so that Trainer counts every label: a guess's label is its own
        self._loss_shifts_labels = False
        # sum and count of each depth
        self._figures = torch.zeros(collator.count, 2, dtype=torch.float64)

    @abstractmethod
    def guess_losses(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, LongTensor]:
        """Compute the weighted losses of a batch's guesses, which are summed.

        Args:
            model: the model, wrapped if there are several processes.
            inputs: the batch.

        Returns:
            The losses, of any shape; and of each guess its figure and its depth, `(n,)`.
        """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the mean loss over all guesses of a step, or only of this batch."""
        losses, figures, depths = self.guess_losses(model, inputs)
        if not self.model.training:
            for depth in range(len(self._figures)):
                here = figures[depths == depth]
                self._figures[depth] += torch.tensor([here.sum().item(), here.numel()])
        guesses = int(len(depths) if num_items_in_batch is None else num_items_in_batch)
        loss = losses.sum() / max(1, guesses)  # there may be none
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # the count is everyone's, and gradients are averaged
            loss = loss * self.accelerator.num_processes
        return loss

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


class RowTrainer(DepthTrainer):
    """A trainer on the labelled rows of a `RowCollator`.

    A kind of drafter defines the loss of a row.
    """

    @abstractmethod
    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> Tensor:
        """Compute the loss of each row `(B, C)`, 0 where it has no label.

        Args:
            model: the model, wrapped if there are several processes.
            inputs: the batch, without labels.
            labels, depths: the labels and depths of the rows, int64 `(B, C)`.
            columns: int64 `(C,)`, the columns of rows that have a label somewhere.
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
        dropping, collator.cod = collator.cod, CodConfig(collator.count, 1.0, 1.0)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            collator.cod = dropping
