"""What one call of `generate` holds, made by small builders before its first round."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..protocol import Draft, Drafter, Drafting, Observation, Prefix, Round, SequenceRound, SpeculationConfig, SpeculationStats
from .accept import RULES, greedy, sample_match
from .budget import Budget, budget_of
from .cache import RaggedCache, cache_of_call, static_cache, use_plain_layers
from .checks import Refused, changes_its_scale, check_call, check_lengths, left_padding
from .drafts import DraftBuilder
from .features import Features
from .lookup import COPIED
from .noise import Noise
from .race import Race
from .recurrent import check_roll_back, is_recurrent
from .sequence import Ends, Sequence, padded, processors_of_sequences
from .tree_attention import TreeAttention, attention_windows, or_sdpa
from .verify import ChainVerifier, RecurrentVerifier, TreeVerifier, extend_to

logger = logging.get_logger(__name__)
PIECE = 2048  # tokens of a prompt that are read at once for a drafter that reads features, unless the caller says otherwise
MORE_THAN_IDS = ("pixel", "inputs_embeds", "mm_encoder_outputs", "input_features")
NOTES = "_paradraft_notes"  # where the hook on `generate` leaves them, in the call's `GenerationConfig`
ALONE = (StopStringCriteria, MaxTimeCriteria)  # criteria without a memory, which look at each sequence by itself


@dataclass(frozen=True)
class Notes:
    """What a caller of `generate` passed, which its defaults hide later.

    Attributes:
        num_assistant_tokens: K, of this call; None: as the drafter says.
        callers_cache: whether the cache is the caller's own, who will see it again.
    """

    num_assistant_tokens: int | None = None
    callers_cache: bool = True


@dataclass
class Call:
    """One call: its sequences, and who does what for them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the sequences' tokens.
        sequences: one for each prompt.
        drafter: as it was passed.
        config: how it is used in this call.
        drafting: guesses.
        builder: makes drafts of guesses.
        budget: how much to draft.
        verifier: runs the target.
        features: what the drafter reads of the target.
        noise: of the target's draws, where drafts may know it.
        only_argmax: whether the most probable tokens alone decide.
        ends: when sequences end.
        criteria: the caller's own, which may remember: asked about the whole batch, token after token, as plain decoding does.
        generation_config: of the call.
        streamer: gets each round's tokens; for one sequence.
        stats: what happened so far.
        context: positions that the target has.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        hands_back: whether the caller sees the cache again.
        begin: tokens of the prompts, padding included.
        judged: tokens of the batch that `criteria` have been asked about.
        done: what they said so far, of each sequence.
        first: whether the forward that reads the prompt is still to come.
        races: of the sequences, that drafts of this round were made by.
    """

    buffer: LongTensor
    sequences: list[Sequence]
    drafter: Drafter
    config: SpeculationConfig
    drafting: Drafting
    builder: DraftBuilder
    budget: Budget
    verifier: ChainVerifier | TreeVerifier
    features: Features
    noise: Noise | None
    only_argmax: bool
    ends: Ends
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None
    stats: SpeculationStats
    context: int
    drafts_first: bool
    hands_back: bool
    begin: int
    judged: int
    done: list[bool]
    first: bool = True
    races: list[Race] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def prefixes(self, depth: int) -> list[Prefix]:
        """What is known of each sequence, and how many tokens, `depth` at most, may be guessed for it."""
        return [
            Prefix(
                sequence.ids[:, sequence.padding : sequence.length],
                0 if sequence.finished else min(depth, self.space(sequence)),
                sequence.asked,
            )
            for sequence in self.sequences
        ]

    def space(self, sequence: Sequence) -> int:
        """How many tokens may be verified in a sequence before its own end and the context's."""
        return max(0, min(self.ends.limit - sequence.length - 1, self.context - sequence.length + sequence.padding))

    @property
    def may_draft(self) -> bool:
        """Whether the next round can verify a draft. Features come with the first forward."""
        return self.verifier.may_draft and (not self.first or (self.drafts_first and not self.features.keys))

    def draft(self) -> None:
        """Give each sequence a draft; an empty one where nobody has room, or drafting would not pay."""
        self.builder.asked = False
        rests = self.builder.may_rest and not self.first and self.budget.rest()
        prefixes = self.prefixes(self.config.num_draft_tokens if self.may_draft and not rests else 0)
        drafts = [Draft.chain(self.buffer[0, :0])] * len(prefixes)
        if any(prefix.room for prefix in prefixes):
            # A compiled drafter reads K + 1 tokens, and more of them slowly: it is asked every time.
            spaces = None if self.config.compile else [self.space(sequence) for sequence in self.sequences]
            drafts = self.shape(prefixes, self.verifier.branches and not self.first, spaces)
        for sequence, prefix, draft in zip(self.sequences, prefixes, drafts, strict=True):
            sequence.draft = draft
            if self.builder.asked:
                sequence.asked = prefix.ids.shape[1]

    def shape(self, prefixes: list[Prefix], branches: bool, spaces: list[int] | None = None) -> list[Draft]:
        """Drafts of what the drafter guesses; arguments as for `DraftBuilder`."""
        processors = [sequence.logits_processor for sequence in self.sequences]
        if self.noise is not None:
            ends = [prefix.ids.shape[1] + sequence.padding for prefix, sequence in zip(prefixes, self.sequences, strict=True)]
            odds = self.budget.odds
            self.races = [Race(self.noise, index, end, processors[index], odds) for index, end in enumerate(ends)]
            prefixes = [replace(prefix, race=race) for prefix, race in zip(prefixes, self.races, strict=True)]
        return self.builder(self.drafting, prefixes, processors, branches, spaces)

    def stop(self) -> None:
        """Ask the caller's criteria about the batch as it was after each token, as far as all sequences have got; one that they
        stop goes back to where it was then."""
        while self.criteria:
            open_ = [sequence.length for sequence in self.sequences if not sequence.finished]
            if self.judged >= min(open_ or [max(sequence.length for sequence in self.sequences)]):
                return
            self.judged += 1
            ids = padded(self.sequences, self.buffer, self.judged, self.generation_config)
            stops = self.criteria(ids, self._scores() if self.ends.keep_scores else None)
            self.done = [before or stop for before, stop in zip(self.done, stops.tolist(), strict=True)]
            for sequence, done in zip(self.sequences, self.done, strict=True):
                # Without a token that ends texts, plain decoding goes on with all of them until all are done.
                if (done if self.ends.tokens else all(self.done)) and sequence.length >= self.judged:
                    sequence.end_at(self.judged, self.begin)

    def _scores(self) -> tuple[Tensor, ...]:
        """`(B, V)` for each new token that is being asked about; zeros where a sequence has ended."""
        per_sequence = [sequence.scores for sequence in self.sequences]
        empty = torch.zeros_like(per_sequence[0][0])
        steps = range(self.judged - self.begin)
        return tuple(torch.cat([scores[step] if step < len(scores) else empty for scores in per_sequence]) for step in steps)

    def observe(self, logits: list[Tensor | None], rows: list[int]) -> None:
        """Show the drafter what the last forward brought.

        Args:
            logits: of the forward, `(N + 1, V)` for each sequence; None for one that had ended before.
            rows: where the sequences stood in it.
        """
        self.drafting.observe(
            [
                None if brought is None else self._observation(sequence, brought, row)
                for sequence, brought, row in zip(self.sequences, logits, rows, strict=True)
            ]
        )

    def _observation(self, sequence: Sequence, logits: Tensor, row: int) -> Observation:
        prefix_rows, draft, accepted = self.verifier.prefix_rows, sequence.draft, sequence.accepted
        tokens = sequence.ids[0, accepted.begin : max(accepted.begin, sequence.length)]
        prompts = None
        if draft.prompt_rows is not None:
            end = accepted.path[-1] if accepted.path else -1
            below = [1 + len(draft) + index for index, node in enumerate(draft.prompt_rows.nodes) if node == end]
            prompts = logits[below].float() if below else None
        begin = accepted.begin - prefix_rows - sequence.padding  # of the forward's first row
        skipped = max(0, sequence.observed - begin)  # padding, and what was read again
        read = [*range(prefix_rows), *(prefix_rows + node for node in accepted.path[: accepted.kept])][skipped:]
        sequence.observed = begin + skipped + len(read)
        return Observation(tokens, begin + skipped, self.features.of_sequence(row, read), prompts)

    def read_prompt(self) -> None:
        """Read the prompt but its last piece, where that is wanted in pieces, and show them to the drafter."""
        piece = self.generation_config.prefill_chunk_size
        if piece is None and self.features.keys and not changes_its_scale(self.verifier.model):
            piece = PIECE
        while piece is not None and self.drafts_first and self.verifier.unread > piece:
            self.verifier.read(self.buffer, piece)
            self.features.collect()
            begin = self.verifier.begin - self.verifier.unread - piece
            observations: list[Observation | None] = []
            for row, sequence in enumerate(self.sequences):
                skipped = max(0, sequence.padding + sequence.observed - begin)
                features = self.features.of_sequence(row, list(range(piece))[skipped:])
                observations.append(Observation(sequence.ids[0, :0], begin + skipped - sequence.padding, features))
                sequence.observed = max(sequence.observed, begin + piece - sequence.padding)
            self.drafting.observe(observations)

    def record(self, record: Round) -> None:
        """Tell everyone what a round was."""
        for race, sequence in zip(self.races, self.sequences, strict=False):
            if sequence.accepted is not None and race.length == sequence.accepted.begin:
                race.learn(sequence.ids[0, race.length : sequence.length].tolist())
        self.races = []
        self.stats.add(record, self.config.trace)
        self.budget.observe(record)
        if self.streamer is not None:
            for part in record.sequences:
                self.streamer.put(torch.tensor([part.emitted]))
        self.first = False

    def parts(self) -> list[SequenceRound]:
        """What the last round was for each sequence that had not ended before."""
        return [
            SequenceRound(
                index,
                sequence.draft,
                sequence.accepted.path,
                sequence.ids[0, sequence.accepted.begin : sequence.length].tolist(),
                sequence.accepted.judged,
            )
            for index, sequence in enumerate(self.sequences)
            if sequence.accepted is not None
        ]

    def finish(self) -> None:
        """Leave the cache as plain decoding does, where somebody will see it."""
        if self.hands_back:
            longest = max(sequence.length for sequence in self.sequences)
            self.verifier.finish(padded(self.sequences, self.buffer, longest, self.generation_config))


def begin_call(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None,
    streamer: BaseStreamer | None,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
) -> Call:
    """Check and prepare a call; arguments as for `speculative_decoding`.

    Raises:
        ValueError: an argument that the loop cannot serve; the message says what to change.
    """
    rule = check_call(model, input_ids, generation_config, logits_processor, drafter, streamer, synced_gpus)
    notes: Notes = getattr(generation_config, NOTES, Notes())
    used = _with_own_length(drafter, notes.num_assistant_tokens)
    used.attach(model)
    config, (batch_size, begin) = used.speculation_config, input_ids.shape
    ends, criteria = _ends(stopping_criteria, generation_config, begin, batch_size)
    buffer = torch.cat([input_ids, input_ids.new_zeros((batch_size, ends.limit - begin + 1))], dim=1)
    padding = left_padding(model_kwargs.get("attention_mask"), batch_size)
    features = Features(model, used.needs(model))
    verifier = make_verifier(model, input_ids, ends.limit, used, model_kwargs, features)
    check_lengths(model, begin, ends.limit, verifier.unread, generation_config, model_kwargs)
    processors = processors_of_sequences(logits_processor, batch_size)
    sequences = [Sequence(buffer[i : i + 1], processors[i], begin, padding[i], RULES[rule]) for i in range(batch_size)]
    noise = None
    if RULES[rule] is sample_match:
        noise = Noise(sequences, begin, model.config.get_text_config().vocab_size)
        for index, sequence in enumerate(sequences):
            sequence.rule = partial(sample_match, draw=partial(noise.draw, index))
    for sequence in sequences:  # what the cache held before has no features
        sequence.observed = max(0, begin - verifier.unread - sequence.padding)
    _tell(model, used, config, rule, verifier, bool(features.keys) and verifier.unread < begin)
    budget = _budget(model, drafter, config, rule, batch_size, verifier)
    text = model.config.get_text_config()
    # The first forward may read images or embeddings, which a drafter cannot.
    more = any(value is not None and any(part in name for part in MORE_THAN_IDS) for name, value in model_kwargs.items())
    return Call(
        buffer=buffer,
        sequences=sequences,
        drafter=drafter,
        config=config,
        drafting=used.start_drafting(model, ends.limit),
        builder=DraftBuilder(config, rule, budget, text.vocab_size, type(drafter).__name__),
        budget=budget,
        verifier=verifier,
        features=features,
        noise=noise,
        only_argmax=RULES[rule] is greedy and not logits_processor,
        ends=ends,
        criteria=criteria,
        generation_config=generation_config,
        streamer=streamer,
        stats=SpeculationStats(by_row=[SpeculationStats() for _ in sequences] if batch_size > 1 else []),
        context=getattr(text, "max_position_embeddings", None) or ends.limit + max(padding),
        drafts_first=not more,
        hands_back=generation_config.return_dict_in_generate or notes.callers_cache,
        begin=begin,
        judged=begin,
        done=[False] * batch_size,
    )


