"""Train an EAGLE-3 drafter on a frozen target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...training.run import RunInputs, option
from ...training.unrolled import Unrolled, UnrolledTraining
from .model import Eagle3Drafter


@dataclass(kw_only=True)
class Eagle3Training(UnrolledTraining):
    """Train one decoder layer on three of a target's layers, to guess token after token."""

    kind: ClassVar[str] = "eagle3"
    drafter: ClassVar[type[Eagle3Drafter]] = Eagle3Drafter
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000"
    fading: ClassVar[float] = 0.8

    learning_rate: float = option("Peak learning rate.", 2e-3, above=0)
    num_layers: int = option("Layers of a new drafter.", 1, least=1)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if self.begin_with and self.num_layers != 1:
            raise ValueError(
                "begin_with is a drafter with layers of its own: leave out num_layers."
            )

    @classmethod
    def check_drafter(cls, drafter: Eagle3Drafter) -> None:
        """Implement `TrainingOptions.check_drafter`: refuse a drafter that guesses in parallel.

        Such a drafter learns in another way.
        """
        if drafter.config.parallel:
            raise ValueError("A P-EAGLE drafter guesses in parallel, which is not taught here.")

    def start(self, inputs: RunInputs) -> Eagle3Drafter:
        """Implement `UnrolledTraining.start`."""
        return Eagle3Drafter.from_target(
            inputs.model, self.num_draft_tokens, self.num_layers, self.vocabulary(inputs)
        )

    def network(self, drafter: Eagle3Drafter) -> Unrolled:
        """Implement `AnchorTraining.network`."""
        return Unrolled(drafter, drafter, self.num_draft_tokens)
