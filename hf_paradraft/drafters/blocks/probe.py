"""Which token a block's rows guess, where a file does not say: the target's own output decides, once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.features import Features
from ...decoding.trees import to_target
from ...hardware import input_device

logger = logging.get_logger(__name__)
TOKENS = 48


@torch.no_grad()
def settle(drafter: Any, target: PreTrainedModel) -> None:
    """Read both ways how often each guesses what the target says, and keep the better one.

    Where both guess equally well nothing is decided and nothing saved: it is used as the class of its layout has it, from the
    newest token on. A verdict is saved with the drafter (`sample_from_anchor`). `drafter.block.fill_in = True` or `False`
    overrules both.

    Args:
        drafter: attached to `target`.
        target: writes `TOKENS` tokens behind its first ids.
    """
    begin = torch.tensor([[min(1, drafter.block.vocab_size - 1)]], device=input_device(target))
    # Said out loud, for the target's own generation config may say otherwise.
    options = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": False, "pad_token_id": 0}
    ids = target.generate(begin, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **options)
    with Features(target, drafter.needs(target)) as features:
        target(ids, use_cache=False)
        rows = dict(features.rows)
    right = {True: 0, False: 0}
    size = drafter.block.block_size
    for length in range(8, ids.shape[1] - size, 3):
        given = {key: states[:, : length - 1] for key, states in rows.items()}
        for fill_in in right:
            drafter.block.fill_in = fill_in
            guessed = to_target(drafter.draft_logits(ids[:, :length], given, 2)[0].argmax(-1), drafter.vocabulary)
            right[fill_in] += int((guessed.to(ids.device) == ids[0, length : length + 2]).sum())
    drafter.block.fill_in = right[True] > right[False]
    drafter.block.assumed = drafter.block.fill_in if right[True] == right[False] else None
    decided = drafter.block.assumed is None
    reading = (
        "fills its masks in (the first row guesses nothing)" if drafter.block.fill_in else "guesses from the newest token on"
    )
    logger.warning(
        "This %s does not say which tokens its rows guess. On the target's own output, %d guesses are right if it fills in, %d "
        "if not%s: taking it that it %s. To overrule, set drafter.block.fill_in.",
        drafter.title,
        right[True],
        right[False],
        "" if decided else ", which decides nothing",
        reading,
    )
    drafter.notes.append(("anchor", f"{'probed' if decided else 'probed, undecided'}: {reading}"))
    if drafter.speculation_config.num_draft_tokens > drafter.block.num_drafts:
        drafter.speculation_config.num_draft_tokens = drafter.block.num_drafts