def _with_own_length(drafter: Drafter, num_draft_tokens: int | None) -> Drafter:
    """The drafter, or a shallow copy of it for a call that says itself how many tokens it wants.

    Raises:
        ValueError: that is no number of tokens.
    """
    if num_draft_tokens is None or num_draft_tokens == drafter.speculation_config.num_draft_tokens:
        return drafter
    used = copy.copy(drafter)
    used.speculation_config = replace(drafter.speculation_config, num_draft_tokens=num_draft_tokens)
    return used


def _ends(
    stopping_criteria: Iterable, generation_config: GenerationConfig, begin: int, batch_size: int
) -> tuple[Ends, StoppingCriteriaList]:
    """When sequences end, and the criteria that are asked about the whole batch."""
    # An own length criterion replaces max_length, as in plain decoding, which too gives one token at least.
    lengths = [stop.max_length for stop in stopping_criteria if type(stop) is MaxLengthCriteria]
    limit = max(begin + 1, min(lengths, default=generation_config.max_length))
    tokens = {token for stop in stopping_criteria if type(stop) is EosTokenCriteria for token in stop.eos_token_id.tolist()}
    others = [stop for stop in stopping_criteria if type(stop) not in (EosTokenCriteria, MaxLengthCriteria)]
    alone = [stop for stop in others if batch_size == 1 or (tokens and type(stop) in ALONE)]
    keeps = generation_config.return_dict_in_generate
    wanted = keeps and generation_config.output_scores, keeps and generation_config.output_logits
    together = [stop for stop in others if stop not in alone]
    return Ends(limit, tokens, StoppingCriteriaList(alone), *wanted), StoppingCriteriaList(together)


