"""Blocks for training: anchors in every text, and what all blocks guess in one forward (DSpark, section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import BoolTensor, LongTensor, Tensor
from transformers import DynamicCache

from ...decoding.tree_attention import additive
from ...protocol.drafter import FeatureKey
from ...training.data import IGNORED
from ..dflash.model import DFlashDrafter
from ..stack import run
from .model import DSparkDrafter


class AnchorCollator:
    """Encoded samples to a padded batch of texts with anchors; the same sample in the same epoch always has the same ones.

    Args:
        num_anchors: of a text, at most.
        block_size: B, guesses behind an anchor.
        seed: of the choice.
    """

    def __init__(self, num_anchors: int, block_size: int, seed: int = 0):
        self.num_anchors, self.block_size, self.seed, self.epoch = num_anchors, block_size, seed, 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Texts padded on the right to the longest, and behind that by a block, so that every slot has a place.

        Returns:
            `input_ids` and `labels` int64 `(B, N)`, padded with 0 and -100, `lengths` int64 `(B,)`, and `anchors` int64 `(B, A)`,
            padded with -1.
        """
        width = max(len(sample["input_ids"]) for sample in samples) + self.block_size
        ids = torch.zeros((len(samples), width), dtype=torch.long)
        labels = torch.full((len(samples), width), IGNORED)
        anchors = torch.full((len(samples), self.num_anchors), -1)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            ids[row, :length], labels[row, :length] = torch.tensor(sample["input_ids"]), torch.tensor(sample["labels"])
            possible = (labels[row, 1:] != IGNORED).nonzero()[:, 0]
            possible = possible[possible > 0]  # a context of one token at least
            generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, *sample["input_ids"])) % 2**63)
            chosen = possible[torch.randperm(len(possible), generator=generator)[: self.num_anchors]].sort()[0]
            anchors[row, : len(chosen)] = chosen
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        return {"input_ids": ids, "labels": labels, "lengths": lengths, "anchors": anchors}


def block_mask(anchors: LongTensor, length: int, block_size: int) -> BoolTensor:
    """What the rows of all blocks see: the context before their own anchor, and their own block.

    Args:
        anchors: int64 `(B, A)`, -1 for none; rows of such a block see themselves.
        length: N, of the context.
        block_size: B.

    Returns:
        bool `(B, 1, A · block, N + A · block)`.
    """
    batch, count = anchors.shape
    before = torch.arange(length, device=anchors.device) < anchors[..., None]  # (B, A, N)
    own = torch.eye(count, dtype=torch.bool, device=anchors.device)
    blocks = own.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1).expand(batch, -1, -1)
    return torch.cat([before.repeat_interleave(block_size, 1), blocks], dim=-1)[:, None]


def slots(drafter: DFlashDrafter, batch: dict[str, Tensor], states: dict[FeatureKey, Tensor]) -> dict[str, Tensor]:
    """What all blocks of a batch guess where every token before is known.

    Args:
        drafter: attached to its target, its blocks anchor-first.
        batch: from `AnchorCollator`.
        states: the target's hidden states `(B, N, d_t)`.

    Returns:
        `logits` `(B, A, K, V')`, `confidence` `(B, A, K)` where it has that head, `labels` int64 `(B, A, K)` in the target's ids,
        -100 from the first token on that is not to be learned, and `places` int64 `(B, A, K)`, of the tokens before.
    """
    ids, anchors, size = batch["input_ids"], batch["anchors"], drafter.block.block_size
    rows, width = ids.shape
    context, cache = drafter.fuse(states), DynamicCache()
    drafter.inject(context, torch.arange(width, device=ids.device).expand(rows, -1), cache)
    places = anchors.clamp(min=0)[..., None] + torch.arange(size, device=ids.device)
    fed = torch.full_like(places, drafter.block.mask_token_id)
    fed[..., 0] = ids.gather(1, anchors.clamp(min=0))
    seen = block_mask(anchors, width, size)
    hidden = run(drafter.stack, drafter.embed(fed.flatten(1)), additive(seen, drafter.dtype), places.flatten(1), cache)
    hidden = hidden.unflatten(1, (-1, size))
    before = ids.gather(1, places.flatten(1)).view_as(places)
    following = batch["labels"].gather(1, (places + 1).clamp(max=width - 1).flatten(1)).view_as(places)
    unbroken = ((following != IGNORED) & (anchors >= 0)[..., None]).cumprod(-1).bool()
    found = {"logits": drafter.base_logits(hidden), "labels": following.where(unbroken, IGNORED), "places": places}
    if isinstance(drafter, DSparkDrafter):
        if drafter.markov is not None:
            found["logits"] = found["logits"] + drafter.markov.along(before, hidden).to(found["logits"])
        if drafter.confidence is not None:
            found["confidence"] = drafter.confidence_logits(hidden, before)
    return found
