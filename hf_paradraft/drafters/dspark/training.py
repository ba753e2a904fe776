"""Train DFlash's and DSpark's blocks on a frozen target: anchors in every text, all blocks in one forward (DSpark, section 4)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel, Qwen3Config

from ...decoding.features import layers_of
from ...protocol.drafter import FeatureKey
from ...training.run import RunInputs, option
from ..anchors import AnchorTrainer
from ..dflash.config import BlockConfig, spread
from ..dflash.model import DFlashDrafter
from ..layers import sizes_of
from ..target_head import final_scale
from ..target_training import TargetTraining, unused_token
from .blocks import slots
from .calibration import calibrate
from .model import DSparkDrafter

FADING = 4.0  # slots: the weight of slot k is exp(-k / 4)


class Blocks(torch.nn.Module):
    """A drafter whose forward is `slots`, as wrappers of several processes want it; its parameters are the drafter's.

    Args:
        drafter: as for `slots`.
    """

    def __init__(self, drafter: DFlashDrafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]) -> dict[str, Tensor]:
        """As `slots`."""
        return slots(self.drafter, batch, states)


def block_drafter(
    target: PreTrainedModel,
    mask_token_id: int,
    num_layers: int = 2,
    block_size: int = 7,
    num_features: int = 5,
    markov_rank: int = 64,
    markov_type: str = "vanilla",
    confidence: bool = True,
    vocabulary: LongTensor | None = None,
    fill_in: bool = False,
) -> DFlashDrafter:
    """An untrained drafter of blocks for `target`, attached to it: DSpark's, or DFlash's without rank and confidence.

    Args:
        target: a decoder-only causal LM.
        mask_token_id: of the rows to be guessed.
        num_layers: of its own, Qwen3's in the target's sizes.
        block_size: rows of a block.
        num_features: layers of the target that it reads, spread evenly.
        markov_rank, markov_type: of the head that looks at the token before; rank 0 for none.
        confidence: whether it says how sure it is.
        vocabulary: int64 `(V',)`, the ids that it guesses; default: all.
        fill_in: masks guess their own places, so that a block guesses a token less than it has rows (DFlash); else each row the
            one behind it (DSpark).

    Raises:
        ValueError: options that do not fit the target.
    """
    config, total = target.config.get_text_config(), len(layers_of(target))
    if not 1 <= num_features <= total:
        raise ValueError(f"The target has {total} layers: {num_features} of them cannot be read.")
    layers = Qwen3Config(**sizes_of(target), num_hidden_layers=num_layers)
    chosen = spread(num_features, total) if total > 4 or num_features == 1 else tuple(range(num_features))
    block = BlockConfig(
        layers=layers,
        features=tuple(dict.fromkeys(min(max(0, key), total - 1) for key in chosen)),
        block_size=block_size,
        mask_token_id=mask_token_id,
        fill_in=fill_in,
        target_hidden_size=config.hidden_size,
        target_layers=total,
        vocab_size=config.vocab_size,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        markov_rank=markov_rank,
        markov_type=markov_type,
        confidence=confidence,
        confidence_with_markov=confidence and markov_rank > 0,
        window_from_anchor=True,
    )
    kind = DSparkDrafter if markov_rank or confidence else DFlashDrafter
    drafter = kind(block, vocabulary)
    head = drafter.markov if isinstance(drafter, DSparkDrafter) else None
    with torch.no_grad():
        drafter.stack.norm.weight.copy_(final_scale(target))
        if head is not None:  # says nothing at first, and learns as fast as its blocks
            head.before.weight.normal_()
            head.after.weight.zero_()
    drafter.to(target.get_input_embeddings().weight.device).attach(target)
    return drafter


@dataclass(kw_only=True)
class BlockTraining(TargetTraining):
    """What runs of drafters of blocks share."""

    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000"

    learning_rate: float = option("Peak learning rate.", 6e-4, above=0)
    num_layers: int = option("Layers of the drafter.", 2, least=1)
    num_features: int = option("Layers of the target that are read.", 5, least=1)
    num_anchors: int = option("Blocks in each text, at most.", 32, least=1)

    @abstractmethod
    def make(self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None) -> DFlashDrafter:
        """The untrained drafter."""

    def prepare(self, inputs: RunInputs) -> tuple[DFlashDrafter, AnchorTrainer]:
        """As `TrainingOptions.prepare`."""
        mask = unused_token(inputs.tokenizer, inputs.model.config.get_text_config().vocab_size)
        drafter = self.make(inputs.model, mask, self.vocabulary(inputs))
        trainer = AnchorTrainer(
            Blocks(drafter),
            inputs.arguments,
            self.states(inputs, drafter.features, drafter.vocabulary),
            drafter.block.num_drafts,
            math.exp(-1 / FADING),
            self.num_anchors,
            train_dataset=inputs.train_set,
            eval_dataset=inputs.eval_set,
        )
        return drafter, trainer

    def record(self) -> dict[str, Any]:
        """As `TrainingOptions.record`."""
        names = {"num_layers", "block_size", "num_anchors", "markov_rank"}
        return {**super().record(), **{name: value for name, value in vars(self).items() if name in names}}


@dataclass(kw_only=True)
class DFlashTraining(BlockTraining):
    """Train a drafter of blocks on a target's hidden states, as DFlash's publishers have it: masks are filled in."""

    kind: ClassVar[str] = "dflash"

    block_size: int = option("Rows of a block, which guesses one token less.", 8, least=2)

    def make(self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None) -> DFlashDrafter:
        """As `BlockTraining.make`."""
        sizes = (self.num_layers, self.block_size, self.num_features)
        return block_drafter(target, mask_token_id, *sizes, 0, confidence=False, vocabulary=vocabulary, fill_in=True)


@dataclass(kw_only=True)
class DSparkTraining(BlockTraining):
    """Train a drafter of blocks on a target's hidden states, with heads on the token before and on how sure it is."""

    kind: ClassVar[str] = "dspark"

    block_size: int = option("Tokens that a block guesses.", 7, least=2)
    markov_rank: int = option("Of the head that looks at the token before; 0: none.", 64, least=0)
    markov_type: Literal["vanilla", "gated", "rnn"] = option("Type of that head.", "vanilla")
    confidence: bool = option("Learn how sure each guess is.", True)

    def check(self) -> None:
        """As `TrainingOptions.check`."""
        super().check()
        if not self.markov_rank and not self.confidence:
            raise ValueError("A DSpark drafter without both of its heads is a DFlash one: train dflash.")

    def make(self, target: PreTrainedModel, mask_token_id: int, vocabulary: LongTensor | None) -> DFlashDrafter:
        """As `BlockTraining.make`."""
        sizes = (self.num_layers, self.block_size, self.num_features, self.markov_rank, self.markov_type, self.confidence)
        return block_drafter(target, mask_token_id, *sizes, vocabulary)

    def measure(self, drafter: DFlashDrafter, inputs: RunInputs) -> dict[str, Any]:
        """Temperatures of the confidences, and the acceptance with them."""
        heat: dict[str, Any] = {}
        if isinstance(drafter, DSparkDrafter) and drafter.confidence is not None:
            heat["temperatures"] = calibrate(drafter, inputs.model, inputs.eval_set, self.num_anchors)
            drafter.remember({**drafter.paradraft.get("training", {}), **heat})
        return {**heat, **super().measure(drafter, inputs)}
