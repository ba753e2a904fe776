"""Training that begins at chosen tokens of every text: anchors, what follows them, and how far the
target would go along.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor
from transformers import TrainingArguments

from .data import IGNORED
from .depth_trainer import DepthTrainer
from .losses import Loss, mixed, rejection
from .optimiser import MuonAdamW
from .target_states import TargetStates


class AnchorCollator:
    """A collator of encoded samples to a padded batch of texts with anchors.

    The same sample in the same epoch always has the same anchors.

    Args:
        num_anchors: of a text, at most.
        block_size: B, guesses after an anchor.
        seed: of the choice.
    """

    def __init__(self, num_anchors: int, block_size: int, seed: int = 0):
        self.num_anchors, self.block_size, self.seed, self.epoch = num_anchors, block_size, seed, 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Pad texts on the right, and choose each text's anchors.

        Texts are padded to the longest plus one block, so that every guess has a place.

        Returns:
            `input_ids` int64 `(B, N)`, padded with 0, `lengths` int64 `(B,)`, `anchors` int64 `(B,
            A)`, padded with -1, and the entries of `guesses_behind`.
        """
        width = max(len(sample["input_ids"]) for sample in samples) + self.block_size
        ids = torch.zeros((len(samples), width), dtype=torch.long)
        labels = torch.full((len(samples), width), IGNORED)
        anchors = torch.full((len(samples), self.num_anchors), -1)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            ids[row, :length], labels[row, :length] = (
                torch.tensor(sample["input_ids"]),
                torch.tensor(sample["labels"]),
            )
            possible = (labels[row, 1:] != IGNORED).nonzero()[:, 0]
            possible = possible[possible > 0]  # a context of one token at least
            generator = torch.Generator().manual_seed(
                hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63
            )
            chosen = possible[
                torch.randperm(len(possible), generator=generator)[: self.num_anchors]
            ].sort()[0]
            anchors[row, : len(chosen)] = chosen
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        guesses = guesses_behind(ids, labels, anchors, self.block_size)
        return {"input_ids": ids, "lengths": lengths, "anchors": anchors, **guesses}


def guesses_behind(
    ids: LongTensor, labels: LongTensor, anchors: LongTensor, count: int
) -> dict[str, LongTensor]:
    """Gather the guesses after each anchor: their labels, and the tokens before them.

    Args:
        ids, labels: int64 `(B, N)`, a block wider than the longest text; -100 for what is not to be
            learned.
        anchors: int64 `(B, A)`, -1 for none.
        count: K.

    Returns:
        int64 `(B, A, K)`: `places` of the tokens before each guess, which the first time is the
        anchor, `before`, their ids, and `labels` in the target's ids, -100 from the first token on
        that is not to be learned.
    """
    positions = anchors.clamp(min=0)[..., None] + torch.arange(count)
    following = labels.gather(1, (positions + 1).clamp(max=ids.shape[1] - 1).flatten(1)).view_as(
        positions
    )
    unbroken = ((following != IGNORED) & (anchors >= 0)[..., None]).cumprod(-1).bool()
    before = ids.gather(1, positions.flatten(1)).view_as(positions)
    return {"places": positions, "before": before, "labels": following.where(unbroken, IGNORED)}


class AnchorTrainer(DepthTrainer):
    """A loss that fades with depth, and how well the drafter knows the chance that it is rejected.

    Evaluation reports the chance of acceptance under rejection sampling.

    Args:
        model: holds a `drafter` that is attached to its target; its forward takes a batch and the
            target's states, and gives `logits` `(B, A, K, V')`, and perhaps `confidence` `(B, A,
            K)`.
        args: any `TrainingArguments`.
        states: of the target.
        count: K.
        fading: weight of each guess, of that before it.
        num_anchors: of a text, at most.
        loss: by name.
        kwargs: as for `Trainer`, with datasets from `encode_rows`.
    """

    figure = "acceptance"

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        states: TargetStates,
        count: int,
        fading: float,
        num_anchors: int,
        loss: Loss = "tv",
        **kwargs: Any,
    ):
        super().__init__(
            model, args, AnchorCollator(num_anchors, count, args.seed), count, **kwargs
        )
        self.drafter: Any = model.drafter
        self.states, self.fading, self.loss = states, fading, loss
        self.places: LongTensor | None = None
        if self.drafter.vocabulary is not None:
            self.places = torch.full((states.target.config.get_text_config().vocab_size,), IGNORED)
            self.places[self.drafter.vocabulary.cpu()] = torch.arange(len(self.drafter.vocabulary))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `MuonAdamW`, unless `optim` names another one or processes share weights.

        Where processes share weights, no matrix is whole.
        """
        args, split = self.args, self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.optimizer is None and args.optim == "adamw_torch_fused" and not split:
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer: Any = MuonAdamW(
                self.model, args.learning_rate, betas, args.adam_epsilon, args.weight_decay
            )
        return super().create_optimizer(model)

    def compute_loss(
        self,
        model,
        inputs,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ):
        """Compute the mean loss over all guesses, weighted by depth."""
        states = self.states(inputs["input_ids"], inputs["lengths"])
        outputs = model(
            inputs, {key: states[key].to(self.drafter.dtype) for key in self.drafter.features}
        )
        labels, positions = inputs["labels"], inputs["places"]
        learned = labels != IGNORED
        if self.places is not None:
            labels = torch.where(
                learned, self.places.to(labels.device)[labels.clamp(min=0)], IGNORED
            )
        logits, labels = outputs["logits"][learned], labels[learned]
        where = learned.nonzero(as_tuple=True)
        rejected = rejection(
            logits, self.states.probabilities(states, where[0], positions[learned])
        )
        losses = mixed(self.loss, logits, labels, rejected)
        if "confidence" in outputs:
            sure = outputs["confidence"][learned].float()
            losses = losses + F.binary_cross_entropy_with_logits(
                sure, (1 - rejected).detach().clamp(0, 1), reduction="none"
            )
        self.judge(1 - rejected, where[2])
        loss = self.mean(
            losses * self.fading ** where[2].to(losses), learned.sum(), num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss
