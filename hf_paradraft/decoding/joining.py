"""Sequences join a batch and leave it between two rounds (Orca, 2022, section 3.1)."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicLayer

from .batch import Batch
from .cache import RaggedCache
from .call import Call
from .checks import beyond_ids
from .group import Group
from .tree_attention import TreeAttention
from .verify import Verifier


def join(batch: Batch, other: Batch) -> None:
    """Append another batch's sequences, whose prompts have been read, to a batch.

    Raises:
        ValueError: one of the two cannot be joined (recurrent targets, static caches, a prompt that
            is not read yet).
    """
    _join_sequences(batch, other)
    for group in other.groups:
        _add_group(batch, group)
    _count(batch)


def read_together(batches: list[Batch]) -> Batch:
    """Join batches whose prompts are unread, and read these prompts in one forward.

    Each prompt's last token is left to the next round.

    Raises:
        ValueError: one of them cannot be joined, as in `join`.
    """
    for batch in batches:
        batch.verifier.reads_prompt = False
    [batch, *others] = batches
    for other in others:
        _join_sequences(batch, other)
    _count(batch)
    verifier, sequences = batch.verifier, batch.sequences
    begins = list(verifier.cache.lengths)
    counts = [
        sequence.length - 1 - begin for sequence, begin in zip(sequences, begins, strict=True)
    ]
    if any(counts):
        verifier.read_on([sequence.ids[0] for sequence in sequences], counts)
    joining = [group for other in others for group in other.groups]
    for group in (*batch.groups, *joining):
        group.show_read(begins, counts)
    for group in joining:  # their drafters have begun
        _add_group(batch, group)
    _count(batch)
    return batch


def leave(batch: Batch) -> list[Call]:
    """Remove sequences that have ended, with their rows of the cache.

    Over recurrent states sequences stay until their call is over.

    Returns:
        The calls that are over.
    """
    going_on = [row for row, sequence in enumerate(batch.sequences) if not sequence.finished]
    if len(going_on) == len(batch.sequences):
        return []
    if going_on:
        cache = batch.verifier.cache
        select_cache(cache, going_on)
        crop_left(cache, select_masks(batch.verifier.attention, going_on))
    for sequence in batch.sequences:
        if sequence.finished:
            sequence.outcome = None
    batch.sequences = [batch.sequences[row] for row in going_on]
    over = [call for call in batch.calls if call.finished]
    batch.calls = [call for call in batch.calls if not call.finished]
    for group in batch.groups:
        _leave_group(group)
    batch.groups = [group for group in batch.groups if group.calls]
    for call in over:
        call.end()
    _count(batch)
    return over


def leave_early(batch: Batch) -> None:
    """Remove ended sequences of the only call, if nothing else depends on its rows."""
    [call], verifier = batch.calls, batch.verifier
    ended = any(sequence.finished for sequence in batch.sequences) and not call.finished
    whole = call.hands_back or call.terms.in_step is not None
    if ended and not whole and verifier.branches and _holds_ids_alone(verifier):
        leave(batch)


def _holds_ids_alone(verifier: Verifier) -> bool:
    """Tell whether rows may come and go: the cache is dynamic, and only ids are by row."""
    return verifier.cache.num_slots is None and not beyond_ids(verifier.model_kwargs)


def _count(batch: Batch) -> None:
    """Tell each sequence its place, and use the budgets learned for this batch size."""
    for place, sequence in enumerate(batch.sequences):
        sequence.place = place
    for group in batch.groups:
        budget = group.budget_for(len(batch.sequences))
        if budget is not group.budget:  # it may rest because of earlier texts
            budget.begin()
        group.builder.budget = budget


def _join_sequences(batch: Batch, other: Batch) -> None:
    """Append another batch's sequences and calls to a batch."""
    for verifier in (batch.verifier, other.verifier):
        if not verifier.branches:
            raise ValueError(
                f"{type(verifier.model).__name__} is served one call at a time, as it is loaded "
                "here."
            )
        if verifier.reads_prompt or not _holds_ids_alone(verifier):
            raise ValueError(
                "Sequences join others after their prompts, in dynamic caches, and with nothing "
                "but ids: this call has to be served by itself."
            )
    join_caches(batch.verifier.cache, other.verifier.cache)
    join_masks(batch.verifier.attention, other.verifier.attention)
    batch.calls += other.calls
    batch.sequences += other.sequences


