"""The round: draft, verify, accept, roll back. Every method runs through here."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..protocol import Drafter, RoundTrace, SpeculationStats
from .cache import cache_of_call
from .rows import collect, take
from .setup import begin_call


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`; `speculation` says what happened."""

    speculation: SpeculationStats | None = None


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> SpeculativeOutput | LongTensor:
    """Decode with `model`, several tokens per forward where `drafter` guesses well; the output is the target's own.

    Call it through `model.generate(..., assistant_model=drafter)` or
    `model.generate(..., custom_generate=speculative_decoding, drafter=drafter)`, which prepare every argument.

    Args:
        model: the target, decoder-only, with a dynamic or static cache.
        input_ids: int64 `(B, n)`, padded on the left.
        logits_processor: run as in plain decoding, once per emitted token, a row at a time.
        stopping_criteria: asked after every emitted token, a row at a time.
        generation_config: of this call.
        drafter: guesses; see `Drafter`.
        streamer: gets each round's tokens as they are accepted; for one row.
        synced_gpus: must be False.
        model_kwargs: for the target's forward.

    Returns:
        Ids `(B, n + new)`, shorter rows padded, or a `SpeculativeOutput` if `generation_config.return_dict_in_generate`.

    Raises:
        ValueError: an argument that this loop cannot serve; the message says what to change.
    """
    started = perf_counter()
    call = begin_call(
        model, input_ids, logits_processor, stopping_criteria, generation_config, drafter, streamer, synced_gpus, model_kwargs
    )
    stats, rows, waits = call.stats, call.rows, model.device.type == "cuda" and not call.only_argmax
    with call.features, call.lane:
        call.read_prompt(generation_config.prefill_chunk_size)
        while not all(row.finished for row in rows):
            # 1. draft
            begun = perf_counter()
            prefixes = call.prefixes()
            drafts = call.draft(prefixes)
            draft_seconds = perf_counter() - begun

            # 2. verify
            with call.beside(prefixes, drafts):
                clock = perf_counter()
                logits = call.verifier.verify(call.buffer, call.lengths, drafts)
                choices = logits.argmax(-1).tolist() if call.only_argmax else [None] * len(rows)
                if waits:
                    torch.cuda.synchronize(model.device)  # or its time would be counted elsewhere
                verify_seconds = perf_counter() - clock

            # 3. accept
            taken = [
                None if row.finished else take(row, draft, own, call.rule, best, call.ends)
                for row, draft, own, best in zip(rows, drafts, logits, choices, strict=True)
            ]

            call.settle(drafts, taken)
            hidden_seconds = 0.0 if call.overlap is None else call.overlap.hidden
            draft_seconds += 0.0 if call.overlap is None else call.overlap.waited
            stats.hidden_seconds += hidden_seconds

            # 4. roll back, tell everyone
            call.verifier.keep([None if one is None else one.kept for one in taken])
            call.drafting.observe([call.observation(i, one, drafts[i], logits) for i, one in enumerate(taken)])
            seconds = perf_counter() - begun
            call.observe(prefixes, drafts, taken, (draft_seconds, verify_seconds, seconds))
            stats.add_round(draft_seconds, verify_seconds)
            for index, (row, draft, one) in enumerate(zip(rows, drafts, taken, strict=True)):
                if one is None:
                    continue
                emitted = row.ids[0, one.begin : row.length]
                counts = len(draft), len(emitted), len(one.path), one.judged
                stats.add_row(*counts)
                for own_stats in stats.by_row[index : index + 1]:
                    own_stats.add_round(0, 0)
                    own_stats.add_row(*counts)
                if call.config.trace:
                    times = draft_seconds, verify_seconds, seconds, hidden_seconds
                    stats.trace.append(RoundTrace(index, draft.token_ids, draft.parents, one.path, emitted.tolist(), *times))
                if streamer is not None:
                    streamer.put(emitted[None].cpu())
            call.first = False
    if streamer is not None:
        streamer.end()
    stats.total_seconds = perf_counter() - started
    drafter.last_stats = stats
    sequences, scores, raw = collect(rows, call.buffer, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, scores=scores, logits=raw, past_key_values=cache_of_call(model_kwargs), speculation=stats
    )
