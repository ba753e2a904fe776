"""The round: draft, verify, accept, roll back. Every method runs through here."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..names import OUTPUT_CACHE, BaseStreamer, GenerateDecoderOnlyOutput, decodes
from ..protocol import Drafter, SpeculationStats
from .batch import Batch
from .begin import begin_call
from .call import Call, Terms, by_step
from .tree_attention import without_cudnn_attention
from .verify import Verifier


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of `generate` as a mapping, with statistics under `speculation`.

    Calls with `return_dict_in_generate=True` return it.
    """

    speculation: SpeculationStats | None = None


@torch.no_grad()
@without_cudnn_attention()
def step(batch: Batch) -> None:
    """Run one round of all sequences in a batch.

    Between two rounds, other sequences may join, and ended ones may leave.

    After an exception (in a processor or a criterion, or Ctrl-C), the cache holds the tokens that
    plain decoding would have read by then.
    """
    # 1. draft
    begun = perf_counter()
    for group in batch.groups:
        group.draft(batch.verifier)
    drafted = perf_counter()

    # 2. verify
    logits, choices = batch.verify()
    verified = perf_counter()

    # 3. accept
    try:
        batch.accept(logits, choices)

    # 4. roll back
    finally:
        batch.roll_back()
    batch.observe(logits, begun, drafted - begun, verified - drafted)


@torch.no_grad()
@without_cudnn_attention()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    terms: Terms | None = None,
    **model_kwargs: Any,
) -> SpeculativeOutput | LongTensor:
    """Decode with `model`, several tokens per forward where `drafter` guesses well.

    The output is the target's own, except with `acceptance='typical'`.

    It serves the calls that `hf_paradraft.admission` admits. Call it through `model.generate(...,
    assistant_model=drafter)` or `model.generate(..., custom_generate=speculative_decoding,
    drafter=drafter)`, which prepare every argument.

    Args:
        model: the target, decoder-only, with a dynamic or static cache.
        input_ids: int64 `(B, n)`, padded on the left.
        logits_processor: the logits processors, run as in plain decoding, once per emitted token,
            a sequence at a time.
        stopping_criteria: the criteria, asked after every emitted token, as in plain decoding.
        generation_config: this call's generation config.
        drafter: the drafter, which guesses; see `Drafter`.
        streamer: the receiver of tokens as they are accepted, one by one, or of rounds
            (`RoundStreamer`); for one sequence.
        synced_gpus: False in every call that is served.
        terms: the terms on which the call is served, made by `hf_paradraft.admission`; None: greedy
            decoding by itself.
        model_kwargs: inputs for the target's forward.

    Returns:
        Ids `(B, n + new)`, shorter sequences padded, or a `SpeculativeOutput` if
        `generation_config.return_dict_in_generate`.

    Raises:
        ValueError: an argument that this loop cannot serve; the message says what to change.
    """
    started = perf_counter()
    own = logits_processor, stopping_criteria, generation_config
    batch = begin_call(model, input_ids, *own, drafter, streamer, model_kwargs, terms or Terms())
    [call] = batch.calls
    with batch:
        while batch.read_piece():
            pass
        step(batch)
        with decodes(model):
            while not call.finished:
                step(batch)
                call.terms.leave(batch)
    return output(call, batch.verifier, started)


def output(call: Call, verifier: Verifier, started: float) -> SpeculativeOutput | LongTensor:
    """Build the output of a finished call and store its statistics on the drafter.

    Args:
        call: the finished call.
        verifier: the verifier of its batch.
        started: its start time.
    """
    call.finish(verifier)
    if call.streamer is not None:
        call.streamer.end()
    call.stats.total_seconds = perf_counter() - started
    call.drafter.last_stats = call.stats
    for row, sequence in enumerate(call.sequences):
        if call.criteria:
            call.stats.take_back(row, sequence.length - call.begin)
        text = sequence.ids[0, sequence.padding : sequence.length]
        if call.terms.copies is not None:
            call.terms.copies.remember(text)
        if call.drafter.listener is not None:
            call.drafter.listener(text, call.begin - sequence.padding)
    ids = call.padded(call.longest)
    if not call.generation_config.return_dict_in_generate:
        return ids
    scores = [sequence.scores for sequence in call.sequences]
    logits = [sequence.logits for sequence in call.sequences]
    return SpeculativeOutput(
        sequences=ids,
        scores=by_step(scores, max(map(len, scores))),
        logits=by_step(logits, max(map(len, logits))),
        **{OUTPUT_CACHE: verifier.cache.cache},
        speculation=call.stats,
    )
