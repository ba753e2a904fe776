"""Drafts that are copied: what followed where the text itself, or a memory of other texts, went as it goes now."""

from __future__ import annotations

from transformers.utils import logging

from ..protocol import Drafter
from .lookup import PromptLookup

logger = logging.get_logger(__name__)


def copies_of(drafter: Drafter) -> PromptLookup | None:
    """Make what copies for the sequences of a call; None where its drafter wants no copies."""
    if not drafter.speculation_config.prompt_lookup and drafter.memory is None:
        return None
    if drafter.guesses_in_target:
        logger.warning_once(f"{type(drafter).__name__} has rows of its own in each draft: nothing is copied (prompt_lookup).")
    return PromptLookup(memory=drafter.memory)
