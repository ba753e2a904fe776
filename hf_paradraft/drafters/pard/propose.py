"""One forward, K guesses: the new tokens, then K - 1 masks (PARD, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import LongTensor, Tensor
from transformers import (
    Cache,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...decoding import Draft, Prefix
from ...trees import best_first_tree

if TYPE_CHECKING:
    from .model import PardDrafter


STATELESS = (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def draft_logits(drafter: PardDrafter, ids: LongTensor, cache: Cache, num_draft_tokens: int) -> Tensor:
    """Logits for the next K tokens; afterwards the cache holds exactly `ids`.

    Args:
        drafter: run once.
        ids: int64 `(1, n)` on the drafter's device, the whole prefix.
        cache: holds fewer than `n` leading tokens of it, and no masks.
        num_draft_tokens: K, at least 1.

    Returns:
        `(K, V)` in the drafter's dtype; row `d` guesses the token at distance `d + 1`.
    """
    vocab_size = drafter.get_input_embeddings().num_embeddings
    known = cache.get_seq_length()
    masks = ids.new_full((1, num_draft_tokens - 1), drafter.mask_token_id)
    fed = torch.cat([ids[:, known:].where(ids[:, known:] < vocab_size, drafter.mask_token_id), masks], dim=1)
    positions = torch.arange(known, known + fed.shape[1], device=ids.device)[None]
    outputs = drafter(
        input_ids=fed, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=num_draft_tokens
    )
    cache.crop(-masks.shape[1])
    return outputs.logits[0]


def sequential_choice(
    logits: Tensor, ids: LongTensor, logits_processor: LogitsProcessorList, do_sample: bool
) -> tuple[LongTensor, Tensor]:
    """Choose one token per row, each row warped as if the earlier choices were the text.

    Only warpers without a memory are used: drafts may come from any distribution, but a processor that remembers its calls must
    see those of plain decoding alone.

    Args:
        logits: `(K, V)`.
        ids: int64 `(1, n)`, the prefix.
        logits_processor: the target's.
        do_sample: draw from the processed distribution, or take its maximum.

    Returns:
        Tokens int64 `(K,)` and the warped scores, float32 `(K, V)`.
    """
    rows = []
    length = ids.shape[1]
    warpers = [processor for processor in logits_processor if isinstance(processor, STATELESS)]
    for row in logits.float().split(1):
        for warper in warpers:
            row = warper(ids, row)
        token = torch.multinomial(row.softmax(-1), 1) if do_sample else row.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        rows.append(row)
    return ids[0, length:], torch.cat(rows)


class PardDrafting:
    """One call's drafting: a cache over the prefix, refilled when the drafter's context runs out.

    Args:
        drafter: shared with other calls; nothing of it changes.
    """

    def __init__(self, drafter: PardDrafter):
        self.drafter = drafter
        self.context = getattr(drafter.config.get_text_config(), "max_position_embeddings", None)
        self.begin = 0  # the prefix's first token that the cache knows
        self.cache = drafter.new_cache()

    def propose(self, prefix: Prefix) -> Draft:
        """A chain of at most `prefix.room` tokens, or a tree as deep; nothing where the drafter's context is too short."""
        ids = prefix.ids.to(self.drafter.device)
        room, length = prefix.room, ids.shape[1]
        if self.context is not None:
            room = min(room, self.context // 2)
            if length - self.begin + room > self.context:  # keep the newer half, and go on from there
                self.begin = length - self.context // 2
                self.cache = self.drafter.new_cache()
        if room < 1:
            return Draft.chain(prefix.ids[0, :0])
        logits = draft_logits(self.drafter, ids[:, self.begin :], self.cache, room)
        width = min(logits.shape[-1], prefix.vocab_size)
        logits = logits[:, :width]
        tree_size = self.drafter.speculation_config.tree_size
        if prefix.branches and tree_size is not None and not prefix.sampled:
            return best_first_tree(logits.to(prefix.ids.device), tree_size)
        if not prefix.sampled:
            return Draft.chain(logits.argmax(-1).to(prefix.ids.device))
        logits = torch.nn.functional.pad(logits.float(), (0, prefix.vocab_size - width), value=-torch.inf)
        tokens, scores = sequential_choice(logits.to(prefix.ids.device), prefix.ids, prefix.logits_processor, True)
        return Draft.chain(tokens, scores.softmax(-1))

    def observe(self, outputs: Any, path: list[int]) -> None:
        """Nothing: the accepted tokens come back with the next prefix."""
