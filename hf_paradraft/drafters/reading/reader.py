"""The one ragged reader: texts token by token, by only their ids or each with the target's
features of the token before it.

The newest token has no feature yet, but the one before it has. So row `t` is made of token `t` and
of the features of token `t - 1` (EAGLE-3, P-EAGLE, ParallelSpec, PARD-2), or of only token `t` (a
causal LM). After the text stand masks, or guessed tokens, whose "feature" is the drafter's own
state.
"""

from __future__ import annotations

import sys

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from torch.nn.functional import pad
from transformers.utils import logging

from ...decoding.cache import RaggedCache
from ...decoding.growing import width_on
from ...decoding.tree_attention import attention_windows
from ...protocol import GuessedLogits, Prefix, SpeculationConfig
from .network import (
    RowModel,
    compiled_method,
    last_position,
    make_room,
    plain_cache,
    ragged_masks,
)
from .ragged import RaggedDrafting, Row, guesses_of

logger = logging.get_logger(__name__)

# tokens of a text that are read at once: masks over all of a long prompt would be large
PIECE = 512


class Reader(RaggedDrafting):
    """One call's drafting by a network that reads ragged rows: new tokens, and guesses after them.

    Args:
        model: shared with other calls; nothing of it changes.
        config: options of its use; where they say so, rounds after the prompt are compiled.
        max_length: tokens of a row at most, for these.
    """

    ahead = 1

    def __init__(self, model: RowModel, config: SpeculationConfig, max_length: int):
        at_once = 1 if config.tree_size is None else width_on(model.stack.device)
        self.width = at_once if config.compile else 0  # nodes that a compiled forward reads
        width = config.compiled_width
        super().__init__(model, width, width and max_length + width * (1 + self.width))
        self.last_position = last_position(model.stack)

    def _reset(self, starts: list[int]) -> None:
        """Make a new cache and masks, for rows that are read from these tokens on."""
        model, stack = self.model, self.model.stack
        self.columns = 0
        self.cache = RaggedCache(plain_cache(stack, self.num_slots), len(starts), 0)
        state = model.nothing(1)  # of a text that nothing can be read of yet
        self.rows = [
            Row(start, model.nothing(1 if start == 0 else 0), [state[0]]) for start in starts
        ]
        # A later start is where features begin; or where a text is read anew, from the first
        # position on.
        offsets = [start - model.shift if model.reads_features else 0 for start in starts]
        self.masks = {"all": ragged_masks(stack, offsets, attention_windows(stack) or {})}
        if self.follower is not None:
            self.follower._reset([start + 1 for start in starts])

    def begin(self, begins: list[int]) -> None:
        """Implement `RaggedDrafting.begin`: a token is read with the features of the one before."""
        model = self.model
        starts = [begin if begin == model.shift == 0 else begin + 1 for begin in begins]
        self._reset(starts if model.reads_features else [0] * len(begins))

    def propose(self, prefixes: list[Prefix]) -> list[GuessedLogits]:
        """Guess the tokens after each row; none after a row without features."""
        most = (
            self.compiled_width - 1
            if self.compiled_width
            else max(prefix.room for prefix in prefixes)
        )
        extends = self.model.extends
        logits = self.read(prefixes, 1 if extends else most)
        extend = self.extend if extends else None
        return guesses_of(logits, prefixes, vocabulary=self.model.vocabulary, extend=extend)

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
        self._go_back(
            texts,
            [
                min(prefix.kept, len(ids) - anew)
                for prefix, ids in zip(prefixes, texts, strict=True)
            ],
        )
        if model.context is not None:
            count = min(count, model.context // 2)
            self._start_later(texts, max(count, *(prefix.room for prefix in prefixes)))
        new = [ids[length:] for ids, length in zip(texts, self.lengths, strict=True)]
        for index, row in enumerate(self.rows):
            if not model.reads_features:
                row.waiting = model.nothing(len(new[index]))
            if len(row.waiting) < len(new[index]):
                new[index] = new[index][:0]
        if count < 1 or not any(map(len, new)):
            return [None] * len(texts)
        while max(map(len, new)) > PIECE:  # all but the last piece of each row
            pieces = [ids[:PIECE] if len(ids) > PIECE else ids[:0] for ids in new]
            self._run(pieces, 0, [0] * len(texts))
            new = [ids[len(piece) :] for ids, piece in zip(new, pieces, strict=True)]
        logits = self._run(new, count, [min(count, prefix.room) for prefix in prefixes])
        return [
            row_logits if len(ids) else None for row_logits, ids in zip(logits, new, strict=True)
        ]

    def _go_back(self, texts: list[LongTensor], kept: list[int]) -> None:
        """Forget tokens of each row after its first `kept`, and nodes that have not become text.

        Those that have are kept if the model reads no features: else a guessed token's features
        were not its own. Ids before a row's start are read anew.
        """
        reads_ids = not self.model.reads_features
        rows = list(zip(self.rows, self.lengths, texts, kept, strict=True))
        if reads_ids and any(after < row.begin for row, _, _, after in rows):
            return self._reset([0] * len(texts))
        dropped = [max(0, length - max(after, row.begin)) for row, length, _, after in rows]
        if any(dropped):  # nodes after forgotten tokens are no part of any text
            self.settle()
            self.cache.forget(dropped)
            for row, count in zip(self.rows, dropped, strict=True):
                row.waiting = row.waiting[:0] if count else row.waiting
        elif reads_ids and self.columns:
            self.settle([row.columns_of(ids[length:-1].tolist()) for row, length, ids, _ in rows])
        else:
            self.settle()

    def _start_later(self, texts: list[LongTensor], room: int) -> None:
        """Read texts anew from their newer half on, once positions run out with so many guesses."""
        half, starts = self.model.context // 2, [row.begin for row in self.rows]
        most = self.model.context - min(room, half)
        if all(len(ids) - start <= most for ids, start in zip(texts, starts, strict=True)):
            return
        logger.warning_once(
            f"The text is longer than the {self.model.context} tokens that the drafter has "
            "positions for: it reads the newer half of them alone, and fewer of its guesses may be "
            "right."
        )
        self._reset([max(start, len(ids) - half) for ids, start in zip(texts, starts, strict=True)])

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

    def _add_nodes(
        self, tokens: list[LongTensor], parents: list[list[int]], size: int
    ) -> tuple[ndarray, ndarray]:
        """Add the nodes that `Extend` gets, padded to `size` columns.

        Returns:
            The columns that each new one sees, bool `(B, M, C)`, padding only itself; and the depth
            of each column, int64 `(B, C)`.
        """
        first = self.columns
        self.columns += size
        sees: ndarray = numpy.zeros((len(tokens), size, self.columns), dtype=bool)
        depths: ndarray = numpy.zeros((len(tokens), self.columns), dtype=numpy.int64)
        # padding sees itself: no empty softmax
        sees[:, range(size), range(first, self.columns)] = True
        for index, (row, new, above) in enumerate(zip(self.rows, tokens, parents, strict=True)):
            for offset, (token, parent) in enumerate(zip(new.tolist(), above, strict=True)):
                ancestors = row.nodes[parent][1] if parent >= 0 else []
                row.nodes.append((token, [*ancestors, first + offset]))
                sees[index, offset, ancestors] = True
            for _, columns in row.nodes:
                depths[index, columns[-1]] = len(columns) - 1
        return sees, depths

    def read_nodes(
        self,
        ids: LongTensor,
        before: Tensor,
        tokens: list[LongTensor],
        parents: list[list[int]],
    ) -> tuple[Tensor, Tensor]:
        """Implement `RaggedDrafting.read_nodes`: each node sees its path."""
        size = ids.shape[1]
        sees, depths = self._add_nodes(tokens, parents, size)
        make_room(self.cache, self.columns)
        mask, positions = self.masks["all"].inputs(
            self.cache.lengths,
            sees,
            depths,
            self.cache.num_slots,
            # padding may stand deeper than any node
            (self.model.context or sys.maxsize) - 1,
        )
        forward = compiled_method(self.model.forward_rows, size == self.width)
        return forward(self.model.text(ids, before), mask, positions, self.cache.cache, size)


def ragged_rows(padding: ndarray, size: int) -> tuple[ndarray, ndarray]:
    """Make the mask and depths of texts' new tokens and of the masks after them.

    Each row sees its text up to itself; padding sees only itself.

    Args:
        padding: int64 `(B, 1)`, how many of the rows stand before each text's first.
        size: M.

    Returns:
        The rows that each row sees, bool `(B, M, M)`, and their depths, int64 `(B, M)`, as
        `TreeAttention` takes them.
    """
    depths = numpy.arange(size) - padding
    before = (depths[:, None] >= 0) & (depths[:, None] <= depths[:, :, None])
    return before | numpy.eye(size, dtype=bool), depths.clip(0)
