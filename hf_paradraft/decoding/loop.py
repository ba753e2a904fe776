"""The round: draft, verify, accept, roll back. Every method runs through here."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .accept import RULES, accept
from .cache import keep_path, keeps_branches, recording_cache
from .checks import check_call, check_lengths, left_padding
from .draft import Draft, Drafter, Prefix
from .stats import SpeculationStats
from .verify import extend_to, supports_branches, verify


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
        model: the target, decoder-only, with a dynamic cache.
        input_ids: int64 `(1, n)`.
        logits_processor: run as in plain decoding, once per emitted token.
        stopping_criteria: asked after every emitted token.
        generation_config: of this call.
        drafter: guesses; see `Drafter`.
        streamer: gets each round's tokens as they are accepted.
        synced_gpus: must be False.
        model_kwargs: for the target's forward.

    Returns:
        Ids `(1, n + new)`, or a `SpeculativeOutput` if `generation_config.return_dict_in_generate`.

    Raises:
        ValueError: an argument that this loop cannot serve; the message says what to change.
    """
    started = perf_counter()
    rule_name = check_call(model, input_ids, generation_config, drafter, synced_gpus)
    rule, sampled = RULES[rule_name], rule_name == "rejection"
    vocab_size = model.config.get_text_config().vocab_size
    cache = recording_cache(model_kwargs)
    drafting, stats = drafter.start_drafting(), SpeculationStats()
    begin, keeps = input_ids.shape[1], generation_config.return_dict_in_generate
    lengths = [stop.max_length for stop in stopping_criteria if type(stop) is MaxLengthCriteria]
    # An own length criterion replaces max_length, as in plain decoding, which too gives one token at least.
    limit = max(begin + 1, min(lengths, default=generation_config.max_length))
    num_draft_tokens = drafter.speculation_config.num_draft_tokens

    buffer = torch.cat([input_ids, input_ids.new_zeros((1, limit - begin + 1))], dim=1)
    per_token = extend_to(limit + 1, model_kwargs)
    padding = left_padding(model_kwargs.get("attention_mask"))
    branches = supports_branches(model, per_token)
    ends, slow_criteria = _split(stopping_criteria)
    scores, logits = (), ()
    length, unread, finished = begin, begin - cache.get_seq_length(), False
    check_lengths(model, begin, limit, unread, generation_config, model_kwargs)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or limit + padding
    reads_more_than_ids = any(
        value is not None for name, value in model_kwargs.items() if name == "inputs_embeds" or "pixel" in name
    )
    while not finished:
        prefix = buffer[:, :length]
        # 1. draft
        clock = perf_counter()
        first = length == begin
        room = 0 if first and reads_more_than_ids else min(num_draft_tokens, limit - length - 1, context - length + padding)
        draft = Draft.chain(prefix[0, :0])
        if room > 0:
            may_branch = branches and not first and keeps_branches(cache)
            draft = drafting.propose(Prefix(prefix[:, padding:], room, logits_processor, sampled, may_branch, vocab_size))
        stats.draft_seconds += perf_counter() - clock

        # 2. verify
        clock = perf_counter()
        num_new = None if first and unread == begin else unread + len(draft)
        rows, outputs = verify(model, prefix, draft, num_new, first, model_kwargs, per_token)
        stats.verify_seconds += perf_counter() - clock

        # 3. accept
        new, path, judged = [], [], 0
        for emitted in accept(draft, rows, buffer, length, logits_processor, rule):
            new.append(emitted.token)
            judged += bool(draft.children(path[-1] if path else -1))
            if emitted.node is not None:
                path.append(emitted.node)
            if keeps and generation_config.output_scores:
                scores += (emitted.scores.float(),)
            if keeps and generation_config.output_logits:
                logits += (emitted.logits.float(),)
            now = length + len(new)
            finished = now >= limit or emitted.token in ends
            if slow_criteria:
                finished = bool(slow_criteria(buffer[:, :now], scores or None).all()) or finished
            if finished:
                break

        # 4. roll back, tell everyone
        keep_path(cache, draft, path[: len(new) - 1])
        drafting.observe(outputs, path)
        stats.add_round(len(draft), len(new), len(path), judged)
        length, unread = length + len(new), 1
        if streamer is not None:
            streamer.put(buffer[:, length - len(new) : length].cpu())
    if streamer is not None:
        streamer.end()
    stats.total_seconds = perf_counter() - started
    drafter.last_stats = stats
    sequences = buffer[:, :length].clone()
    if not keeps:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, scores=scores or None, logits=logits or None, past_key_values=cache, speculation=stats
    )


def _split(stopping_criteria: StoppingCriteriaList) -> tuple[set[int], StoppingCriteriaList]:
    """End-of-text ids, which the loop looks up itself, and all other criteria but the length, which it knows."""
    ends = {token for stop in stopping_criteria if type(stop) is EosTokenCriteria for token in stop.eos_token_id.tolist()}
    rest = [stop for stop in stopping_criteria if type(stop) not in (EosTokenCriteria, MaxLengthCriteria)]
    return ends, StoppingCriteriaList(rest)