def _add_group(batch: Batch, joining: Group) -> None:
    """Add a group to a batch: to one of its groups, if the drafter can serve both together."""
    budget = joining.budget_for(1)
    for group in batch.groups:
        if group.budget_for(1) is budget and group.drafting.join(joining.drafting):
            joining.features.stop()
            group.calls += joining.calls
            group.sequences += joining.sequences
            return
    batch.groups.append(joining)


def _leave_group(group: Group) -> None:
    """Remove sequences that have ended; those of one call may stay until it is over."""
    over = any(call.finished for call in group.calls)
    group.calls = [call for call in group.calls if not call.finished]
    going_on = [row for row, sequence in enumerate(group.sequences) if not sequence.finished]
    if len(going_on) == len(group.sequences):
        return
    if going_on:
        try:
            group.drafting.select(going_on)
        except NotImplementedError:  # it guesses for all of a call's sequences, or none
            if over:
                raise
            return
    else:
        group.features.stop()
    group.sequences = [group.sequences[row] for row in going_on]


def join_caches(cache: RaggedCache, other: RaggedCache) -> None:
    """Append the rows of another dynamic cache to a dynamic cache."""
    slots = max(cache.end, other.end)
    for layer, joining in zip(cache.cache.layers, other.cache.layers, strict=True):
        _begin_like(layer, joining, len(cache.lengths))
        _begin_like(joining, layer, len(other.lengths))
    for layer, joining in zip(cache.layers(), other.layers(), strict=True):
        layer.keys, layer.values = (
            torch.cat([pad(states, (0, 0, 0, slots - states.shape[2])) for states in pair])
            for pair in ((layer.keys, joining.keys), (layer.values, joining.values))
        )
    cache.lengths += other.lengths


def _begin_like(layer: Any, other: Any, num_rows: int) -> None:
    """Give a layer that has read nothing empty rows, in the shape of another layer's."""
    if not layer.is_initialized and other.is_initialized:
        layer.lazy_initialization(other.keys, other.values)
        layer.keys, layer.values = (
            states[:1, :, :0].repeat(num_rows, 1, 1, 1) for states in (other.keys, other.values)
        )


def select_cache(cache: RaggedCache, rows: list[int]) -> None:
    """Keep only some of a cache's rows, in this order."""
    written, cache.lengths = cache.end, [cache.lengths[row] for row in rows]
    for layer in cache.layers():
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]
    cache.shrink(written)


def row_of(cache: RaggedCache, row: int, length: int) -> RaggedCache:
    """Copy the first `length` entries of a dynamic cache's row, as a cache of its own."""
    alone = copy.copy(cache.cache)
    alone.layers = [copy.copy(layer) for layer in cache.cache.layers]
    for index, layer in enumerate(alone.layers):
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            alone.layers[index] = plain = DynamicLayer()
            plain.lazy_initialization(layer.keys, layer.values)
            plain.keys, plain.values = (
                states[row : row + 1, :, :length].clone() for states in (layer.keys, layer.values)
            )
    return RaggedCache(alone, 1, length)


def bytes_of(cache: Cache) -> int:
    """Count the bytes of a cache's tensors."""
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [
        tensor
        for value in values
        for tensor in (value.values() if isinstance(value, dict) else [value])
    ]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def crop_left(cache: RaggedCache, count: int) -> None:
    """Drop the first `count` slots of all rows."""
    cache.lengths = [length - count for length in cache.lengths]
    for layer in cache.layers() if count else ():
        layer.keys, layer.values = layer.keys[:, :, count:], layer.values[:, :, count:]


def join_masks(attention: TreeAttention, other: TreeAttention) -> None:
    """Append the rows of another `TreeAttention`."""
    masks = attention.prompt_mask, other.prompt_mask
    width = max(mask.shape[1] for mask in masks)
    attention.prompt_mask = numpy.concatenate(
        [
            numpy.pad(mask, ((0, 0), (0, width - mask.shape[1])), constant_values=True)
            for mask in masks
        ]
    )
    attention.offsets = numpy.concatenate([attention.offsets, other.offsets])


def select_masks(attention: TreeAttention, rows: list[int]) -> int:
    """Keep only some of the rows, in this order.

    Returns:
        The number of columns on the left that were padding for all of them.
    """
    seen = attention.prompt_mask[rows]
    count = int((seen.any(0).cumsum(0) == 0).sum())
    attention.prompt_mask, attention.offsets = seen[:, count:], attention.offsets[rows] + count
    return count
