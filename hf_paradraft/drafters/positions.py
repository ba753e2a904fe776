"""Texts longer than a drafter has positions for: it reads their newer halves."""

from torch import LongTensor
from transformers.utils import logging

from ..protocol import Prefix

logger = logging.get_logger(__name__)


def newer_halves(
    rows: list[LongTensor], starts: list[int], count: int, prefixes: list[Prefix], context: int | None
) -> tuple[int, list[int]]:
    """Move on where texts begin to be read, once positions run out, and guess no more than there are positions for.

    Args:
        rows: the texts, int64 `(n,)` each.
        starts: of each, the first token that is read so far.
        count: distances that are wanted, K.
        prefixes: with the room that is wanted behind each.
        context: positions; None: no end is known.

    Returns:
        K, and the new starts.
    """
    if context is None:
        return count, starts
    count = min(count, context // 2)
    room = max(count, min(max(prefix.room for prefix in prefixes), context // 2))
    if all(len(ids) - start + room <= context for ids, start in zip(rows, starts, strict=True)):
        return count, starts
    logger.warning_once(
        f"The text is longer than the {context} tokens that the drafter has positions for: it reads the newer half of them "
        "alone, and fewer of its guesses may be right."
    )
    return count, [max(start, len(ids) - context // 2) for ids, start in zip(rows, starts, strict=True)]
