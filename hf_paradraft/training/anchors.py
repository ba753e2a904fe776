"""Training that begins at chosen tokens of every text: anchors, what follows them, and how far the
target would go along.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Muon

from .losses import cross_entropy, mixed, rejection
from .rows import IGNORED, ChoosingCollator, places_in
from .run import RunInputs, option
from .target_training import TargetTraining
from .trainer import DepthTrainer


class AnchorCollator(ChoosingCollator):
    """A collator of encoded samples to a padded batch of texts with anchors.

    Args:
        num_anchors: the anchors of a text, at most.
        count: K, the guesses after an anchor.
        seed: the seed of the choice.
    """

    def __init__(self, num_anchors: int, count: int, seed: int = 0):
        super().__init__(count, seed)
        self.num_anchors = num_anchors

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Pad texts on the right, and choose each text's anchors.

        Texts are padded to the longest plus K, so that every guess has a place.

        Returns:
            `input_ids` int64 `(B, N)`, padded with 0, `lengths` int64 `(B,)`, `anchors` int64 `(B,
            A)`, padded with -1. And int64 `(B, A, K)`: `places` of the tokens before each guess,
            which the first time is the anchor, `before`, their ids, and `labels` in the target's
            ids, -100 from the first token on that is not to be learned.
        """

        def pad(name: str, value: int) -> Tensor:
            columns = [torch.tensor(sample[name]) for sample in samples]
            return F.pad(pad_sequence(columns, True, value), (0, self.count), value=value)

        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        ids, labels = pad("input_ids", 0), pad("labels", IGNORED)
        anchors = torch.full((len(samples), self.num_anchors), -1)
        for row, sample in enumerate(samples):
            possible = (labels[row, 1:] != IGNORED).nonzero()[:, 0]
            possible = possible[possible > 0]  # a context of one token at least
            drawn = torch.randperm(len(possible), generator=self.generator(sample))
            chosen = possible[drawn[: self.num_anchors]].sort()[0]
            anchors[row, : len(chosen)] = chosen
        places = anchors.clamp(min=0)[..., None] + torch.arange(self.count)
        following = labels.gather(1, places.flatten(1) + 1).view_as(places)
        unbroken = ((following != IGNORED) & (anchors >= 0)[..., None]).cumprod(-1).bool()
        return {
            "input_ids": ids,
            "lengths": lengths,
            "anchors": anchors,
            "places": places,
            "before": ids.gather(1, places.flatten(1)).view_as(places),
            "labels": following.where(unbroken, IGNORED),
        }


class MuonAdamW(torch.optim.Optimizer):
    """An optimiser that joins Muon and AdamW, with one learning rate.

    Muon's steps are scaled to AdamW's (arXiv 2502.16982, section 2.2). Projections are matrices
    whose names end in `proj`, as most of transformers' layers have it. Tables, heads, norms and
    layers that mix states keep AdamW.

    Args:
        module: the module that is trained.
        lr: the peak learning rate.
        betas, eps: AdamW's own.
        weight_decay: the weight decay of projections.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        projections: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                is_projection = name.endswith("proj.weight") and weight.ndim == 2
                (projections if is_projection else others).append(weight)
        self.parts: list[torch.optim.Optimizer] = []
        if projections:
            self.parts.append(
                Muon(projections, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self.parts.append(AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step with each optimiser, on the groups and states of this object.

        Schedules and checkpoints know these groups and states.
        """
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step(closure)


class AnchorTrainer(DepthTrainer):
    """A loss that fades with depth, and how well the drafter knows the chance that it is rejected.

    Evaluation reports the chance of acceptance under rejection sampling.

    Args:
        options: the run's options.
        drafter: the drafter, attached to its target.
        inputs: the run's inputs.

    Attributes:
        states: the source of the target's states.
    """

    figure = "acceptance"

    def __init__(self, options: AnchorTraining, drafter: Any, inputs: RunInputs):
        network, args = options.network(drafter), inputs.arguments
        collator = AnchorCollator(options.num_anchors, network.count, args.seed)
        super().__init__(network, args, collator, **inputs.sets)
        self.drafter, self.loss, self.fading = drafter, options.loss, options.fading
        self.states = options.states(inputs, drafter.features, drafter.vocabulary)

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

    def guesses(self, model: Any, inputs: dict[str, Tensor]) -> tuple[dict, dict]:
        """Compute the target's states of a batch, and the model's outputs on them."""
        states = self.states(inputs["input_ids"], inputs["lengths"])
        read = {key: states[key].to(self.drafter.dtype) for key in self.drafter.features}
        return states, model(inputs, read)

    def guess_losses(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, LongTensor]:
        """Implement `DepthTrainer.guess_losses`: losses that fade with depth."""
        states, outputs = self.guesses(model, inputs)
        learned = inputs["labels"] != IGNORED
        logits, labels = outputs["logits"][learned], inputs["labels"][learned]
        if self.drafter.vocabulary is not None:
            labels = places_in(self.drafter.vocabulary.to(labels.device), labels)
        rows, _, depths = learned.nonzero(as_tuple=True)
        p = self.states.probabilities(states, rows, inputs["places"][learned])
        rejected = rejection(logits, p)
        losses = mixed(self.loss, cross_entropy(logits, labels), rejected)
        if "confidence" in outputs:
            sure = outputs["confidence"][learned].float()
            losses = losses + F.binary_cross_entropy_with_logits(
                sure, (1 - rejected).detach().clamp(0, 1), reduction="none"
            )
        return losses * self.fading ** depths.to(losses), 1 - rejected, depths


@dataclass(kw_only=True)
class AnchorTraining(TargetTraining):
    """Options of training on anchors."""

    fading: ClassVar[float]  # the weight of each further guess, of that before it

    num_anchors: int = option("Places in each text from which it goes on, at most.", 32, least=1)

    @abstractmethod
    def network(self, drafter: Any) -> Any:
        """Make the module that the trainer calls; its parameters are the drafter's.

        It has `count`, K guesses after an anchor. Its forward takes a batch and the target's
        states, and gives `logits` `(B, A, K, V')`, and perhaps `confidence` `(B, A, K)`.
        """

    def trainer(self, drafter: Any, inputs: RunInputs) -> AnchorTrainer:
        """Implement `TrainingOptions.trainer`."""
        return AnchorTrainer(self, drafter, inputs)
