"""Train DFlash's and DSpark's blocks on a frozen target: anchors in every text, all blocks in one
forward (DSpark, section 4).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ...protocol.drafter import FeatureKey
from ...training.anchors import AnchorTraining
from ...training.run import RunInputs, option
from ...training.target_training import unused_token
from .dspark import DSparkDrafter
from .model import DFlashDrafter
from .slots import slots


class Blocks(torch.nn.Module):
    """A drafter whose forward is `slots`, as wrappers of several processes want it.

    Its parameters are the drafter's.

    Args:
        drafter: as for `slots`.
    """

    def __init__(self, drafter: DFlashDrafter):
        super().__init__()
        self.drafter, self.count = drafter, drafter.config.num_drafts

    def forward(
        self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]
    ) -> dict[str, Tensor]:
        """Run `slots` on a batch."""
        return slots(self.drafter, batch, states)


@dataclass(kw_only=True)
class BlockTraining(AnchorTraining):
    """Options shared by the training of block drafters."""

    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000"
    fading: ClassVar[float] = math.exp(-1 / 4)  # slots: the weight of slot k is exp(-k / 4)
    recorded: ClassVar[tuple[str, ...]] = ("num_layers", "block_size", "num_anchors")

    learning_rate: float = option("Peak learning rate.", 6e-4, above=0)
    num_layers: int = option("Layers of the drafter.", 2, least=1)
    num_features: int = option("Layers of the target that are read.", 5, least=1)
    num_anchors: int = option("Blocks in each text, at most.", 32, least=1)

    @classmethod
    def check_drafter(cls, drafter: DFlashDrafter) -> None:
        """Implement `TrainingOptions.check_drafter`: refuse causal layers and windows.

        Blocks see all of the context, and all of themselves.
        """
        if drafter.config.causal or any(window is not None for window in drafter.windows.values()):
            raise ValueError(
                f"This {drafter.title} has causal layers or windows, which are not taught here."
            )

    @abstractmethod
    def make(
        self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None
    ) -> DFlashDrafter:
        """Make an untrained drafter for `target`."""

    def untrained(self, inputs: RunInputs) -> DFlashDrafter:
        """Implement `TrainingOptions.untrained`."""
        mask = unused_token(inputs.tokenizer, inputs.model.config.get_text_config().vocab_size)
        return self.make(inputs.model, mask, self.vocabulary(inputs))

    def network(self, drafter: DFlashDrafter) -> Blocks:
        """Implement `AnchorTraining.network`."""
        return Blocks(drafter)


@dataclass(kw_only=True)
class DFlashTraining(BlockTraining):
    """Train a drafter of blocks that fill in masks, on a target's hidden states.

    This is the form that DFlash's publishers use.
    """

    kind: ClassVar[str] = "dflash"

    block_size: int = option("Rows of a block, which guesses one token less.", 8, least=2)

    def make(
        self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None
    ) -> DFlashDrafter:
        """Implement `BlockTraining.make`."""
        sizes = (self.num_layers, self.block_size, self.num_features)
        return DFlashDrafter.from_target(target, mask_token_id, *sizes, vocabulary)


@dataclass(kw_only=True)
class DSparkTraining(BlockTraining):
    """Train a drafter of blocks with two heads, on a target's hidden states.

    One head looks at the token before, the other tells how sure a guess is.
    """

    kind: ClassVar[str] = "dspark"
    recorded: ClassVar[tuple[str, ...]] = ("markov_rank",)

    block_size: int = option("Tokens that a block guesses.", 7, least=2)
    markov_rank: int = option("Of the head that looks at the token before; 0: none.", 64, least=0)
    markov_type: Literal["vanilla", "gated", "rnn"] = option("Type of that head.", "vanilla")
    confidence: bool = option("Learn how sure each guess is.", True)

    def check(self) -> None:
        """Implement `TrainingOptions.check`."""
        super().check()
        if not self.markov_rank and not self.confidence:
            raise ValueError(
                "A DSpark drafter without both of its heads is a DFlash one: train dflash."
            )

    def make(
        self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None
    ) -> DFlashDrafter:
        """Implement `BlockTraining.make`."""
        sizes = (self.num_layers, self.block_size, self.num_features)
        heads = (self.markov_rank, self.markov_type, self.confidence)
        return DSparkDrafter.from_target(target, mask_token_id, *sizes, vocabulary, *heads)
