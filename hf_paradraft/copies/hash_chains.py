"""Tokens, and the earlier places of each short run of them (hash chains, as in LZ77)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import maxsize

MAX_MATCH = 32  # the most tokens of a match: longer matches count alike
PLACES = 128  # the most places that a lookup compares, the newest first: this bounds its time
END = -1  # the token between texts


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
