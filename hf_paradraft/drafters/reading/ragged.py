"""Drafting over a ragged cache of its own: rows join it, leave it, and are copied."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor

from ...decoding.cache import RaggedCache
from ...decoding.joining import (
    bytes_of,
    join_caches,
    join_masks,
    row_of,
    select_cache,
    select_masks,
)
from ...decoding.tree_attention import TreeAttention
from ...decoding.trees import to_target
from ...protocol import Drafting, GuessedLogits, Observation, Prefix
from ...protocol.drafter import FeatureKey


@dataclass
class Row:
    """The state that a drafting keeps of one text, next to its cache.

    Attributes:
        begin: the first token that the cache holds.
        waiting: `(f, width)`, made of the features of tokens that are not in the cache yet; None:
            nothing came yet.
        states: the states after the text, and after each guessed token that was read, `(d,)` each.
        newest: the target's state of the last token that it has read, `(d_t,)`, if that is read.
        nodes: the guessed tokens that were read after the text: each one's id, and the columns of
            its path, its own last.
    """

    begin: int
    waiting: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)
    newest: Tensor | None = None
    nodes: list[tuple[int, list[int]]] = field(default_factory=list)

    def columns_of(self, tokens: Sequence[int]) -> list[int]:
        """Find the columns of the nodes that `tokens`, which follow the text now, have become."""
        path: list[int] = []
        for token in tokens:
            longer = [
                columns for node, columns in self.nodes if node == token and columns[:-1] == path
            ]
            if not longer:
                break
            path = longer[0]
        return path


class RaggedDrafting(Drafting):
    """One call's drafting over a ragged cache of its own.

    Args:
        model: reads the texts, and is shared with other calls; nothing of it changes. `fuse` makes
            of tokens' features the rows that wait for the cache, `(f, width)`.
        compiled_width: tokens that a compiled round reads; 0: none is compiled.
        num_slots: the slots of a static cache; 0: it is dynamic.

    Attributes:
        ahead: tokens whose features are not needed to read them: 1 where a row is made of a token
            and of the features of the one before.
        width: nodes that a forward reads at least.
        rows: the state of each text; empty, and no cache, before the first observation.
        masks: the masks of the rows, by kind of layer.
        columns: entries of the cache after the longest text, which hold the rows' nodes.
        follower: a drafting whose features are this one's states; None: there is none.
    """

    ahead: ClassVar[int] = 0
    width: int = 0
    follower: Any = None

    def __init__(self, model: Any, compiled_width: int = 0, num_slots: int = 0):
        self.model, self.compiled_width, self.num_slots = model, compiled_width, num_slots
        self.cache: RaggedCache | None = None
        self.rows: list[Row] = []
        self.masks: dict[str, TreeAttention] = {}
        self.columns = 0

    def begin(self, begins: list[int]) -> None:
        """Make cache and masks for rows whose features begin at these tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no begin(begins).")

    @torch.no_grad()
    def observe(self, observations: list[Observation | None]) -> None:
        """Fuse the features that the target's forward brought, of all rows at once."""
        if self.cache is None:
            self.begin([0 if seen is None else seen.begin for seen in observations])
        known = [
            (row, seen.features)
            for row, seen in zip(self.rows, observations, strict=True)
            if seen is not None and seen.features
        ]
        if not known:
            return
        fused = self.model.fuse(
            {key: torch.cat([features[key] for _, features in known]) for key in known[0][1]}
        )
        counts = [len(next(iter(features.values()))) for _, features in known]
        for (row, _), new in zip(known, fused.split(counts), strict=True):
            row.waiting = new if row.waiting is None else torch.cat([row.waiting, new])

    @property
    def lengths(self) -> list[int]:
        """Count the tokens of each text up to the last one in the cache."""
        return [row.begin + count for row, count in zip(self.rows, self.cache.lengths, strict=True)]

    def settle(self, paths: list[list[int]] | None = None) -> None:
        """Forget guessed tokens that were read, but for those of each row that became text.

        Args:
            paths: columns of the latter; None: none did.
        """
        if self.columns:
            self.cache.keep(paths or [[]] * len(self.rows), self.columns)
        self.columns = 0
        for row in self.rows:
            row.nodes = []

    def join(self, other: Any) -> bool:
        """Implement `Drafting.join`, for calls that have begun and are not compiled."""
        alike = type(other) is type(self) and not self.compiled_width
        if not alike or self.cache is None or other.cache is None:
            return False
        for drafting in (self, other):
            drafting.settle()
        join_caches(self.cache, other.cache)
        for kind, mask in self.masks.items():
            join_masks(mask, other.masks[kind])
        self.rows = self.rows + other.rows
        return self.follower is None or self.follower.join(other.follower)

    def select(self, rows: list[int]) -> None:
        """Implement `Drafting.select`; there is nothing to do before it has begun."""
        if self.cache is None:
            return
        self.settle()
        self.rows = [self.rows[row] for row in rows]
        select_cache(self.cache, rows)
        for mask in self.masks.values():
            select_masks(mask, rows)
        if self.follower is not None:
            self.follower.select(rows)

    def fork(self, row: int, read: int) -> Drafting | None:
        """Implement `Drafting.fork`; a text whose states went on to a follower is not copied."""
        if self.cache is None or self.follower is not None or self.rows[row].begin > read:
            return None
        forked, kept, length = copy.copy(self), self.rows[row], self.lengths[row]
        known = read + self.ahead
        waiting = None if kept.waiting is None else kept.waiting[: max(0, known - length)].clone()
        forked.rows = [Row(kept.begin, waiting, kept.states[:1])]
        forked.cache = row_of(self.cache, row, min(length, known) - kept.begin)
        forked.columns = 0
        forked.masks = {kind: copy.copy(mask) for kind, mask in self.masks.items()}
        for mask in forked.masks.values():
            select_masks(mask, [row])
        forked.nbytes = bytes_of(forked.cache.cache)
        return forked

    @torch.no_grad()
    def extend(
        self,
        tokens: list[LongTensor],
        parents: list[list[int]],
        states: Sequence[Sequence[Tensor]] | None = None,
    ) -> list[Tensor]:
        """Read guessed tokens after the texts; as `Extend`.

        Args:
            tokens, parents: the arguments of `Extend`.
            states: `(d,)` each, of their parents; default: those that are kept of the rows.
        """
        states = self.states_of(parents) if states is None else states
        some, size = self.rows[0].states[0], max(self.width, *map(len, tokens))
        ids = torch.zeros((len(tokens), size), dtype=torch.long, device=some.device)
        before = some.new_zeros((len(tokens), size, some.shape[-1]))
        for index, (new, kept) in enumerate(zip(tokens, states, strict=True)):
            if len(new):
                ids[index, : len(new)] = new
                before[index, : len(new)] = torch.stack([*kept])
        logits, made = self.read_nodes(ids, before, tokens, parents)
        for row, new, after in zip(self.rows, tokens, made, strict=True):
            row.states += after[: len(new)]
        return [guess[: len(new)] for guess, new in zip(logits, tokens, strict=True)]

    def states_of(self, nodes: list[list[int]]) -> list[list[Tensor]]:
        """Look up the states `(d,)` that are kept of each row's nodes; -1 is its text's end."""
        return [
            [row.states[node + 1] for node in some]
            for row, some in zip(self.rows, nodes, strict=True)
        ]

    def read_nodes(
        self,
        ids: LongTensor,
        before: Tensor,
        tokens: list[LongTensor],
        parents: list[list[int]],
    ) -> tuple[Tensor, Tensor]:
        """Compute logits `(B, M, V')` and states `(B, M, d)` after guessed tokens.

        Args:
            ids: int64 `(B, M)`, padded.
            before: `(B, M, d)`, the states of their parents.
            tokens, parents: the arguments of `Extend`.
        """
        raise NotImplementedError(f"{type(self).__name__} guesses all distances at once.")

    @torch.no_grad()
    def logits_after_texts(
        self, ids: LongTensor, features: dict[FeatureKey, Tensor] | None, count: int
    ) -> Tensor:
        """Compute logits `(B, count, V')` after whole texts of equal length.

        Nothing has been read before. A guess that depends on the tokens before it stands after the
        most probable ones.

        Args:
            ids: int64 `(B, n)`.
            features: the features by key, `(B, n - 1, …)`; None where none are read.
            count: K.

        Raises:
            ValueError: where features are read, none, or a text of one token.
        """
        if features:
            self.observe(
                [
                    Observation(row, 0, {key: states[index] for key, states in features.items()})
                    for index, row in enumerate(ids)
                ]
            )
        guesses: Any = self.propose([Prefix(row[None], count, 0) for row in ids])
        first = guesses[0]
        if not len(first.logits):
            raise ValueError(
                "Guesses are made from the target's hidden states: pass features, by key, of all "
                "tokens but the last, of a text of two tokens at least."
            )
        logits = torch.stack(
            [_most_probable(guess, row[-1:]) for guess, row in zip(guesses, ids, strict=True)]
        )
        while first.extend is not None and logits.shape[1] < count:
            token = to_target(logits[:, -1].max(-1).indices, first.vocabulary)
            parents = [[logits.shape[1] - 2]] * len(ids)
            logits = torch.cat(
                [logits, torch.stack(first.extend(list(token[:, None]), parents))], dim=1
            )
        return logits


