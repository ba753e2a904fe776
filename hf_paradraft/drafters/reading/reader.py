"""The one ragged reader: texts token by token, by only their ids or each with the target's
features of the token before it.

The newest token has no feature yet, but the one before it has. So row `t` is made of token `t` and
of the features of token `t - 1` (EAGLE-3, P-EAGLE, ParallelSpec, PARD-2), or of only token `t` (a
causal LM). After the text stand masks, or guessed tokens, whose "feature" is the drafter's own
state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy
import torch
from torch import LongTensor, Tensor
from torch.nn.functional import pad

from ...decoding.cache import RaggedCache
from ...decoding.growing import width_on
from ...decoding.tree_attention import attention_windows
from ...protocol import GuessedLogits, Observation, Prefix, SpeculationConfig
from ..layers import StackMasks, last_position
from .cache import (
    compiled_method,
    guesses_of,
    make_room,
    newer_halves,
    plain_cache,
    ragged_rows,
)
from .ragged import Nodes, RaggedDrafting, Row
from .row_model import RowModel

PIECE = (
    512  # tokens of a text that are read at once: masks over all of a long prompt would be large
)


class Reader(RaggedDrafting):
    """One call's drafting by a network that reads ragged rows: new tokens, and guesses after them.

    Args:
        model: shared with other calls; nothing of it changes.
        config: options of its use; where they say so, rounds after the prompt are compiled.
        max_length: tokens of a row at most, for these.
        vocabulary: int64 `(V',)`, the target's id of each of the model's; None: they are the same.
        extends: whether it goes on from tokens that the engine chose, instead of reading masks.

    Attributes:
        follower: another reader, whose features are this one's states; None: there is none.
    """

    ahead = 1
    follower: Reader | None = None

    def __init__(
        self,
        model: RowModel,
        config: SpeculationConfig,
        max_length: int,
        vocabulary: LongTensor | None = None,
        extends: bool = False,
    ):
        self.vocabulary, self.extends = vocabulary, extends
        at_once = 1 if config.tree_size is None else width_on(model.stack.device)
        self.width = at_once if config.compile else 0  # nodes that a compiled forward reads
        width = config.compiled_width
        super().__init__(model, width, width and max_length + width * (1 + self.width))
        self.last_position = last_position(model.stack)

    def _reset(self, starts: list[int]) -> None:
        """Make a new cache and masks, for rows that are read from these tokens on."""
        model, stack = self.model, self.model.stack
        self.nodes = Nodes()
        self.cache = RaggedCache(plain_cache(stack, self.num_slots), len(starts), 0)
        state = model.nothing(1)  # of a text that nothing can be read of yet
        self.rows = [
            Row(start, model.nothing(1 if start == 0 else 0), [state[0]]) for start in starts
        ]
        # A later start is where features begin; or where a text is read anew, from the first
        # position on.
        offsets = [start - model.shift if model.reads_features else 0 for start in starts]
        windows = attention_windows(stack) or {}
        self.masks = {"all": StackMasks(windows, offsets, stack.dtype, stack.device)}
        if self.follower is not None:
            self.follower._reset([start + 1 for start in starts])

    def observe(self, observations: list[Observation | None]) -> None:
        """Keep the features that the target's forward brought of each row, if they are read."""
        if self.model.reads_features:
            super().observe(observations)
        elif self.cache is None:
            self._reset([0] * len(observations))

    def begin(self, begins: list[int]) -> None:
        """Implement `RaggedDrafting.begin`: a token is read with the features of the one before."""
        whole = self.model.shift == 0
        self._reset([0 if begin == 0 and whole else begin + 1 for begin in begins])

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row; none after a row without features."""
        most = (
            self.compiled_width - 1
            if self.compiled_width
            else max(prefix.room for prefix in prefixes)
        )
        logits = self.read(prefixes, 1 if self.extends else most)
        extend = self.extend if self.extends else None
        return guesses_of(logits, prefixes, vocabulary=self.vocabulary, extend=extend)

    @torch.no_grad()
    def read(self, prefixes: list[Prefix], count: int) -> list[Tensor | None]:
        """Read each text's new tokens, and masks after them; the cache keeps only the texts.

        Args:
            prefixes: those of the rows.
            count: distances that are wanted, K.

        Returns:
            For each row logits `(K, V')`; None where the features of its last token but one are not
            there.
        """
        model = self.model
        if self.cache is None:
            if model.reads_features:
                return [None] * len(prefixes)
            self._reset([0] * len(prefixes))
        texts = [prefix.ids[0].to(model.stack.device) for prefix in prefixes]
        anew = 0 if model.reads_features else 1  # the newest token is read for its logits
        self._forget(
            [min(prefix.kept, len(ids) - anew) for prefix, ids in zip(prefixes, texts, strict=True)]
        )
        self._drop_unused_nodes(texts)
        old_starts = [row.begin for row in self.rows]
        count, starts = newer_halves(texts, old_starts, count, prefixes, model.context)
        if count < 1:
            return [None] * len(texts)
        if starts != old_starts:
            self._reset(starts)
        new = [ids[length:] for ids, length in zip(texts, self.lengths, strict=True)]
        for index, row in enumerate(self.rows):
            if not model.reads_features:
                row.waiting = model.nothing(len(new[index]))
            if len(row.waiting) < len(new[index]):
                new[index] = new[index][:0]
        if not any(map(len, new)):
            return [None] * len(texts)
        while max(map(len, new)) > PIECE:  # all but the last piece of each row
            pieces = [ids[:PIECE] if len(ids) > PIECE else ids[:0] for ids in new]
            self._run(pieces, 0, [0] * len(texts))
            new = [ids[len(piece) :] for ids, piece in zip(new, pieces, strict=True)]
        logits = self._run(new, count, [min(count, prefix.room) for prefix in prefixes])
        return [
            row_logits if len(ids) else None for row_logits, ids in zip(logits, new, strict=True)
        ]

    def _drop_unused_nodes(self, texts: list[LongTensor]) -> None:
        """Forget guessed tokens, but for those that became text.

        Those are kept if the model reads no features: else a guessed token's features were not its
        own.
        """
        paths = None
        if self.nodes.columns and not self.model.reads_features:
            paths = [
                self.nodes.path(row, ids[length:-1].tolist())
                for row, (ids, length) in enumerate(zip(texts, self.lengths, strict=True))
            ]
        self.settle(paths)

    def _forget(self, lengths: list[int]) -> None:
        """Drop the tokens of each row that were read after the first `lengths`.

        Their features went with them, and ids before the start are read anew.
        """
        if not self.model.reads_features and any(
            after < row.begin for after, row in zip(lengths, self.rows, strict=True)
        ):
            return self._reset([0] * len(lengths))
        dropped = [
            max(0, before - max(after, row.begin))
            for before, after, row in zip(self.lengths, lengths, self.rows, strict=True)
        ]
        if any(dropped):
            self.settle()  # nodes after forgotten tokens are no part of any text
            self.cache.forget(dropped)
            for row, count in zip(self.rows, dropped, strict=True):
                row.waiting = row.waiting[:0] if count else row.waiting

    def _run(self, new: list[LongTensor], count: int, rooms: list[int]) -> Tensor:
        """Read each text's next tokens, and masks after them; return logits `(B, k, V')`.

        Up to `count - 1` masks are read.

        Args:
            new: int64 `(m,)` each.
            count: K.
            rooms: the guesses that are wanted of each row.
        """
        model, attention, longest = self.model, self.masks["all"], max(map(len, new))
        compiled = longest <= self.compiled_width and self.cache.end > 0
        longest = self.compiled_width if compiled else longest
        padding = numpy.array([[longest - len(ids)] for ids in new])
        ids = torch.stack([pad(row, (longest - len(row), 0)) for row in new])
        fused = torch.stack(
            [
                pad(row.waiting[: len(read)], (0, 0, longest - len(read), 0))
                for read, row in zip(new, self.rows, strict=True)
            ]
        )
        inputs = model.text(ids, fused)
        if count > 1:
            masks = model.masks(fused[:, -1], count - 1)
            inputs, count = torch.cat([inputs, masks], dim=1), 1 + masks.shape[1]
        size = inputs.shape[1]
        make_room(self.cache, size)
        # Unread rows, masks beyond a row's own room and padding, stay where the model may have a
        # position.
        lasts = [
            [length + len(read) - 1 + max(0, room - 1)]
            for length, read, room in zip(self.cache.lengths, new, rooms, strict=True)
        ]
        # a text that is longer than a table is read along
        last = numpy.minimum(numpy.array(lasts) + attention.offsets, self.last_position)
        mask, positions = attention.inputs(
            self.cache.lengths, *ragged_rows(padding, size), self.cache.num_slots, last
        )
        forward = compiled_method(model.forward_rows, compiled)
        logits, states = forward(inputs, mask, positions, self.cache.cache, max(1, count))
        self.cache.keep([list(range(longest - len(read), longest)) for read in new], size)
        for row, read, state in zip(self.rows, new, states[:, -max(1, count)], strict=True):
            row.waiting, row.states = row.waiting[len(read) :], [state]
        # reads each token with the state that this reader made of the one before
        if self.follower is not None:
            for row, read, made in zip(self.follower.rows, new, states, strict=True):
                row.waiting = torch.cat([row.waiting, made[len(made) - len(read) :]])
        return logits

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
            states: `(hidden,)` each, of their parents; default: those that this reader made of
                them.
        """
        sees, depths = self.nodes.add(tokens, parents, self.width)
        make_room(self.cache, self.nodes.columns)
        size = sees.shape[1]
        ids, before = self.laid_out(tokens, parents, size, states)
        mask, positions = self.masks["all"].inputs(
            self.cache.lengths,
            sees,
            depths,
            self.cache.num_slots,
            # padding may stand deeper than any node
            (self.model.context or sys.maxsize) - 1,
        )
        forward = compiled_method(self.model.forward_rows, size == self.width)
        logits, made = forward(
            self.model.text(ids, before), mask, positions, self.cache.cache, size
        )
        self.keep_states(tokens, made)
        return [read[: len(new)] for read, new in zip(logits, tokens, strict=True)]