def _tell(
    model: PreTrainedModel,
    drafter: Drafter,
    config: SpeculationConfig,
    rule: str,
    verifier: ChainVerifier | TreeVerifier,
    lacks_features: bool,
) -> None:
    """Warn, once, of what will be slower than it looks."""
    if lacks_features:
        logger.warning_once(
            f"{type(drafter).__name__} reads the target's hidden states, and those of the tokens that past_key_values came with "
            "are not known: it drafts without them, and fewer of its guesses will be right."
        )
    if config.prompt_lookup and rule == "rejection":
        logger.warning_once("acceptance='rejection' wants its drafts drawn: nothing is copied (prompt_lookup).")
    if config.tree_size is not None and not verifier.branches:
        logger.warning_once(f"{type(model).__name__} cannot verify trees as it is loaded here: drafting chains.")


def _budget(
    model: PreTrainedModel, drafter: Drafter, config: SpeculationConfig, rule: str, batch_size: int, verifier: Any
) -> Budget:
    """What all calls of this pair share that draft alike."""
    automatic = config.tree_size == "auto" and verifier.branches and rule != "rejection"
    depth = max(config.num_draft_tokens, COPIED if config.prompt_lookup and config.tree_size is not None else 0)
    use = config.num_draft_tokens, config.tree_size, config.prompt_lookup, rule, config.never_slower
    decides = automatic or (config.never_slower and rule != "typical")
    budget = budget_of(model, drafter, decides, depth, batch_size, verifier.row_counts, *use)
    budget.begin()
    return budget


