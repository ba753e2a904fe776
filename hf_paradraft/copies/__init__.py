"""Prompt lookup: drafts copied from the text itself or from a memory of other texts."""

from __future__ import annotations

from transformers.utils import logging

from ..protocol import Drafter
from .lookup import PromptLookup
from .memory import Memory

__all__ = ["Memory", "PromptLookup", "copies_of"]

logger = logging.get_logger(__name__)


def copies_of(drafter: Drafter, draws: bool) -> PromptLookup | None:
    """Make the prompt lookup of a call; None if its drafter wants no copies.

    Args:
        drafter: the drafter, whose options and memory decide.
        draws: whether the acceptance rule needs drawn drafts, so that copies cannot be used.
    """
    if not drafter.speculation_config.prompt_lookup and drafter.memory is None:
        return None
    if drafter.guesses_in_target:
        logger.warning_once(
            f"{type(drafter).__name__} has rows of its own in each draft: nothing is copied "
            "(prompt_lookup)."
        )
    if draws:
        logger.warning_once(
            "acceptance='rejection' wants its drafts drawn: nothing is copied (prompt_lookup)."
        )
    return PromptLookup(memory=drafter.memory)
