"""Texts that drafts are copied from, and that outlive a call."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import LongTensor

from ..files import whole
from .hash_chains import END, HashChains

LARGEST = 24  # bits of a hash: 128 MiB of table
# tokens that may come first in what is copied: in a memory of 1,500 answers one was right in 44 %,
# two in 55 %
SIBLINGS = 2
# tokens that are added at once, and seconds between two pieces, for lookups of other threads
PIECE, PAUSE = (
    512,
    1e-4,
)


class Memory:
    """Texts that outlive a call and that drafts are copied from.

    They may be a file that is being edited, passages, or earlier answers.

    Several calls, drafters and threads may share one. `drafter.memory = memory` gives it to a
    drafter of any kind.

    Args:
        max_tokens: how many tokens are kept, some 30 bytes each; beyond them the oldest go.
        remember: whether each call adds its prompt and its answer when it ends.

    Raises:
        ValueError: there is no room for a match.
    """

    RUN = 3  # tokens of a match at least: shorter ones are found in too many texts

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
        """Return all but the locks, for copies and pickles."""
        with self._lock:
            return {
                **vars(self),
                "_lock": None,
                "_adding": None,
                "_chains": copy.deepcopy(self._chains),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave, with a lock of its own."""
        vars(self).update(state, _lock=Lock(), _adding=Lock())

    def __len__(self) -> int:
        """Count the tokens that are kept; each text has one more, its end."""
        return len(self._chains.tokens)

    @property
    def largest(self) -> int:
        """The largest id that is kept, -1 for none.

        A target with a smaller vocabulary cannot copy from here.
        """
        with self._lock:
            return int(numpy.asarray(self._chains.tokens).max(initial=-1))

    def clear(self) -> None:
        """Forget all texts."""
        with self._adding, self._lock:
            self._chains = HashChains(self.RUN, self.max_tokens, len(self._chains.newest))

    def add(self, ids: Sequence[int] | LongTensor) -> None:
        """Add a text. Of one that is longer than the memory its end is kept.

        Args:
            ids: the text's tokens, int64 `(n,)` or `(1, n)`, or a list of int.

        Raises:
            ValueError: these are no ids of one text.
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
            for begin in range(0, len(tokens), PIECE):  # calls look things up between two pieces
                with self._lock:
                    for token in tokens[begin : begin + PIECE]:
                        self._chains.append(token)
                sleep(PAUSE)

    def following(
        self, tail: Sequence[int], room: int
    ) -> tuple[int, list[tuple[int, list[int], int]]]:
        """Find the continuations of the longest match of a text's end.

        Those with the two most frequent first tokens are taken.

        Args:
            tail: the text's last tokens; `MAX_MATCH` are enough.
            room: how many tokens are wanted at most.

        Returns:
            The match's length, 0 if there is none; and for each first token the newest place, the
            tokens from there on, and how often it stood there.
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
        """Read on from a place that `following` gave, to the end of its text.

        Nothing is read at that end, or once the place was written over.
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
        """Read what `save` wrote.

        Raises:
            ValueError: the file holds something else.
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
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{file} holds no memory; Memory.save writes one.") from error
        return memory