def _most_probable(guess: GuessedLogits, token: LongTensor) -> Tensor:
    """Compute a guess's logits `(k, V')`, each biased by the most probable token before it.

    `token`, int64 `(1,)`, is the text's last one.
    """
    if guess.bias is None:
        return guess.logits
    rows, memories = [], [None]
    for depth, row in enumerate(guess.logits):
        bias, memories = guess.bias(torch.tensor([depth], device=token.device), token, memories)
        rows.append(row + bias[0].to(row))
        token = to_target(rows[-1].argmax()[None], guess.vocabulary)
    return torch.stack(rows)


def no_guess(prefix: Prefix) -> GuessedLogits:
    """Make the guess after a prefix of which nothing is known."""
    return GuessedLogits(prefix.ids.new_zeros((0, 1)).float())


def guesses_of(
    logits: Iterable[Tensor | None], prefixes: Sequence[Prefix], **options: Any
) -> list[GuessedLogits]:
    """Make the guesses after each prefix, as many as there is room for.

    A prefix without logits gets none.

    Args:
        logits: `(K, V')` of each.
        prefixes: those of the rows.
        options: further fields of the guesses.
    """
    return [
        no_guess(prefix) if row is None else GuessedLogits(row[: prefix.room], **options)
        for row, prefix in zip(logits, prefixes, strict=True)
    ]
