"""Train an MTP layer on a frozen target: one that it brings, or a new one; fed with its own states
(FastMTP, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...training.run import RunInputs, option
from ...training.unrolled import Unrolled, UnrolledTraining
from .model import MtpDrafter, MtpStep


@dataclass(kw_only=True)
class MtpTraining(UnrolledTraining):
    """Train a target's own MTP layer, or a new one of its kind, to guess token after token."""

    kind: ClassVar[str] = "mtp"
    drafter: ClassVar[type[MtpDrafter]] = MtpDrafter
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT"
    fading: ClassVar[float] = 0.6  # 0.51, 0.31 and 0.18 of three steps

    learning_rate: float = option("Peak learning rate; a new layer wants 2e-3.", 5e-4, above=0)
    num_draft_tokens: int = option(
        "K: tokens drafted one after the other, in training too.", 3, least=1
    )
    new: bool = option("A new layer, even where the target brings one.", False)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if self.begin_with and self.new:
            raise ValueError("begin_with goes on from a trained layer: leave out new.")

    def start(self, inputs: RunInputs) -> MtpDrafter:
        """Implement `UnrolledTraining.start`."""
        return MtpDrafter.from_target(
            inputs.model, self.new or None, self.vocabulary(inputs)
        ).float()

    @classmethod
    def check_drafter(cls, drafter: MtpDrafter) -> None:
        """Implement `TrainingOptions.check_drafter`: one layer is trained."""
        if len(drafter.layers) > 1:
            raise ValueError(
                f"The target brings {len(drafter.layers)} MTP layers: one is trained. Pass --new "
                "for a new one."
            )

    def network(self, drafter: MtpDrafter) -> Unrolled:
        """Implement `AnchorTraining.network`."""
        return Unrolled(drafter, MtpStep(drafter, drafter.layers[0]), self.num_draft_tokens)
