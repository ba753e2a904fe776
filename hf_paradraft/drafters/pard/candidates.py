"""PARD for transformers' own assisted loop, as a `CandidateGenerator`."""

from __future__ import annotations

import torch
from torch import FloatTensor, LongTensor
from transformers import LogitsProcessorList

from ...decoding.cache import empty_cache
from ...names import CandidateGenerator
from .model import PardDrafter


class PardCandidateGenerator(CandidateGenerator):
    """Chain drafts for people who build on `GenerationMixin` themselves.

    Args:
        drafter: a PARD drafter.
        logits_processor: the target's; drafts go through it before they are chosen.
        do_sample: draw the drafts, for rejection sampling, or take the most probable tokens.
        max_length: candidates never reach it, so that the target's own token still fits; default: no limit.
    """

    def __init__(
        self,
        drafter: PardDrafter,
        logits_processor: LogitsProcessorList | None = None,
        do_sample: bool = False,
        max_length: int | None = None,
    ):
        self.drafter, self.do_sample, self.max_length = drafter, do_sample, max_length
        self.logits_processor = logits_processor or LogitsProcessorList()
        self.num_draft_tokens = drafter.speculation_config.num_draft_tokens
        self.cache = empty_cache(drafter)

    def get_candidates(self, input_ids: LongTensor, **kwargs) -> tuple[LongTensor, FloatTensor | None]:
        """Draft K tokens behind the prefix; return its ids with them, and their processed logits.

        Args:
            input_ids: int64 `(1, n)`; each call must continue the last one's prefix.

        Returns:
            Ids int64 `(1, n + K)` and logits float32 `(1, K, V)`; the prefix alone and None where nothing fits.
        """
        ids = input_ids.to(self.drafter.device)
        room = self.num_draft_tokens
        if self.max_length is not None:
            room = min(room, self.max_length - ids.shape[1] - 1)
        if room < 1:
            return input_ids, None
        tokens, scores = self.drafter.draft_chain(ids, self.cache, room, self.logits_processor, self.do_sample)
        return torch.cat([ids, tokens[None]], dim=1), scores[None]

    def update_candidate_strategy(self, input_ids: LongTensor, scores: FloatTensor, num_matches: int) -> None:
        """Leave K as it is configured, whatever was accepted."""