def make_verifier(
    model: PreTrainedModel,
    input_ids: LongTensor,
    limit: int,
    drafter: Drafter,
    model_kwargs: dict[str, Any],
    features: Features | None = None,
) -> ChainVerifier | TreeVerifier:
    """The verifier that serves a call: trees and batches where model, cache and inputs allow it.

    Args:
        model: the target.
        input_ids: int64 `(B, n)`, the prompts.
        limit: tokens at most.
        drafter: says how many query rows a round may have.
        model_kwargs: of this call, with the cache, which may be changed.
        features: what the drafter reads.

    Raises:
        ValueError: the cache cannot roll back, or a batch is asked for where only one sequence can be served.
    """
    config, (batch_size, begin) = drafter.speculation_config, input_ids.shape
    most_rows = max(config.max_nodes, drafter.max_rows)
    windows, num_slots = attention_windows(model), limit + 2 + most_rows
    cache = cache_of_call(model_kwargs)
    per_token = extend_to(limit + 1, model_kwargs)
    if is_recurrent(cache):
        if batch_size > 1:
            raise Refused(f"{type(model).__name__} has recurrent layers and is served one prompt at a time with a drafter.")
        check_roll_back(cache)
        return RecurrentVerifier(model, model_kwargs, per_token, begin, begin)
    explicit = (
        windows is not None
        and per_token.keys() <= {"attention_mask", "position_ids"}
        and all(tensor.ndim == 2 for tensor in per_token.values())
    )
    if config.compile and explicit and cache.get_seq_length() == 0:
        cache.layers = static_cache(model, num_slots).layers  # in the caller's own object, if it is one
    explicit = explicit and use_plain_layers(cache, num_slots)
    if not explicit:
        cache.activate_past_recording()
    chains = ChainVerifier(model, model_kwargs, per_token, begin, begin - int(cache.get_seq_length()))
    if not explicit:
        if batch_size > 1 or cache.is_compileable:
            raise Refused(
                f"{type(model).__name__} with {model.config.get_text_config()._attn_implementation} attention and these inputs "
                "can be served one prompt at a time and with a dynamic cache only: call generate once per prompt, without "
                f"cache_implementation{or_sdpa(model)}."
            )
        return chains
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    positions = per_token["position_ids"][:, begin - 1] if "position_ids" in per_token else mask.long().sum(1) - 1
    attention = TreeAttention(windows, mask, positions.expand(batch_size), model.dtype)
    last = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ragged = RaggedCache(cache, batch_size, begin)
    row_counts = config.row_counts(most_rows) if cache.is_compileable else None
    return TreeVerifier(model, model_kwargs, ragged, attention, features, chains, last, row_counts)
