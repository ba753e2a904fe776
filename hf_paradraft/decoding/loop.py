"""The round: draft, verify, accept, roll back. Every method runs through here."""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .accept import RULES, accept, greedy
from .cache import cache_of_call
from .checks import check_call, check_lengths, left_padding
from .cost import round_cost
from .draft import Draft, Drafter, Prefix
from .pace import Pace
from .rows import Row, collect, processors_of_rows
from .serve import make_verifier
from .stats import RoundTrace, SpeculationStats

logger = logging.get_logger(__name__)


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
    rule_name = check_call(model, input_ids, generation_config, logits_processor, drafter, streamer, synced_gpus)
    rule, sampled = RULES[rule_name], rule_name == "rejection"
    only_argmax = rule is greedy and not logits_processor
    vocab_size = model.config.get_text_config().vocab_size
    batch_size, begin = input_ids.shape
    lengths = [stop.max_length for stop in stopping_criteria if type(stop) is MaxLengthCriteria]
    # An own length criterion replaces max_length, as in plain decoding, which too gives one token at least.
    limit = max(begin + 1, min(lengths, default=generation_config.max_length))
    config = drafter.speculation_config

    buffer = torch.cat([input_ids, input_ids.new_zeros((batch_size, limit - begin + 1))], dim=1)
    padding = left_padding(model_kwargs.get("attention_mask"), batch_size)
    verifier = make_verifier(model, input_ids, limit, config, model_kwargs)
    check_lengths(model, begin, limit, verifier.unread, generation_config, model_kwargs)
    drafting = drafter.start_drafting(limit)
    ends, slow_criteria = _split(stopping_criteria)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or limit + max(padding)
    keeps = generation_config.return_dict_in_generate
    rows = [Row(processors, begin) for processors in processors_of_rows(logits_processor, batch_size)]
    stats = SpeculationStats(by_row=[SpeculationStats() for _ in rows] if batch_size > 1 else [])
    # The first forward may read images or embeddings, which a drafter cannot.
    chain = config.tree_size is None or not verifier.branches
    if chain and config.tree_size is not None:
        logger.warning_once(f"{type(model).__name__} cannot verify trees as it is loaded here: drafting chains.")
    cost = round_cost(model, batch_size) if config.tree_size == "auto" and not chain else None
    adaptive = config.never_slower and rule_name in ("greedy", "sample_match")
    pace = Pace(config.num_draft_tokens, chain, cost, adaptive)
    more = ("pixel", "inputs_embeds", "mm_encoder_outputs", "input_features")
    first, reads_more_than_ids = True, any(v is not None and any(part in k for part in more) for k, v in model_kwargs.items())
    while not all(row.finished for row in rows):
        # 1. draft
        clock = begun = perf_counter()
        depth = pace.depth() if verifier.may_draft and not (first and reads_more_than_ids) else 0
        prefixes = []
        for index, row in enumerate(rows):
            room = min(depth, limit - row.length - 1, context - row.length + padding[index])
            room = 0 if row.finished else max(room, 0)
            ids = buffer[index : index + 1, padding[index] : row.length]
            branches = verifier.branches and not first
            prefixes.append(Prefix(ids, room, row.logits_processor, sampled, vocab_size, branches, pace))
        drafts = [Draft.chain(input_ids[0, :0])] * batch_size
        if any(prefix.room for prefix in prefixes):
            drafts = drafting.propose(prefixes)
        draft_seconds = perf_counter() - clock

        # 2. verify
        clock = perf_counter()
        logits, outputs = verifier.verify(buffer, [row.length for row in rows], drafts)
        choices = logits.argmax(-1).tolist() if only_argmax else [None] * batch_size
        if model.device.type == "cuda" and not only_argmax:
            torch.cuda.synchronize(model.device)  # or its time would be counted elsewhere
        verify_seconds = perf_counter() - clock

        # 3. accept
        begins = [row.length for row in rows]
        paths: list[list[int] | None] = [None] * batch_size
        kept: list[list[int] | None] = [None] * batch_size
        for index, row in enumerate(rows):
            if row.finished:
                continue
            draft, path, known, judged = drafts[index], [], row.length, 0
            own = buffer[index : index + 1]
            for emitted in accept(draft, logits[index], own, known, row.logits_processor, rule, choices[index]):
                judged += bool(draft.children(path[-1] if path else -1))
                if emitted.node is not None:
                    path.append(emitted.node)
                row.add(emitted, keeps and generation_config.output_scores, keeps and generation_config.output_logits)
                row.finished = row.length >= limit or emitted.token in ends
                if slow_criteria:
                    stop = slow_criteria(own[:, : row.length], tuple(row.scores) or None)
                    row.finished = bool(stop.all()) or row.finished
                if row.finished:
                    break
            new = row.length - known
            paths[index], kept[index] = path, path[: new - 1]
            stats.add_row(len(draft), new, len(path), judged)
            for own_stats in stats.by_row[index : index + 1]:
                own_stats.add_round(0, 0)
                own_stats.add_row(len(draft), new, len(path), judged)
            if streamer is not None:
                streamer.put(buffer[0, known : row.length][None].cpu())

        # 4. roll back, tell everyone
        verifier.keep(kept)
        drafting.observe(outputs, paths)
        stats.add_round(draft_seconds, verify_seconds)
        seconds = perf_counter() - begun
        pace.observe(drafts, paths, draft_seconds, verify_seconds, seconds)
        if config.trace:
            times = draft_seconds, verify_seconds, seconds
            stats.trace += [
                RoundTrace(index, draft.token_ids, draft.parents, path, buffer[index, known : row.length].tolist(), *times)
                for index, (draft, path, known, row) in enumerate(zip(drafts, paths, begins, rows, strict=True))
                if path is not None
            ]
        first = False
    if streamer is not None:
        streamer.end()
    stats.total_seconds = perf_counter() - started
    drafter.last_stats = stats
    sequences, scores, raw = collect(rows, buffer, generation_config)
    if not keeps:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, scores=scores, logits=raw, past_key_values=cache_of_call(model_kwargs), speculation=stats
    )


def _split(stopping_criteria: Iterable) -> tuple[set[int], StoppingCriteriaList]:
    """End-of-text ids, which the loop looks up itself, and all other criteria but the length, which it knows."""
    ends = {token for stop in stopping_criteria if type(stop) is EosTokenCriteria for token in stop.eos_token_id.tolist()}
    rest = [stop for stop in stopping_criteria if type(stop) not in (EosTokenCriteria, MaxLengthCriteria)]
    return ends, StoppingCriteriaList(rest)
