"""A PARD drafter as transformers' own assisted loop asks it: for a chain of one vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import Cache, LogitsProcessorList

from ...decoding.cache import empty_cache, is_recurrent
from ...decoding.sampling import sequential_choice
from ...names import OUTPUT_CACHE, GenerateDecoderOnlyOutput, cache_in
from ..causal import check_drafts, read_with_masks


class StockAssistant:
    """A mixin that lets a causal LM with a mask token draft in parallel for transformers' own assisted loop.

    Attributes:
        mask_token_id: id of the mask token.
    """

    mask_token_id: int

    def draft_chain(
        self: Any, ids: LongTensor, cache: Cache, count: int, processors: LogitsProcessorList, do_sample: bool
    ) -> tuple[LongTensor, Tensor]:
        """Draft `count` tokens behind a prefix, for loops that know only chains and one vocabulary.

        Args:
            ids, cache: as for `read_with_masks`.
            count: K, at least 1.
            processors, do_sample: as for `sequential_choice`.

        Returns:
            Tokens int64 `(K,)` and their processed logits float32 `(K, V)`; one behind a recurrent drafter's very first token.
        """
        logits = read_with_masks(self, ids, cache, [self.mask_token_id] * (count - 1), self.mask_token_id)
        return sequential_choice(logits, ids, processors, do_sample)

    @torch.no_grad()
    def generate(self: Any, inputs: LongTensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Decode as usual, or make one parallel draft if transformers' own assisted loop calls (`is_assistant`)."""
        config = kwargs.get("generation_config")
        if config is None or not config.is_assistant:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        check_drafts(self)
        ids = kwargs["input_ids"] if inputs is None else inputs
        past = cache_in(kwargs)
        past = empty_cache(self) if past is None or is_recurrent(past) else past
        count = max(1, kwargs["max_new_tokens"])
        tokens, scores = self.draft_chain(ids, past, count, kwargs["logits_processor"], config.do_sample)
        past = None if is_recurrent(past) else past  # that loop would crop it, and a state cannot be cropped
        return GenerateDecoderOnlyOutput(
            sequences=torch.cat([ids, tokens[None]], dim=1), scores=tuple(scores.split(1)), **{OUTPUT_CACHE: past}
        )
