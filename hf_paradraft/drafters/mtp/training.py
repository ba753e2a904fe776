"""Train an MTP layer on a frozen target: one that it brings, or a new one; fed with its own states (FastMTP, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...training.run import RunInputs, option
from ...training.unrolled import UnrolledTraining
from .model import MtpDrafter, MtpStep


@dataclass(kw_only=True)
class MtpTraining(UnrolledTraining):
    """Train the MTP layer that a target brings, or a new one of its kind, which guesses one token after the other."""

    kind: ClassVar[str] = "mtp"
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT"
    fading: ClassVar[float] = 0.6  # 0.51, 0.31 and 0.18 of three steps

    learning_rate: float = option("Peak learning rate; a new layer wants 2e-3.", 5e-4, above=0)
    num_draft_tokens: int = option("K: tokens drafted one after the other, in training too.", 3, least=1)
    new: bool = option("A new layer, even where the target brings one.", False)
    begin_with: str | None = option("A trained layer to go on from: folder or Hub id; it keeps its --vocab.", None)

    @property
    def sources(self) -> tuple[str | Path | None, ...]:
        """Implement `TrainingOptions.sources`."""
        return (*super().sources, self.begin_with)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if self.begin_with and (self.new or self.vocab):
            raise ValueError("begin_with is a layer with a vocabulary of its own: leave out new and vocab.")

    def start(self, inputs: RunInputs) -> MtpDrafter:
        """Implement `UnrolledTraining.start`.

        Raises:
            ValueError: the one to go on from is for another target.
        """
        if self.begin_with:
            drafter = MtpDrafter.from_pretrained(self.begin_with).float().to(inputs.model.device)
            drafter.attach(inputs.model)
        else:
            drafter = MtpDrafter.from_target(inputs.model, self.new or None, self.vocabulary(inputs)).float()
        return drafter

    @classmethod
    def check_drafter(cls, drafter: MtpDrafter) -> None:
        """Implement `TrainingOptions.check_drafter`: one layer is trained."""
        if len(drafter.layers) > 1:
            raise ValueError(f"The target brings {len(drafter.layers)} MTP layers: one is trained. Pass --new for a new one.")

    def model(self, drafter: MtpDrafter) -> MtpStep:
        """Implement `UnrolledTraining.model`."""
        return MtpStep(drafter, drafter.layers[0])
