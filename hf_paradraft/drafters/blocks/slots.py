"""Blocks for training: what all blocks of all texts guess in one forward (DSpark, section 4)."""

from __future__ import annotations

import torch
from torch import BoolTensor, LongTensor, Tensor
from transformers import DynamicCache

from ...decoding.tree_attention import additive
from ...protocol.drafter import FeatureKey
from ..layers import run
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
    before = torch.arange(length, device=anchors.device) < anchors[..., None]  # (B, A, N)
    itself = torch.eye(count, dtype=torch.bool, device=anchors.device)
    blocks = (
        itself.repeat_interleave(block_size, 0)
        .repeat_interleave(block_size, 1)
        .expand(batch, -1, -1)
    )
    return torch.cat([before.repeat_interleave(block_size, 1), blocks], dim=-1)[:, None]


def slots(
    drafter: DFlashDrafter, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]
) -> dict[str, Tensor]:
    """Compute the guesses of all blocks of a batch, each after known tokens.

    Args:
        drafter: attached to its target.
        batch: from `AnchorCollator`.
        states: the target's hidden states `(B, N, d_t)`.

    Returns:
        `logits` `(B, A, K, V')` and, where it has that head, `confidence` `(B, A, K)`.
    """
    ids, anchors, size = batch["input_ids"], batch["anchors"], drafter.config.block_size
    rows, width = ids.shape
    context, cache = drafter.fuse(states), DynamicCache()
    drafter.inject(context, torch.arange(width, device=ids.device).expand(rows, -1), cache)
    before = batch["before"]
    positions = anchors.clamp(min=0)[..., None] + torch.arange(size, device=ids.device)
    fed = torch.full_like(positions, drafter.config.mask_token_id)
    fed[..., 0] = ids.gather(1, anchors.clamp(min=0))
    seen = block_mask(anchors, width, size)
    hidden = run(
        drafter.stack,
        drafter.embed(fed.flatten(1)),
        additive(seen, drafter.dtype),
        positions.flatten(1),
        cache,
    )
    hidden = drafter.guesses(hidden.unflatten(1, (-1, size)))
    guesses = {"logits": drafter.base_logits(hidden)}
    if isinstance(drafter, DSparkDrafter):
        if drafter.markov is not None:
            guesses["logits"] = guesses["logits"] + drafter.markov.biases_of_known(
                before, hidden
            ).to(guesses["logits"])
        if drafter.confidence is not None:
            guesses["confidence"] = drafter.confidence_logits(hidden, before)
    return guesses
