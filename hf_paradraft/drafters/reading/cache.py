"""A drafter's own cache: every layer keeps every token, and after the text stand guessed tokens,
each seeing its path.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache, PreTrainedModel, StaticLayer
from transformers.utils import logging

from ...decoding.cache import (
    SLOTS,
    RaggedCache,
    replace_layers,
    static_cache,
    use_plain_layers,
)
from ...decoding.compiled import compiled_on
from ...protocol import GuessedLogits, Prefix
from ...protocol.drafter import FeatureKey

logger = logging.get_logger(__name__)


def plain_cache(model: PreTrainedModel, num_slots: int = 0) -> Cache:
    """Make an empty cache for a drafter whose layers all keep every token.

    It is a static one where `num_slots` are asked for.
    """
    if num_slots:
        return static_cache(model, num_slots)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    use_plain_layers(cache, 0)
    return cache


def make_room(cache: RaggedCache, count: int) -> None:
    """Make room for `count` entries after the longest row's end in a static cache.

    Longer layers take the place of its own if they have to. Other caches stay as they are.
    """
    if cache.num_slots is None or cache.end + count <= (old_slots := cache.num_slots):
        return
    num_slots = -(-(cache.end + count) // SLOTS) * SLOTS
    old = cache.cache.layers
    replace_layers(cache.cache, partial(StaticLayer, num_slots))
    for layer, longer in zip(old, cache.cache.layers, strict=True):
        if longer is not layer and layer.is_initialized:
            longer.lazy_initialization(layer.keys, layer.values)
            longer.keys[:, :, :old_slots], longer.values[:, :, :old_slots] = (
                layer.keys,
                layer.values,
            )
            longer.cumulative_length.copy_(layer.cumulative_length)


def compiled_method(method: Any, compiled: bool) -> Any:
    """Compile a drafter's method as the target's forward is, if `compiled`.

    The method's first argument is a tensor. Its output is copied.
    """
    if not compiled:
        return method

    def forward(*inputs: Any) -> Any:
        outputs = compiled_on(inputs[0].device.type, method.__func__)(method.__self__, *inputs)
        return tree_map_only(Tensor, Tensor.clone, outputs)

    return forward


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


def newer_halves(
    rows: list[LongTensor],
    starts: list[int],
    count: int,
    prefixes: list[Prefix],
    context: int | None,
) -> tuple[int, list[int]]:
    """Move the starts of texts on once positions run out, and limit the guesses.

    A text that is too long is read from its newer half on, and no more tokens are guessed than
    there are positions for.

    Args:
        rows: the texts, int64 `(n,)` each.
        starts: the first token of each that is read so far.
        count: distances that are wanted, K.
        prefixes: those of the rows, with the room that is wanted after each.
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
        f"The text is longer than the {context} tokens that the drafter has positions for: it "
        "reads the newer half of them alone, and fewer of its guesses may be right."
    )
    return count, [
        max(start, len(ids) - context // 2) for ids, start in zip(rows, starts, strict=True)
    ]


def side_by_side(
    features: Mapping[FeatureKey, Tensor], keys: Iterable[FeatureKey], model: PreTrainedModel
) -> Tensor:
    """Put features by these keys side by side, `(…, width)`, as `model` reads them."""
    return torch.cat([features[key].to(model.device, model.dtype) for key in keys], dim=-1)
