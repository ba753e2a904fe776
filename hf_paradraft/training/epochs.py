"""Random choices that differ from epoch to epoch, and are the same in a resumed run."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback

from ..decoding.tree_attention import without_cudnn_attention
from ..outer_names import get_length_grouped_indices


class LengthGroups(Sampler[int]):
    """Samples of similar length together, in an order that depends on the seed and the epoch alone.

    transformers' own draws its order from the global generator, so a run that is resumed in a later
    epoch gets another one.

    Args:
        lengths: of all samples.
        batch_size: samples of an optimiser step.
        seed: of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order depends on; Trainer calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


class CountEpochs(TrainerCallback):
    """A callback that tells a collator which epoch it is.

    Args:
        collator: has an attribute `epoch`.
    """

    def __init__(self, collator: Any):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.epoch = int(state.epoch or 0)


class ResumableTrainer(Trainer):
    """A `Trainer` whose resumed run equals the uninterrupted run.

    Datasets have a column `length`. Training stops where the loss is no number any more, before
    weights that are none are saved.
    """

    @without_cudnn_attention()
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train`: every batch has another shape."""
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Implement `Trainer.training_step`.

        Raises:
            ValueError: the loss is not finite.
        """
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss).all():
            raise ValueError(
                f"The loss is {loss.item()} in step {self.state.global_step + 1}: lower the "
                f"learning rate ({self.args.learning_rate:g}). What was saved before is as it was."
            )
        return loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Compute the loss alone: logits over every row would be large and of no use."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # else it is resumed, and has made all its steps
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, train_dataset=None) -> LengthGroups:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        batch_size = (
            self.args.train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size
        )
        return LengthGroups(list(dataset["length"]), batch_size, self.args.seed)
