"""Continuous batching: the next prompts take the places of sequences that have ended (Orca, 2022,
section 3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicLayer, PreTrainedModel

from .admission import admit
from .copies import PromptLookup
from .decoding.batch import Batch
from .decoding.begin import begin_call
from .decoding.cache import cache_of_call
from .decoding.joining import join, leave
from .decoding.loop import step
from .decoding.sequence import Sequence
from .decoding.tree_attention import attention_windows, reads_its_own_way
from .protocol import Drafter, Drafting, GuessedTokens, Prefix, SpeculationConfig

FREE = 0.25  # free share of a batch before prompts are read: joining copies the cache
ROOM = 64  # further tokens that have room whenever a cache is copied


class RoomyLayer(DynamicLayer):
    """A cache layer with room after its entries, so that a round writes only its own.

    The layer of transformers copies all keys and values in every forward.

    Args:
        layer: the layer whose entries it takes over.
    """

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.keys, layer.values
        self.rooms = layer.keys, layer.values  # keys and values are their first entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Implement `DynamicLayer.update`."""
        begin = self.keys.shape[2]
        end, new = begin + key_states.shape[2], (key_states, value_states)
        old = (self.keys, self.values)
        room, _ = self.rooms
        if room.data_ptr() != self.keys.data_ptr() or end > room.shape[2]:
            self.rooms = tuple(pad(states, (0, 0, 0, end - begin + ROOM)) for states in old)
        for room, states in zip(self.rooms, new, strict=True):
            room[:, :, begin:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
        return self.keys, self.values


class NoDrafter(Drafter, Drafting):
    """A drafter that guesses nothing, so that every round decodes plainly."""

    def __init__(self) -> None:
        self.speculation_config = SpeculationConfig(1, tree_size=None, never_slower=False)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Return an empty guess for each sequence."""
        return [GuessedTokens(prefix.ids[0, :0]) for prefix in prefixes]


def can_join(target: PreTrainedModel, drafter: Drafter | None = None) -> bool:
    """Tell whether a target's sequences may join a batch and leave it between rounds.

    They may where the target takes masks and positions as they are given, one position a token, and
    has no beams, and neither it nor the drafter wants a static cache.
    """
    options, text = target.generation_config, target.config.get_text_config()
    compiled = drafter is not None and drafter.speculation_config.compile
    dynamic = options.cache_implementation in (None, "dynamic") and not compiled
    takes_masks = attention_windows(target) is not None and not reads_its_own_way(target)
    one_position = "mrope_section" not in str(getattr(text, "rope_parameters", ""))
    return takes_masks and one_position and options.num_beams in (None, 1) and dynamic


@dataclass
class Known:
    """A prompt's beginning that was read before.

    Attributes:
        layers: the layers of the target's cache, which hold only this beginning.
        read: the number of tokens that they hold, fewer than the prompt has.
        drafting: the drafter's state after them (`Drafting.fork`); None: the drafter starts anew.
    """

    layers: list[Any]
    read: int
    drafting: Drafting | None = None


def begin(
    target: PreTrainedModel,
    input_ids: LongTensor,
    drafter: Drafter,
    generator: torch.Generator | None = None,
    known: Known | None = None,
    copies: PromptLookup | None = None,
    **options: Any,
) -> Batch:
    """Prepare a call of `generate` up to its first round, as transformers prepares it.

    Args:
        target: the target.
        input_ids: int64 `(B, n)`, as for `generate`.
        drafter: the drafter.
        generator: the generator of only this call's draws; None: torch's.
        known: the only prompt's beginning, from an earlier call; None: all of it is read.
        copies: the finder of tokens to copy, instead of the drafter's own.
        options: further arguments for `generate`.
    """
    batches: list[Batch] = []

    def keep(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        **model_kwargs,
    ):
        own = logits_processor, stopping_criteria, generation_config
        terms = admit(model, input_ids, *own, drafter, None, synced_gpus)
        terms = replace(terms, generator=generator, copies=copies or terms.copies)
        if known is not None:
            cache_of_call(model_kwargs).layers = known.layers
            terms = replace(terms, read=known.read)
        batches.append(begin_call(model, input_ids, *own, drafter, None, model_kwargs, terms))
        return input_ids

    target.generate(input_ids, custom_generate=keep, **options)
    [batch] = batches
    if known is not None and known.drafting is not None:
        batch.groups[0].drafting, batch.sequences[0].asked = known.drafting, known.read + 1
    return batch


@torch.no_grad()
def continuous_batching(
    target: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
    num_slots: int | None = None,
    drafter: Drafter | None = None,
    **options: Any,
) -> Iterator[tuple[int, list[int]]]:
    """Yield each prompt's number and new tokens, in the order in which they end.

    The tokens are greedy, as those of `generate`.

    Args:
        target: a target for which `can_join` holds.
        prompts: the prompts' ids; neighbours of similar length are fastest.
        max_new_tokens: the most new tokens of each.
        batch_size: the most sequences that are decoded together.
        num_slots: the most tokens that the cache may hold; one sequence is always decoded.
        drafter: a drafter for speed; the tokens stay the target's.
        options: further arguments for `generate`.

    Yields:
        The prompt's number, and its new tokens, the end token included.
    """
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0, **options}
    waiting = deque(enumerate(prompts))
    batch: Batch | None = None
    joining: Batch | None = None
    open_: list[tuple[int, Sequence]] = []  # with the numbers of their prompts
    try:
        while waiting or open_:
            group: list[tuple[int, list[int]]] = []
            longest = max((sequence.ids.shape[1] for _, sequence in open_), default=0)
            while (
                waiting
                and (group or len(open_) <= (1 - FREE) * batch_size)
                and len(open_) + len(group) < batch_size
            ):
                longest = max(longest, len(waiting[0][1]) + max_new_tokens)
                count = len(open_) + len(group)
                if count and num_slots is not None and (count + 1) * longest > num_slots:
                    break
                group.append(waiting.popleft())
            if group:
                texts = [torch.tensor(prompt, device=target.device) for _, prompt in group]
                ids = pad_sequence(texts, True, options["pad_token_id"] or 0, "left")
                mask = pad_sequence([torch.ones_like(text) for text in texts], True, 0, "left")
                joining = begin(target, ids, drafter or NoDrafter(), attention_mask=mask, **options)
                open_ += [
                    (number, sequence)
                    for (number, _), sequence in zip(group, joining.sequences, strict=True)
                ]
                step(joining)  # reads the prompts
                if batch is not None:
                    leave(batch)
                batch, joining = together(batch, joining), None
            elif batch is not None:
                step(batch)
            going_on = []
            for number, sequence in open_:
                call = sequence.call
                # criteria judge a call's sequences together, and may cut one that has ended
                if sequence.finished and (not call.criteria or call.judged >= sequence.length):
                    yield number, sequence.ids[0, call.begin : sequence.length].tolist()
                else:
                    going_on.append((number, sequence))
            open_ = going_on
    finally:
        for left in (batch, joining):  # also after an exception
            if left is not None:
                left.close()


def together(batch: Batch | None, joining: Batch) -> Batch:
    """Join sequences whose prompts have been read to a batch, or make a batch of them."""
    if batch is not None and batch.sequences:
        join(batch, joining)
        return batch
    cache = joining.verifier.cache.cache
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            cache.layers[index] = RoomyLayer(layer)
    return joining
