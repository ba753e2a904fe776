"""A causal LM that reads ragged rows, with masks behind: what PARD, prompted and autoregressive drafters stand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import Cache, PreTrainedModel
from transformers.utils import logging

from ..decoding.cache import (
    MOST_UNREAD,
    RaggedCache,
    check_forgets,
    copy_states,
    empty_cache,
    end_windows,
    is_recurrent,
    put_back,
)
from ..decoding.compiled import compiled_forward
from ..decoding.tree_attention import TreeAttention, attention_windows, or_sdpa
from ..names import DynamicLayer, stores_nothing, with_cache
from ..protocol import Prefix
from .cache import Nodes, check_continues, make_room, plain_cache, ragged_rows

logger = logging.get_logger(__name__)


def check_drafts(model: PreTrainedModel) -> None:
    """Refuse a model that cannot draft, whatever it was taught.

    Raises:
        ValueError: it cannot forget masks that it has read.
    """
    if attention_windows(model) is not None:
        return
    check_forgets(model)
    cache = empty_cache(model)
    if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise ValueError(f"{type(model).__name__} has no attention layers, so nothing counts what it has read: it cannot draft.")
    if is_recurrent(cache):
        check_continues(model)


@torch.no_grad()
def logits_behind(model: PreTrainedModel, input_ids: LongTensor, masks: Sequence[int]) -> Tensor:
    """Logits behind each prefix and each mask, from one forward without caches; what caches are tested against.

    Args:
        model: a causal LM.
        input_ids: int64 `(B, n)`.
        masks: ids of the K - 1 places to be guessed.

    Returns:
        `(B, K, V')` in the model's dtype.
    """
    behind = input_ids.new_tensor([list(masks)]).expand(len(input_ids), -1)
    fed = torch.cat([input_ids, behind], dim=1).to(model.device)
    return model(input_ids=fed, use_cache=False, logits_to_keep=len(masks) + 1).logits


def read_with_masks(model: PreTrainedModel, ids: LongTensor, cache: Cache, masks: Sequence[int], unknown: int) -> Tensor:
    """Logits behind one prefix and each mask; then the cache holds `ids`, or leading tokens of it where layers are recurrent.

    Args:
        model: run once, or twice where many tokens wait to be read behind a recurrent state.
        ids: int64 `(1, n)` on the model's device, the whole prefix.
        cache: holds fewer than `n` leading tokens of it, and no masks.
        masks: ids of the K - 1 places to be guessed.
        unknown: stands for ids that the model has no embedding of.

    Returns:
        `(K, V')` in the model's dtype; row `d` guesses the token at distance `d + 1`. `(1, V')` behind a recurrent drafter's
        very first token.
    """
    vocab_size = model.get_input_embeddings().num_embeddings
    length, recurrent = cache.get_seq_length(), is_recurrent(cache)
    new = ids[:, length:].where(ids[:, length:] < vocab_size, unknown)

    def read(fed: LongTensor, logits_to_keep: int) -> Tensor:
        positions = torch.arange(length, length + fed.shape[1], device=fed.device)[None]
        inputs = {"input_ids": fed, "position_ids": positions, "use_cache": True, **with_cache(model, cache)}
        return model(**inputs, logits_to_keep=logits_to_keep).logits[0]

    if recurrent and new.shape[1] > (MOST_UNREAD if length else 1):
        read(new[:, :-1], 1)
        end_windows(cache)
        length, new = ids.shape[1] - 1, new[:, -1:]
    if recurrent and length == 0:
        masks = []  # there is no state yet that could be put back
    fed = torch.cat([new, ids.new_tensor([list(masks)])], dim=1)
    states = copy_states(cache)
    logits = read(fed, len(masks) + 1)
    if not recurrent:
        cache.crop(-len(masks))
    elif masks:
        put_back(cache, states, fed.shape[1])
    else:
        end_windows(cache)
    return logits


class LmReader:
    """One call's reading: a cache over the prefixes, refilled when the model's context runs out.

    Args:
        model: shared with other calls; nothing of it changes.
        max_length: tokens of a row at most.
        masks: ids of the K - 1 places to be guessed at most, in their order.
        unknown: stands for ids that the model has no embedding of.
        compiled_width: tokens that a compiled forward reads in every round behind the prompt, masks too; 0: none is compiled.
    """

    def __init__(self, model: PreTrainedModel, max_length: int, masks: Sequence[int], unknown: int, compiled_width: int = 0):
        self.model, self.max_length, self.masks, self.unknown = model, max_length, list(masks), unknown
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.windows = attention_windows(model)
        self.compiled_width = 0 if self.windows is None else compiled_width
        self.cache: RaggedCache | Cache | None = None
        self.begins: list[int] = []  # of each row, the first token that the cache knows
        self.lengths: list[int] = []  # of each row, the tokens before this one are in the cache
        self.nodes = Nodes(0)  # what was read behind them

    def read(self, prefixes: list[Prefix], count: int, room: int = 0) -> Tensor | None:
        """Read what is new of each prefix, and masks behind; the cache keeps the prefixes alone.

        Args:
            prefixes: of the rows.
            count: distances that are wanted, K.
            room: positions that are to be left behind each prefix, if that is more.

        Returns:
            Logits `(B, k, V')`, k being at most K, or all of a compiled drafter; None where the context is too short for any.
        """
        rows = [self._readable(prefix.ids[0]) for prefix in prefixes]
        count = len(self.masks) + 1 if self.compiled_width else min(count, len(self.masks) + 1)
        self.begins = self.begins or [0] * len(rows)
        self.forget([min(prefix.kept, len(ids) - 1) for prefix, ids in zip(prefixes, rows, strict=True)])
        self._keep_nodes(rows)
        if self.context is not None:
            count = min(count, self.context // 2)
            room = max(count, min(room, self.context // 2))
            if any(len(ids) - begin + room > self.context for ids, begin in zip(rows, self.begins, strict=True)):
                # Keep the newer half, and go on from there.
                logger.warning_once(
                    f"The text is longer than the {self.context} tokens that the drafter has positions for: it reads the newer "
                    "half of them alone, and fewer of its guesses may be right."
                )
                self.begins = [max(begin, len(ids) - self.context // 2) for ids, begin in zip(rows, self.begins, strict=True)]
                self.cache = None
        if count < 1:
            return None
        logits = self._read(rows, self.masks[: count - 1])
        self.lengths = [len(ids) for ids in rows]
        return logits

    def read_nodes(self, tokens: list[LongTensor], parents: list[list[int]]) -> list[Tensor]:
        """Read guessed tokens behind the prefixes; the model must take explicit masks.

        Args:
            tokens: of each row, int64 `(n,)`.
            parents: of each: indices into what was read so of its row since the last `read`, -1 for the prefix's last token.

        Returns:
            For each row logits `(n, V')` behind its tokens.
        """
        tokens = [self._readable(new) for new in tokens]
        sees, depths = self.nodes.add(tokens, parents)
        fed = torch.full((len(tokens), sees.shape[1]), self.unknown, device=self.model.device)
        for row, new in enumerate(tokens):
            fed[row, : len(new)] = new
        mask, positions = self.attention.inputs(self.cache.lengths, sees, depths, self.cache.num_slots)
        if self.context is not None:
            positions = positions.clamp(max=self.context - 1)
        logits = self._forward(fed, mask, positions, 0)
        return [read[: len(new)] for read, new in zip(logits, tokens, strict=True)]

    def _readable(self, ids: LongTensor) -> LongTensor:
        """Ids on the model's device, those that it has no embedding of as `unknown`."""
        ids = ids.to(self.model.device)
        return ids.where(ids < self.model.get_input_embeddings().num_embeddings, self.unknown)

    def _keep_nodes(self, rows: list[LongTensor]) -> None:
        """Keep the nodes that became text, and drop the others."""
        if self.cache is not None and self.nodes.columns:
            # The newest token is read for its logits.
            paths = [
                self.nodes.path(row, ids[length:-1].tolist())
                for row, (ids, length) in enumerate(zip(rows, self.lengths, strict=True))
            ]
            self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
            self.cache.keep(paths, self.nodes.columns)
        self.nodes = Nodes(len(rows))

    def forget(self, lengths: list[int]) -> None:
        """Drop what was read behind so many tokens of each row; where that is not in the cache alone, all is read anew."""
        dropped = [max(0, before - after) for before, after in zip(self.lengths, lengths, strict=False)]
        if self.cache is None or not any(dropped):
            return
        self.drop_nodes()  # nodes behind what is forgotten are no part of any text
        self.lengths = [length - count for length, count in zip(self.lengths, dropped, strict=True)]
        if any(length < begin for length, begin in zip(self.lengths, self.begins, strict=True)):
            self.begins, self.cache = [0] * len(self.begins), None
        elif isinstance(self.cache, RaggedCache):
            self.cache.forget(dropped)
        elif (more := self.begins[0] + self.cache.get_seq_length() - self.lengths[0]) > 0:
            if all(type(layer) is DynamicLayer or stores_nothing(layer) for layer in self.cache.layers):
                self.cache.crop(-more)
            else:  # a state cannot go back so far, and a window has dropped what it would need
                self.cache = None

    def join(self, other: LmReader) -> bool:
        """Read another one's rows too, behind these, and tell whether it can be: both have read their prompts, alike."""
        alike = other.model is self.model and other.masks == self.masks and not self.compiled_width
        if not alike or not isinstance(self.cache, RaggedCache) or not isinstance(other.cache, RaggedCache):
            return False
        for reader in (self, other):
            reader.drop_nodes()
        self.cache.join(other.cache)
        self.attention.join(other.attention)
        self.begins, self.lengths = self.begins + other.begins, self.lengths + other.lengths
        self.nodes = Nodes(len(self.lengths))
        return True

    def select(self, rows: list[int]) -> None:
        """Go on with some of the rows, in this order."""
        self.drop_nodes()
        self.begins, self.lengths = [self.begins[row] for row in rows], [self.lengths[row] for row in rows]
        self.nodes = Nodes(len(rows))
        if isinstance(self.cache, RaggedCache):
            self.cache.select(rows)
            self.cache.crop_left(self.attention.select(rows))

    def drop_nodes(self) -> None:
        """Forget what was read behind the texts."""
        if self.nodes.columns:
            self.cache.keep([[]] * len(self.lengths), self.nodes.columns)
            self.nodes = Nodes(len(self.lengths))

    def _read(self, rows: list[LongTensor], masks: list[int]) -> Tensor:
        """Logits `(B, K, V')` for what follows each row."""
        if self.windows is None:
            return self._read_compiled(rows, masks)
        if self.cache is not None:
            return self._read_new([ids[length:] for ids, length in zip(rows, self.lengths, strict=True)], masks)
        return self._read_prefixes([ids[begin:] for ids, begin in zip(rows, self.begins, strict=True)], masks)

    def _fed(self, rows: list[LongTensor], masks: list[int], longest: int) -> tuple[LongTensor, LongTensor]:
        """The rows' ids `(B, longest + K - 1)`, padded on the left, with masks behind; and how long each row's padding is."""
        fed = rows[0].new_full((len(rows), longest + len(masks)), self.unknown)
        fed[:, longest:] = fed.new_tensor(masks)
        for index, ids in enumerate(rows):
            fed[index, longest - len(ids) : longest] = ids
        return fed, torch.tensor([longest - len(ids) for ids in rows], device=fed.device)[:, None]

    def _forward(self, ids: LongTensor, mask: Any, positions: LongTensor, count: int, compiled: bool = False) -> Tensor:
        forward = compiled_forward(self.model) if compiled else self.model
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **with_cache(self.model, self.cache.cache)}
        return forward(**inputs, use_cache=True, logits_to_keep=count).logits

    def _read_compiled(self, rows: list[LongTensor], masks: list[int]) -> Tensor:
        """For models that take no explicit masks; logits `(1, K, V')`."""
        if len(rows) > 1:
            raise ValueError(
                f"{type(self.model).__name__} as it is loaded here takes no explicit masks, so it drafts for one prompt at a "
                f"time: call generate once per prompt{or_sdpa(self.model)}."
            )
        self.cache = self.cache or empty_cache(self.model)
        return read_with_masks(self.model, rows[0][None, self.begins[0] :], self.cache, masks, self.unknown)[None]

    def _read_prefixes(self, rows: list[LongTensor], masks: list[int]) -> Tensor:
        """Fill a new cache; logits `(B, K, V')`."""
        length = max(map(len, rows))
        fed, padding = self._fed(rows, masks, length)
        slots = torch.arange(fed.shape[1], device=fed.device)[None]
        seen = slots >= padding
        cache = plain_cache(self.model, self.max_length + 2 * self.compiled_width if self.compiled_width else 0)
        self.cache = RaggedCache(cache, len(rows), length)
        self.attention = TreeAttention(self.windows, seen[:, :length], length - 1 - padding[:, 0], self.model.dtype)
        mask = None if bool(seen.all()) else seen.long()
        logits = self._forward(fed, mask, (slots - padding).clamp(min=0), len(masks) + 1)
        self.cache.keep([[]] * len(rows), len(masks))
        return logits

    def _read_new(self, rows: list[LongTensor], masks: list[int]) -> Tensor:
        """Read what was accepted since; logits `(B, K, V')`."""
        longest = max(map(len, rows))
        compiled = longest <= self.compiled_width
        fed, padding = self._fed(rows, masks, self.compiled_width if compiled else longest)
        size = fed.shape[1]
        make_room(self.cache, size)
        mask, positions = self.attention.inputs(self.cache.lengths, *ragged_rows(padding, size), self.cache.num_slots)
        logits = self._forward(fed, mask, positions, len(masks) + 1, compiled)
        longest = size - len(masks)
        self.cache.keep([list(range(longest - len(ids), longest)) for ids in rows], size)
        return logits
