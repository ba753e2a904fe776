"""The start of a call: small builders check its arguments and make its parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor
from torch.nn.functional import pad
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticSlidingWindowLayer,
    StoppingCriteriaList,
)
from transformers.utils import logging

from ..names import BaseStreamer, attention_of
from ..protocol import Drafter, RoundStreamer, SpeculationStats
from .batch import Batch
from .cache import (
    RaggedCache,
    cache_of_call,
    check_states,
    record_windows,
    recurrent_layers,
    static_cache,
    use_plain_layers,
)
from .call import Call, Terms
from .checks import (
    ALONE,
    ASKED,
    Asked,
    Refused,
    check_lengths,
    context_of,
    left_padding,
    more_than_ids,
    postpone_max_time,
)
from .drafts import DraftBuilder
from .features import Features
from .group import Group
from .sequence import Ends, Sequence, processors_of_sequences
from .tree_attention import TreeAttention, attention_windows, or_sdpa, reads_its_own_way
from .verify import Verifier, extend_to

logger = logging.get_logger(__name__)
MAX_NEW_TOKENS = 2**20  # of a text, whose buffer is allocated at once


def begin_call(model: PreTrainedModel, *args: Any) -> Batch:
    """Prepare a call as a batch of its own, which the caller has to close.

    The call is of a kind that is served (`hf_paradraft.admission`).

    Args:
        model, args: as for `speculative_decoding`, without `synced_gpus`.

    Raises:
        Refused: an argument that the loop cannot serve, or a drafter for another target; the
            message says what to change.
    """
    try:
        return _begin(model, *args)
    except Refused:
        raise
    except ValueError as error:  # nothing has been decoded yet
        raise Refused(*error.args) from error


def _begin(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    terms: Terms,
) -> Batch:
    begun = perf_counter()
    rule, copies = terms.rule, terms.copies
    asked: Asked = getattr(generation_config, ASKED, Asked())
    used, count = drafter, asked.num_assistant_tokens
    # this call's own
    if count not in (None, drafter.speculation_config.num_draft_tokens):
        used = copy.copy(drafter)
        used.speculation_config = replace(drafter.speculation_config, num_draft_tokens=count)
    vocab_size = num_logits(model)
    if copies is not None:
        copies.begin(vocab_size)
    used.attach(model)
    config, (batch_size, begin) = used.speculation_config, input_ids.shape
    ends, criteria = _split_criteria(stopping_criteria, generation_config, begin, batch_size)
    if streamer is not None and not isinstance(streamer, RoundStreamer):
        ends.put = lambda token: streamer.put(torch.tensor([token], device="cpu"))
    buffer = pad(input_ids.long(), (0, ends.limit - begin + 1))
    padding = left_padding(model_kwargs.get("attention_mask"), batch_size)
    features = Features(model, used.needs(model))
    cache = cache_of_call(model_kwargs)
    if (
        asked.callers_cache
        and cache.layers
        and all(type(layer) is StaticSlidingWindowLayer for layer in cache.layers)
    ):
        raise Refused(
            "This static cache holds windows alone, which drafts replace, and does not say how "
            "long it may become: leave cache (past_key_values) unset, or pass a DynamicCache."
        )
    held = terms.read or (0 if recurrent_layers(cache) else int(cache.get_seq_length()))
    check_lengths(model, begin, ends.limit, begin - held, generation_config, model_kwargs)
    processors = processors_of_sequences(logits_processor, batch_size)
    # Here the cache's layers may change.
    verifier = make_verifier(model, input_ids, ends.limit, used, model_kwargs, features, held)
    hands_back = generation_config.return_dict_in_generate or asked.callers_cache
    if criteria and hands_back and batch_size > 1 and verifier.cache.linear:
        raise Refused(
            "A criterion may take tokens back, and a recurrent state cannot: where such a target's "
            "cache is handed back, call generate once per prompt."
        )
    # Tokens that the cache already held have no features, and those before the window are not
    # shown. A drafter that knows the former goes on from them.
    first = held if terms.read else max(held, begin - (config.draft_window or begin))
    sequences = [
        Sequence(
            buffer[row : row + 1],
            processors[row],
            begin,
            padding[row],
            observed=max(0, first - padding[row]),
            context=context_of(model),
            lookup=copies.for_sequence() if copies is not None and rule.draws is None else None,
        )
        for row in range(batch_size)
    ]
    _warn_of_limits(
        model,
        used,
        verifier,
        ends.limit - max(padding),
        bool(features.keys) and held > terms.read,
    )
    deepest = 0 if copies is None else copies.deepest
    automatic = config.tree_size == "auto" and verifier.branches and rule.draws is None
    budget_for = partial(
        terms.budget_of,
        drafter,
        automatic or (config.never_slower and rule.rests),
        max(config.num_draft_tokens, deepest if config.tree_size is not None else 0),
        verifier.row_counts,
        (config.num_draft_tokens, config.tree_size, deepest, type(rule), config.never_slower),
    )
    budget = budget_for(batch_size)
    budget.begin()
    drafting = used.start_drafting(model, ends.limit)
    postpone_max_time(stopping_criteria, perf_counter() - begun)
    call = Call(
        buffer=buffer,
        sequences=sequences,
        drafter=drafter,
        config=config,
        terms=terms,
        only_argmax=rule.only_argmax and not logits_processor,
        ends=ends,
        criteria=criteria,
        generation_config=generation_config,
        streamer=streamer,
        stats=SpeculationStats(
            by_row=[SpeculationStats() for _ in sequences] if batch_size > 1 else []
        ),
        # the first forward may read images or embeddings, which a drafter cannot
        drafts_first=not more_than_ids(model_kwargs),
        hands_back=hands_back,
        begin=begin,
    )
    builder = DraftBuilder(config, rule, budget, vocab_size, type(drafter).__name__)
    rule.begin(call, vocab_size, terms.generator)
    return Batch(call, Group(call, drafting, builder, features, budget_for), verifier)


def num_logits(model: PreTrainedModel) -> int:
    """Count the logits of a target's head, which may have fewer than its config says."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    config = model.config.get_text_config()
    ordinary = (
        isinstance(weight, torch.Tensor)
        and weight.ndim == 2
        and weight.shape[1] == getattr(config, "hidden_size", None)
    )
    return len(weight) if ordinary and weight.is_floating_point() else config.vocab_size


