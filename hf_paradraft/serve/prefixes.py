"""A prefix cache: a request reads only tokens after a beginning that was read before
(RadixAttention, SGLang, 2024).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy
from transformers import DynamicCache, PreTrainedModel

from ..continuous import Known, can_join
from ..decoding.batch import Batch
from ..decoding.cache import RaggedCache, recurrent_layers
from ..decoding.checks import changes_its_scale
from ..decoding.joining import bytes_of, row_of
from ..integration.look import reads_exactly
from ..protocol import Drafter, Drafting


@dataclass(eq=False)
class Text:
    """A text of which the target has read all but the last tokens.

    Attributes:
        ids: the text's tokens, int64 `(n,)`.
        cache: a cache of one row; any beginning of keys and values can be taken, but only all of
            recurrent states.
        drafting: the drafter's state after this text; None: none is kept.
        nbytes: the bytes of both.
    """

    ids: numpy.ndarray
    cache: RaggedCache
    drafting: Drafting | None
    nbytes: int

    def known(self, ids: numpy.ndarray) -> int:
        """Count the first tokens of a prompt that need not be read again.

        They are never all of it. Of keys and values, the last common token is read again; of
        states, all are known or none.
        """
        common, [read] = num_common(self.ids, ids), self.cache.lengths
        if self.cache.linear:
            return read if read <= common and read < len(ids) else 0
        return min(read, common - 1)


def num_common(ids: numpy.ndarray, others: numpy.ndarray) -> int:
    """Count the first tokens that two texts have in common."""
    size = min(len(ids), len(others))
    return int((ids[:size] == others[:size]).cumprod().sum())


def reads_in_pieces(target: PreTrainedModel, drafter: Drafter | None) -> bool:
    """Tell whether a text read in pieces gives the same as one read at once."""
    if drafter is not None and drafter.speculation_config.compile:
        return False
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    goes_on = can_join(target) or recurrent_layers(cache)
    return bool(goes_on) and changes_its_scale(target) is None and reads_exactly(target, False)


class PrefixCache:
    """The texts that a target and its drafter have read last.

    Args:
        limit: the most bytes.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.texts: list[Text] = []  # by last use, the latest at the end

    def find(self, prompt: list[int], drafts: bool) -> Known | None:
        """Look up the longest beginning of a prompt that was read before.

        With `drafts`, the drafter's state comes with it, if the drafter has read it.
        """
        ids = numpy.array(prompt)
        best = max(
            self.texts, key=lambda text: (text.known(ids), text.drafting is not None), default=None
        )
        if best is None or (read := best.known(ids)) < 1:
            return None
        self.texts.remove(best)
        self.texts.append(best)
        forks = drafts and best.drafting is not None and read < num_common(best.ids, ids)
        return Known(
            _copy(best.cache, 0, read).cache.layers,
            read,
            best.drafting.fork(0, read) if forks else None,
        )

    def would_help(self, prompt: list[int], others: list[list[int]]) -> bool:
        """Tell whether most unread tokens of a prompt would be known after others are read."""
        if not others or not self.limit:
            return False
        ids = numpy.array(prompt)
        known = max((text.known(ids) for text in self.texts), default=0)
        most = (known + len(prompt)) // 2 + 1  # tokens that are shared then, at least
        return any(other[:most] == prompt[:most] for other in others)

    def keep(self, batch: Batch, number: int) -> None:
        """Keep one of a batch's sequences as it is now, instead of its own beginnings."""
        sequence, whole = batch.sequences[number], batch.verifier.cache
        read, ids = whole.lengths[number], sequence.ids[0, : sequence.length].cpu().numpy()
        if read < 1 or not self.limit:
            return
        stays = [
            text
            for text in self.texts
            if num_common(text.ids, ids)
            < len(text.ids) + (bool(whole.linear) and len(text.ids) < len(ids))
        ]
        group = next(group for group in batch.groups if sequence.call in group.calls)
        row = next(row for row, one in enumerate(group.sequences) if one is sequence)
        cache, drafting = _copy(whole, number, read), group.drafting.fork(row, read)
        nbytes = bytes_of(cache.cache) + (0 if drafting is None else drafting.nbytes)
        if nbytes > self.limit:
            return
        texts = [*stays, Text(ids, cache, drafting, nbytes)]
        while sum(text.nbytes for text in texts) > self.limit:
            texts.pop(0)
        self.texts = texts


def _copy(cache: RaggedCache, row: int, length: int) -> RaggedCache:
    """Copy the beginning of a row; a cache of one row with recurrent states is copied whole."""
    if cache.linear:
        return RaggedCache(copy.deepcopy(cache.cache), 1, cache.lengths[0])
    return row_of(cache, row, length)
