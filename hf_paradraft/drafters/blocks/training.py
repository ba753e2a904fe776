"""Train DFlash's and DSpark's blocks on a frozen target: anchors in every text, all blocks in one
forward (DSpark, section 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import BoolTensor, LongTensor, Tensor
from transformers import DynamicCache

from ...decoding.tree_attention import additive
from ...protocol.drafter import FeatureKey
from ...training.anchors import AnchorTraining
from ...training.run import RunInputs, option
from ...training.target_training import unused_token
from .dspark import DSparkDrafter
from .model import DFlashDrafter


def block_mask(anchors: LongTensor, length: int, block_size: int) -> BoolTensor:
    """Compute the mask of blocks: a row sees the context before its anchor, and its own block.

    Args:
        anchors: int64 `(B, A)`, -1 for none; rows of such a block see themselves.
        length: N, of the context.
        block_size: B.

    Returns:
        bool `(B, 1, A · block, N + A · block)`.
    """
    batch, count = anchors.shape
    block_of = torch.arange(count, device=anchors.device).repeat_interleave(block_size)
    context = torch.arange(length, device=anchors.device) < anchors[:, block_of, None]
    own_block = (block_of[:, None] == block_of).expand(batch, -1, -1)
    return torch.cat([context, own_block], dim=-1)[:, None]


class Blocks(torch.nn.Module):
    """A drafter's guesses in all blocks of all texts, by one forward (DSpark, section 4).

    Its parameters are the drafter's.

    Args:
        drafter: attached to its target.
    """

    def __init__(self, drafter: DFlashDrafter):
        super().__init__()
        self.drafter, self.count = drafter, drafter.config.num_drafts

    def forward(
        self, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]
    ) -> dict[str, Tensor]:
        """Compute the guesses of all blocks of a batch, each after known tokens.

        Args:
            batch: from `AnchorCollator`.
            states: the target's hidden states `(B, N, d_t)`.

        Returns:
            `logits` `(B, A, K, V')` and, if the drafter has that head, `confidence` `(B, A, K)`.
        """
        drafter = self.drafter
        ids, anchors, before = batch["input_ids"], batch["anchors"], batch["before"]
        (rows, width), size = ids.shape, drafter.config.block_size
        context, cache = drafter.fuse(states), DynamicCache()
        drafter.inject(context, torch.arange(width, device=ids.device).expand(rows, -1), cache)
        positions = anchors.clamp(min=0)[..., None] + torch.arange(size, device=ids.device)
        fed = torch.full_like(positions, drafter.config.mask_token_id)
        fed[..., 0] = ids.gather(1, anchors.clamp(min=0))
        seen = block_mask(anchors, width, size)
        mask = additive(seen, drafter.dtype)
        whole = drafter.forward_block(fed.flatten(1), mask, positions.flatten(1), cache)
        whole = whole.unflatten(1, (-1, size))
        hidden = drafter.guesses(whole)
        guesses = {"logits": drafter.base_logits(hidden)}
        if isinstance(drafter, DSparkDrafter):
            if drafter.markov is not None:
                memory = drafter.first_memory(fed[..., 0], whole)
                biases = drafter.markov.biases_of_known(before, hidden, memory)
                guesses["logits"] = guesses["logits"] + biases.to(guesses["logits"])
            if drafter.confidence is not None:
                guesses["confidence"] = drafter.confidence_logits(hidden, before)
        return guesses


@dataclass(kw_only=True)
class DFlashTraining(AnchorTraining):
    """Train a drafter of blocks that fill in masks, on a target's hidden states.

    This is the form that DFlash's publishers use.
    """

    kind: ClassVar[str] = "dflash"
    drafter: ClassVar[type[DFlashDrafter]] = DFlashDrafter
    heads: ClassVar[tuple[str, ...]] = ()  # options of `from_target` that only this kind has
    example: ClassVar[str] = "--target DIR --train-file answers.jsonl --output-dir OUT --vocab 8000"
    fading: ClassVar[float] = math.exp(-1 / 4)  # slots: the weight of slot k is exp(-k / 4)
    recorded: ClassVar[tuple[str, ...]] = ("num_layers", "block_size", "num_anchors")

    learning_rate: float = option("Peak learning rate.", 6e-4, above=0)
    num_layers: int = option("Layers of the drafter.", 2, least=1)
    num_features: int = option("Layers of the target that are read.", 5, least=1)
    num_anchors: int = option("Blocks in each text, at most.", 32, least=1)
    block_size: int = option("Rows of a block, which guesses one token less.", 8, least=2)

    @classmethod
    def check_drafter(cls, drafter: DFlashDrafter) -> None:
        """Implement `TrainingOptions.check_drafter`: refuse causal layers and windows.

        Blocks see all of the context, and all of themselves.
        """
        if drafter.config.causal or any(window is not None for window in drafter.windows.values()):
            raise ValueError(
                f"This {drafter.title} has causal layers or windows, which are not taught here."
            )

    def untrained(self, inputs: RunInputs) -> DFlashDrafter:
        """Implement `TrainingOptions.untrained`."""
        target = inputs.model
        mask = unused_token(inputs.tokenizer, target.config.get_text_config().vocab_size)
        sizes = (self.num_layers, self.block_size, self.num_features)
        heads = {name: getattr(self, name) for name in self.heads}
        return self.drafter.from_target(target, mask, *sizes, self.vocabulary(inputs), **heads)

    def network(self, drafter: DFlashDrafter) -> Blocks:
        """Implement `AnchorTraining.network`."""
        return Blocks(drafter)


@dataclass(kw_only=True)
class DSparkTraining(DFlashTraining):
    """Train a drafter of blocks with two heads, on a target's hidden states.

    One head looks at the token before, the other tells how sure a guess is.
    """

    kind: ClassVar[str] = "dspark"
    drafter: ClassVar[type[DFlashDrafter]] = DSparkDrafter
    heads: ClassVar[tuple[str, ...]] = ("markov_rank", "markov_type", "confidence")
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
