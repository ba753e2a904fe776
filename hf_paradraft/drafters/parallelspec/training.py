"""Train a ParallelSpec drafter: group-wise rows, as PARD's, on the target's own embedding and head
(section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...training.losses import LOSSES, Loss, cross_entropy, mixed, rejection
from ...training.rows import IGNORED, CodConfig, RowCollator
from ...training.run import RunInputs, option
from ...training.target_training import TargetTraining
from ...training.trainer import RowTrainer
from .config import Style
from .model import ParallelSpecDrafter


class ParallelSpecTrainer(RowTrainer):
    """A trainer with the paper's losses, or with total variation.

    The paper's losses are cross-entropy through the target's head and, EAGLE-style, SmoothL1 on its
    states.

    Args:
        options: the run's options.
        drafter: the drafter, attached to its target.
        inputs: the run's inputs.
    """

    def __init__(
        self, options: ParallelSpecTraining, drafter: ParallelSpecDrafter, inputs: RunInputs
    ):
        args, num_depths = inputs.arguments, drafter.config.num_masks + 1
        cod = CodConfig(num_depths, options.cod_ratio, options.cod_min_ratio)
        collator = RowCollator(0, cod, args.seed, True, drafter.vocabulary)
        super().__init__(drafter, args, collator, **inputs.sets)
        self.states = options.states(inputs, ("normed",), drafter.vocabulary)
        self.decay, self.loss = options.decay, options.loss

    def row_losses(
        self, model: Any, inputs: dict[str, Any], labels: Tensor, depths: Tensor, columns: Tensor
    ) -> Tensor:
        """Implement `RowTrainer.row_losses`."""
        drafter: ParallelSpecDrafter = self.model
        features = None
        if drafter.reads_features or self.loss == "tv":
            text = inputs["depths"] == 0  # whose rows come first
            states = self.states(inputs["input_ids"][:, text.any(0)], text.sum(1))
        if drafter.reads_features:
            # With each token of a text the state at the token before; nothing with the first, and
            # masks.
            masks = inputs["input_ids"].shape[1] - states["normed"].shape[1]
            features = F.pad(states["normed"][:, :-1].to(drafter.dtype), (0, 0, 1, masks))
        logits, guessed = model(**inputs, columns=columns, features=features)
        losses = cross_entropy(logits, labels)
        learned = (labels != IGNORED).nonzero(as_tuple=True)
        rows, places = learned[0], inputs["position_ids"][:, columns][learned]
        if self.loss == "tv":
            target = self.states.probabilities(states, rows, places)
            mix = mixed("tv", losses[learned], rejection(logits[learned], target))
            losses = losses.index_put(learned, mix)
        if drafter.reads_features:
            wanted = states["normed"][rows, places].float()
            near = F.smooth_l1_loss(guessed[learned].float(), wanted, reduction="none").mean(-1)
            losses = losses.index_put(learned, near, accumulate=True)
        return losses * self.decay ** depths.clamp(min=0)


@dataclass(kw_only=True)
class ParallelSpecTraining(TargetTraining):
    """Train one decoder layer to guess several tokens in one forward.

    It stands on a target's own embedding and head.
    """

    kind: ClassVar[str] = "parallelspec"
    example: ClassVar[str] = (
        "--target DIR --train-file answers.jsonl --output-dir OUT --style eagle"
    )
    recorded: ClassVar[tuple[str, ...]] = ("style", "num_masks", "cod_ratio", "decay")

    lr_scheduler_type: str = option("Schedule: cosine, linear, constant, …", "linear")
    style: Style = option("medusa: reads tokens alone; eagle: the target's states too.", "medusa")
    num_masks: int = option("M: a forward guesses M + 1 tokens.", 4, least=1)
    num_layers: int = option("Layers of the drafter.", 1, least=1)
    cod_ratio: float = option(
        "r of conditional output dropping; 1 keeps every row.", 1.0, above=0, most=1
    )
    cod_min_ratio: float = option(
        "r_min, the least share of rows of a depth.", 0.2, above=0, most=1
    )
    decay: float = option(
        "λ: each further guess weighs λ times the one before.", 1.0, above=0, most=1
    )
    loss: Loss = option(LOSSES, "ce")

    @property
    def defaults(self) -> dict[str, Any]:
        """The paper's."""
        return {**super().defaults, "adam_beta2": 0.95 if self.style == "eagle" else 0.999}

    def untrained(self, inputs: RunInputs) -> ParallelSpecDrafter:
        """Implement `TrainingOptions.untrained`."""
        vocabulary = self.vocabulary(inputs)
        return ParallelSpecDrafter.from_target(
            inputs.model, self.style, self.num_masks, self.num_layers, vocabulary
        ).float()

    def trainer(self, drafter: ParallelSpecDrafter, inputs: RunInputs) -> ParallelSpecTrainer:
        """Implement `TrainingOptions.trainer`."""
        return ParallelSpecTrainer(self, drafter, inputs)