def _split_criteria(
    stopping_criteria: Iterable, generation_config: GenerationConfig, begin: int, batch_size: int
) -> tuple[Ends, StoppingCriteriaList]:
    """Split stopping criteria into the ends of each sequence, and those of the whole batch."""
    # A length criterion of the caller's replaces max_length, as in plain decoding, which also gives
    # at least one token.
    lengths = [stop.max_length for stop in stopping_criteria if type(stop) is MaxLengthCriteria]
    wanted = int(max(begin + 1, min(lengths, default=generation_config.max_length)))
    if wanted > (limit := min(wanted, begin + MAX_NEW_TOKENS)):
        logger.warning_once(
            f"A text may have {MAX_NEW_TOKENS} new tokens with a drafter; max_length={wanted} is "
            "taken for that."
        )
    tokens = {
        token
        for stop in stopping_criteria
        if type(stop) is EosTokenCriteria
        for token in stop.eos_token_id.tolist()
    }
    others = [
        stop
        for stop in stopping_criteria
        if type(stop) not in (EosTokenCriteria, MaxLengthCriteria)
    ]
    # the condition of plain decoding
    pads = any(hasattr(stop, "eos_token_id") for stop in stopping_criteria)
    alone = [stop for stop in others if batch_size == 1 or (pads and type(stop) in ALONE)]
    keeps = generation_config.return_dict_in_generate
    kept = keeps and generation_config.output_scores, keeps and generation_config.output_logits
    together = [stop for stop in others if stop not in alone]
    return Ends(limit, tokens, StoppingCriteriaList(alone), pads, *kept), StoppingCriteriaList(
        together
    )


