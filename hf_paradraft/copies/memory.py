"""Texts that drafts are copied from: their tokens in hash chains, as in LZ77, and a memory that
outlives a call.
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from sys import maxsize
from threading import Lock
from time import sleep
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import LongTensor

from ..files import whole

MAX_MATCH = 32  # the most tokens of a match: longer matches count alike
PLACES = 128  # the most places that a lookup compares, the newest first: this bounds its time
END = -1  # the token between texts
LARGEST = 24  # bits of a hash: 128 MiB of table
# the first tokens of copies from one match: in a memory of 1,500 answers one was right in 44 %, one
# of two in 55 %
SIBLINGS = 2
# tokens that are added at once, and seconds between two pieces, for lookups of other threads
PIECE, PAUSE = 512, 1e-4


class HashChains:
    """Tokens in their order, each linked to the last earlier token after the same run.

    Args:
        run: the number of tokens that are hashed, and the fewest of a match.
        capacity: the number of tokens that are kept; beyond it the oldest are written over.
        buckets: the number of runs that the table tells apart, a power of two.
    """

    def __init__(self, run: int, capacity: int = maxsize, buckets: int = 4096):
        self.run, self.capacity = run, capacity
        self.tokens = array("i")  # a ring: the token at place p is in slot p % capacity
        # by slot: the place before it that follows the same run, -1 for none
        self.before = array("q")
        # by a run's hash: the newest place that follows it
        self.newest = array("q", [-1]) * buckets
        self.end = 0  # the number of places that were written

    def append(self, token: int) -> None:
        """Write a token after the others."""
        slot, before = self.end % self.capacity, -1
        if (bucket := self._bucket(self.last(self.run))) is not None:
            before, self.newest[bucket] = self.newest[bucket], self.end
        if slot == len(self.tokens):
            self.tokens.append(token)
            self.before.append(before)
        else:
            self.tokens[slot], self.before[slot] = token, before
        self.end += 1

    def pop(self) -> None:
        """Take the last token back; only where none was written over."""
        self.end -= 1
        self.tokens.pop()
        before = self.before.pop()
        if (bucket := self._bucket(self.last(self.run))) is not None:
            self.newest[bucket] = before

    def longest(self, tail: Sequence[int], most: int = MAX_MATCH) -> tuple[int, list[int]]:
        """Find the earlier places that match a text's end longest.

        Args:
            tail: the text's last tokens.
            most: the most of them that are compared.

        Returns:
            The number of tokens that match, 0 for none, and the places that follow such a match,
            the newest first.
        """
        bucket = self._bucket(tail[-self.run :]) if len(tail) >= self.run else None
        place, oldest = -1 if bucket is None else self.newest[bucket], self.end - len(self.tokens)
        best, places = self.run, list[int]()
        for _ in range(PLACES):
            if place < oldest + self.run:  # it, or its run, was written over
                break
            end, length = min(most, len(tail), place - oldest), 0
            while (
                length < end
                and self.tokens[(place - 1 - length) % self.capacity] == tail[-1 - length]
            ):
                length += 1
            if length > best:
                best, places = length, []
            if length == best:
                places.append(place)
            place = self.before[place % self.capacity]
        return (best, places) if places else (0, [])

    def read(self, place: int, room: int) -> list[int]:
        """Read at most `room` tokens from a place to the end of its text.

        Nothing is read if they were written over.
        """
        if not self.end - len(self.tokens) <= place < self.end:
            return []
        tokens = [
            self.tokens[index % self.capacity]
            for index in range(place, min(place + room, self.end))
        ]
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def last(self, count: int) -> list[int]:
        """Read the last `count` tokens, or all."""
        return [
            self.tokens[place % self.capacity]
            for place in range(max(0, self.end - min(count, self.capacity)), self.end)
        ]

    def _bucket(self, run: Sequence[int]) -> int | None:
        """Hash a run; None for one that is too short, or in two texts."""
        if len(run) < self.run or END in run:
            return None
        value = 0
        for token in run:
            value = (value ^ token) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        return (value >> 32) & (len(self.newest) - 1)


class Memory:
    """Texts that outlive a call and that drafts are copied from.

    Examples are a file that is being edited, retrieved passages, and earlier answers.

    Several calls, drafters and threads may share one. `drafter.memory = memory` gives it to a
    drafter of any kind.

    Args:
        max_tokens: the number of tokens to keep, 20 to 30 bytes each; beyond it the oldest go.
        remember: whether each call adds its prompt and its answer when it ends.

    Raises:
        ValueError: there is no room for a match.
    """

    RUN = 3  # the fewest tokens of a match: shorter ones are found in too many texts

    def __init__(self, max_tokens: int = 1_000_000, remember: bool = False):
        if max_tokens <= self.RUN:
            raise ValueError(
                f"max_tokens={max_tokens}: a memory holds more than {self.RUN} tokens."
            )
        self.max_tokens, self.remember = max_tokens, remember
        self._chains = HashChains(
            self.RUN, max_tokens, 1 << min(max(10, max_tokens.bit_length()), LARGEST)
        )
        self._lock, self._adding = Lock(), Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the locks, for copies and pickles."""
        with self._lock:
            return {
                **vars(self),
                "_lock": None,
                "_adding": None,
                "_chains": copy.deepcopy(self._chains),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of `__getstate__`, with new locks."""
        vars(self).update(state, _lock=Lock(), _adding=Lock())

    def __len__(self) -> int:
        """Count the kept tokens, each text's end mark included."""
        return len(self._chains.tokens)

    @property
    def largest(self) -> int:
        """The largest id that is kept, -1 for none.

        A target whose vocabulary lacks it cannot copy from here.
        """
        with self._lock:
            return int(numpy.asarray(self._chains.tokens).max(initial=-1))

    def clear(self) -> None:
        """Forget all texts."""
        with self._adding, self._lock:
            self._chains = HashChains(self.RUN, self.max_tokens, len(self._chains.newest))

    def add(self, ids: Sequence[int] | LongTensor) -> None:
        """Add a text; if it is longer than the memory, only its end is kept.

        Args:
            ids: the text's tokens, int64 `(n,)` or `(1, n)`, or a list of int.

        Raises:
            ValueError: `ids` are not the ids of one text.
        """
        text = torch.as_tensor(ids, device="cpu")
        if text.numel() and (
            text.is_floating_point() or text.shape not in (text.shape[-1:], (1, *text.shape[-1:]))
        ):
            raise ValueError(
                f"A text's ids are wanted, (n,) or (1, n): got {text.dtype} of shape "
                f"{tuple(text.shape)}."
            )
        tokens = text.reshape(-1).tolist()
        if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 31:
            raise ValueError(f"Ids of tokens are wanted: got {min(tokens)} to {max(tokens)}.")
        tokens = [*tokens[-self.max_tokens + 1 :], END] if tokens else []
        with self._adding:
            for begin in range(0, len(tokens), PIECE):  # calls look up copies in between
                with self._lock:
                    for token in tokens[begin : begin + PIECE]:
                        self._chains.append(token)
                sleep(PAUSE)

    def following(
        self, tail: Sequence[int], room: int
    ) -> tuple[int, list[tuple[int, list[int], int]]]:
        """Find the continuations of the longest match of a text's end.

        Continuations with the two most frequent first tokens are returned.

        Args:
            tail: the text's last tokens; `MAX_MATCH` are enough.
            room: the most tokens of a continuation.

        Returns:
            The match's length, 0 if there is none; and for each first token its newest place, the
            tokens from there on, and how often it followed the match.
        """
        with self._lock:
            length, places = self._chains.longest(tail)
            newest: dict[int, int] = {}
            counts: Counter[int] = Counter()
            for place in places:
                for token in self._chains.read(place, 1):
                    counts[token] += 1
                    newest.setdefault(token, place)
            return length, [
                (newest[token], self._chains.read(newest[token], room), n)
                for token, n in counts.most_common(SIBLINGS)
            ]

    def read(self, place: int, room: int) -> list[int]:
        """Read at most `room` tokens from a place on, to the end of its text.

        Nothing is read at that end, or if the place was written over.
        """
        with self._lock:
            return self._chains.read(place, room)

    def save(self, file: str | Path) -> None:
        """Write the texts to a safetensors file, whole or not at all."""
        with self._lock:
            kept = self._chains.last(len(self))
        tokens = torch.tensor(kept, dtype=torch.int32, device="cpu")
        with whole(Path(file).expanduser()) as new:
            save_file({"tokens": tokens}, new, metadata={"max_tokens": str(self.max_tokens)})

    @classmethod
    def load(cls, file: str | Path, remember: bool = False) -> Memory:
        """Read a memory from a file that `save` wrote.

        Raises:
            ValueError: the file holds no memory.
        """
        try:
            with safe_open(Path(file).expanduser(), framework="pt") as opened:
                tokens, said = opened.get_tensor("tokens"), opened.metadata() or {}
            memory = cls(int(said["max_tokens"]), remember)
            if tokens.ndim != 1 or tokens.is_floating_point():
                raise ValueError(f"{tokens.dtype} of shape {tuple(tokens.shape)}")
            ends = [-1, *(tokens == END).nonzero()[:, 0].tolist(), len(tokens)]
            for before, end in pairwise(ends):
                memory.add(tokens[before + 1 : end])
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, LookupError, ValueError) as error:
            raise ValueError(f"{file} holds no memory; Memory.save writes one.") from error
        return memory