def _warn_of_limits(
    model: PreTrainedModel,
    drafter: Drafter,
    verifier: Verifier,
    limit: int,
    lacks_features: bool,
) -> None:
    """Warn once of positions, features or trees that the call will lack."""
    if limit > (context := context_of(model)):
        logger.warning_once(
            f"This call may reach {limit} tokens, and {type(model).__name__} has positions for "
            f"{context}: beyond them nothing is drafted."
        )
    if lacks_features:
        logger.warning_once(
            f"{type(drafter).__name__} reads the target's hidden states, and those of the tokens "
            "that the cache came with are not known: it drafts without them, and fewer of its "
            "guesses will be right."
        )
    if drafter.speculation_config.tree_size is not None and not verifier.branches:
        logger.warning_once(
            f"{type(model).__name__} cannot verify trees as it is loaded here: drafting chains."
        )


def make_verifier(
    model: PreTrainedModel,
    input_ids: LongTensor,
    limit: int,
    drafter: Drafter,
    model_kwargs: dict[str, Any],
    features: Features,
    held: int,
) -> Verifier:
    """Make the verifier of a call, with trees and batches where it can serve them.

    Model, cache and inputs decide that.

    Args:
        model: the target.
        input_ids: int64 `(B, n)`, the prompts.
        limit: the most tokens of a text.
        drafter: the drafter, which says how many query rows a round may have.
        model_kwargs: this call's inputs, with the cache, which may be changed.
        features: the hidden states that the drafter reads.
        held: the number of tokens that the cache holds.

    Raises:
        ValueError: the cache cannot roll back, or a batch is asked for where only one sequence can
            be served.
    """
    config, (batch_size, begin) = drafter.speculation_config, input_ids.shape
    most_rows = max(config.max_nodes, drafter.max_rows)
    cache = cache_of_call(model_kwargs)
    recurrent = bool(recurrent_layers(cache))
    windows = None if reads_its_own_way(model) else attention_windows(model, recurrent)
    num_slots = limit + 2 + most_rows
    per_token = extend_to(limit + 1, model_kwargs)
    explicit = (
        windows is not None
        and per_token.keys() <= {"attention_mask", "position_ids"}
        and all(tensor.ndim == 2 for tensor in per_token.values())
    )
    explicit = explicit and not (recurrent and batch_size == 1)
    if recurrent and not held:
        check_states(cache)
    if recurrent and not explicit and batch_size > 1:
        raise Refused(
            f"{type(model).__name__} is served one prompt at a time with a drafter, for its "
            "layers' sake."
        )
    if config.compile and explicit and not recurrent and cache.get_seq_length() == 0:
        cache.layers = static_cache(
            model, num_slots
        ).layers  # in the caller's own object, if it is one
    explicit = explicit and (recurrent or use_plain_layers(cache, num_slots))
    if not explicit and (batch_size > 1 or (cache.is_compileable and not recurrent)):
        raise Refused(
            f"{type(model).__name__} with {attention_of(model)} attention and these inputs can be "
            "served one prompt at a time and with a dynamic cache only: call generate once per "
            f"prompt, without cache_implementation{or_sdpa(model)}."
        )
    rows = RaggedCache(cache, batch_size, held)
    if not explicit:
        record_windows(cache)
        return Verifier(model, model_kwargs, per_token, rows, begin, None, features)
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    positions = (
        per_token["position_ids"][:, begin - 1]
        if "position_ids" in per_token
        else mask.long().sum(1) - 1
    )
    attention = TreeAttention(
        windows, mask, positions.expand(batch_size), model.dtype, input_ids.device
    )
    row_counts = None
    if config.compile and cache.is_compileable:  # a forward is compiled for each of these
        smaller = [1, 17, 33] if config.tree_size == "auto" and most_rows > 32 else [1]
        row_counts = [*smaller, 1 + most_rows]
    return Verifier(model, model_kwargs, per_token, rows, begin, attention, features, row_counts)
