"""Everything that one call of `generate` needs, before its first round."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import LongTensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..hardware import input_device
from ..protocol import Draft, Drafter, Drafting, Observation, Prefix, SpeculationConfig, SpeculationStats
from .accept import RULES, Rule, greedy
from .cache import cache_of_call
from .checks import check_call, check_lengths, left_padding
from .copies import COPIED
from .cost import round_cost
from .features import Features
from .habit import Habit
from .overlap import Lane, Overlap, check_overlap, device_of, works_apart
from .pace import Pace
from .riders import round_rows
from .rows import Ends, Row, Taken, processors_of_rows
from .serve import make_verifier
from .shape import Shape
from .states import is_recurrent
from .verify import ChainVerifier, TreeVerifier
from .window import Window

logger = logging.get_logger(__name__)
PIECE = 2048  # tokens of a prompt that are read at once for a drafter that reads features, unless the caller says otherwise
_habits: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[Drafter, dict[tuple, Habit]]] = WeakKeyDictionary()
MORE_THAN_IDS = ("pixel", "inputs_embeds", "mm_encoder_outputs", "input_features")


@dataclass
class Call:
    """One call: its rows, and who does what for them.

    Attributes:
        buffer: int64 `(B, limit + 1)`, the rows' tokens.
        rows: one for each prompt.
        config: the drafter's.
        drafting: guesses.
        shape: makes drafts of guesses.
        verifier: runs the target.
        features: what the drafter reads of the target.
        rule: of acceptance.
        only_argmax: whether the most probable tokens alone decide.
        pace: how much to draft.
        ends: when rows end.
        stats: what happened so far.
        context: positions that the target has.
        drafts_first: whether the forward that reads the prompt may verify a draft.
        first: whether that forward is still to come.
        overlap: the drafter's lane, if it works while the target does.
        window: learns which of both is faster, where either is possible.
    """

    buffer: LongTensor
    rows: list[Row]
    config: SpeculationConfig
    drafting: Drafting
    shape: Shape
    verifier: ChainVerifier | TreeVerifier
    features: Features
    rule: Rule
    only_argmax: bool
    pace: Pace
    ends: Ends
    stats: SpeculationStats
    context: int
    drafts_first: bool
    first: bool = True
    overlap: Overlap | None = None
    window: Window | None = None

    @property
    def lengths(self) -> list[int]:
        """Of the rows, padding included."""
        return [row.length for row in self.rows]

    def prefixes(self) -> list[Prefix]:
        """What is known of each row, and how many tokens may be guessed for it."""
        ready = not self.first or (self.drafts_first and not self.features.keys)  # features come with the first forward
        depth = self.pace.depth() if self.verifier.may_draft and ready else 0
        if self.overlap is not None:
            self.overlap.begin(depth > 0)
        found = []
        for row in self.rows:
            room = 0 if row.finished else min(depth, self.space(row))
            found.append(Prefix(row.ids[:, row.padding : row.length], room, row.asked))
        return found

    def space(self, row: Row) -> int:
        """How many tokens may be verified in a row before its own end and the context's."""
        return max(0, min(self.ends.limit - row.length - 1, self.context - row.length + row.padding))

    def draft(self, prefixes: list[Prefix]) -> list[Draft]:
        """A draft for each row; empty ones where nobody has room."""
        if self.overlap is not None and self.overlap.on:
            return self.overlap.drafts(prefixes, self.first)
        if not any(prefix.room for prefix in prefixes):
            return [Draft.chain(self.buffer[0, :0])] * len(prefixes)
        drafts = self.shape_of(prefixes)
        if not self.shape.alone:
            for row, prefix in zip(self.rows, prefixes, strict=True):
                row.asked = prefix.ids.shape[1]
        return drafts

    def shape_of(self, prefixes: list[Prefix]) -> list[Draft]:
        """Drafts of what the drafter guesses; trees, unless they would be verified with the prompt."""
        processors = [row.logits_processor for row in self.rows]
        overlapped = self.overlap is not None
        branches = self.verifier.branches and (not self.first or overlapped)
        # Behind a window nobody knows yet where a row will end; a compiled drafter reads K + 1 tokens, and more of them slowly.
        spaces = None if self.config.compile or overlapped else [self.space(row) for row in self.rows]
        return self.shape(self.drafting, prefixes, processors, branches, spaces)

    def beside(self, prefixes: list[Prefix], drafts: list[Draft]) -> AbstractContextManager:
        """What runs while a forward verifies `drafts`: the drafter, in a lane of its own, or nothing."""
        if self.overlap is None or not self.overlap.on:
            return nullcontext()
        own = [
            Prefix(prefix.ids, 0 if row.finished else self.space(row), 0) for prefix, row in zip(prefixes, self.rows, strict=True)
        ]
        return self.overlap.beside(own, drafts, self.config.num_draft_tokens)

    @property
    def lane(self) -> AbstractContextManager:
        """Entered for as long as the call lasts; behind it no thread is left."""
        return nullcontext() if self.overlap is None else self.overlap.lane

    def settle(self, drafts: list[Draft], taken: list[Taken | None]) -> None:
        """Tell the drafter's lane how far its windows went."""
        if self.overlap is None:
            return
        new = [None if one is None else row.ids[0, one.begin : row.length] for row, one in zip(self.rows, taken, strict=True)]
        self.overlap.settle(drafts, taken, new)

    def observe(
        self, prefixes: list[Prefix], drafts: list[Draft], taken: list[Taken | None], seconds: tuple[float, float, float]
    ) -> None:
        """Learn what a round brought and cost: seconds of drafting, of verifying, and of all."""
        asked, overlap = any(prefix.room for prefix in prefixes), self.overlap
        if self.window is not None and asked and not self.first:  # that one read the prompt
            got = [row.length - one.begin for row, one in zip(self.rows, taken, strict=True) if one is not None]
            self.window.observe_round(overlap is not None, sum(got) / len(got), seconds[2])
            if overlap is not None:
                overlap.observe(drafts, seconds)
        if overlap is not None and overlap.on:
            asked = any(map(len, drafts)) or overlap.drafted_first
        paths = [None if one is None else one.path for one in taken]
        self.pace.observe(drafts, paths, *seconds, asked, self.shape.alone)

    def observation(self, index: int, taken: Taken | None, draft: Draft | None, logits: torch.Tensor) -> Observation | None:
        """What the last forward brought a row, after `taken`; None where it had ended before."""
        if taken is None:
            return None
        row, known = self.rows[index], self.verifier.known
        tokens = row.ids[0, taken.begin : row.length]
        end = taken.path[-1] if taken.path else -1
        below = [rider for rider, node in enumerate(draft.rider_nodes) if node == end]
        riders = logits[index, [1 + len(draft) + rider for rider in below]].float() if below else None
        begin = taken.begin - known - row.padding  # of the forward's first row
        skipped = max(0, row.observed - begin)  # padding, and what was read again
        places = [*range(known), *(known + node for node in taken.kept)][skipped:]
        row.observed = begin + skipped + len(places)
        return Observation(tokens, begin + skipped, self.features.of_row(index, places), riders)

    def read_prompt(self, piece: int | None) -> None:
        """Read the prompt but its last piece, where that is wanted in pieces, and show them to the drafter."""
        piece = piece or (PIECE if self.features.keys else None)
        while piece is not None and self.drafts_first and self.verifier.unread > piece:
            self.verifier.read(self.buffer, piece)
            begin = self.verifier.begin - self.verifier.unread - piece
            observations: list[Observation | None] = []
            for index, row in enumerate(self.rows):
                skipped = max(0, row.padding + row.observed - begin)
                found = self.features.of_row(index, list(range(piece))[skipped:])
                observations.append(Observation(row.ids[0, :0], begin + skipped - row.padding, found))
                row.observed = max(row.observed, begin + piece - row.padding)
            self.drafting.observe(observations)


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
    rule_name = check_call(model, input_ids, generation_config, logits_processor, drafter, streamer, synced_gpus)
    drafter.attach(model)
    rule, sampled, config = RULES[rule_name], rule_name == "rejection", drafter.speculation_config
    batch_size, begin = input_ids.shape
    lengths = [stop.max_length for stop in stopping_criteria if type(stop) is MaxLengthCriteria]
    # An own length criterion replaces max_length, as in plain decoding, which too gives one token at least.
    limit = max(begin + 1, min(lengths, default=generation_config.max_length))
    buffer = torch.cat([input_ids, input_ids.new_zeros((batch_size, limit - begin + 1))], dim=1)
    padding = left_padding(model_kwargs.get("attention_mask"), batch_size)
    features = Features(model, drafter.needs(model))
    most_rows = None if (riders := drafter.riders()) is None else round_rows(config, riders)
    verifier = make_verifier(model, input_ids, limit, config, model_kwargs, features, most_rows)
    check_lengths(model, begin, limit, verifier.unread, generation_config, model_kwargs)
    if config.overlap:
        check_overlap(model, drafter, is_recurrent(cache_of_call(model_kwargs)))
    processors = processors_of_rows(logits_processor, batch_size)
    rows = [Row(buffer[i : i + 1], processors[i], begin, padding[i]) for i in range(batch_size)]
    for row in rows:
        row.observed = max(0, begin - verifier.unread - row.padding)  # what the cache held before has no features
    if features.keys and verifier.unread < begin:
        logger.warning_once(
            f"{type(drafter).__name__} reads the target's hidden states, and those of the tokens that past_key_values came with "
            "are not known: it drafts without them, and fewer of its guesses will be right."
        )
    if config.graft and sampled:
        logger.warning_once("acceptance='rejection' wants its drafts drawn: nothing is copied (graft).")
    chain = config.tree_size is None or not verifier.branches
    if chain and config.tree_size is not None:
        logger.warning_once(f"{type(model).__name__} cannot verify trees as it is loaded here: drafting chains.")
    sizes = config.tree_size == "auto" and not chain and (most_rows is not None or not sampled)
    cost = round_cost(model, batch_size) if sizes else None
    adaptive = config.never_slower and rule_name in ("greedy", "sample_match")
    habits = _habits.setdefault(model, WeakKeyDictionary())
    own: dict[tuple, Habit] = habits.setdefault(drafter, {}) if type(drafter).__hash__ is not None else {}
    key = config.num_draft_tokens, config.tree_size, config.graft, batch_size, adaptive
    habit = own.setdefault(key, Habit(config.num_draft_tokens, COPIED if config.graft and config.tree_size is not None else 0))
    pace = Pace(config.num_draft_tokens, chain, cost, adaptive, habit)
    # In one process on one device there is nothing to win by overlapping.
    may_overlap = config.overlap and (works_apart(drafter, model) or not config.never_slower)
    overlaps = may_overlap and (not adaptive or habit.window.turn())
    start_in_place = getattr(drafter, "start_in_place", None) if may_overlap and not overlaps else None
    in_place = None if start_in_place is None else start_in_place(model, limit)
    drafting = drafter.start_drafting(model, limit) if in_place is None else in_place
    vocab_size = model.config.get_text_config().vocab_size
    keeps = generation_config.return_dict_in_generate
    ends = Ends(
        limit, *_split(stopping_criteria), keeps and generation_config.output_scores, keeps and generation_config.output_logits
    )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or limit + max(padding)
    shape = Shape(config, sampled, pace, vocab_size, type(drafter).__name__)
    call = Call(
        buffer=buffer,
        rows=rows,
        config=config,
        drafting=drafting,
        shape=shape,
        verifier=verifier,
        features=features,
        rule=rule,
        only_argmax=rule is greedy and not logits_processor,
        pace=pace,
        ends=ends,
        stats=SpeculationStats(by_row=[SpeculationStats() for _ in rows] if batch_size > 1 else []),
        context=context,
        # The first forward may read images or embeddings, which a drafter cannot.
        drafts_first=not any(v is not None and any(part in k for part in MORE_THAN_IDS) for k, v in model_kwargs.items()),
        window=habit.window if may_overlap else None,
    )
    if overlaps:
        if sampled:  # the lane's draws are its own: two threads would take turns at torch's generator
            shape.generator = torch.Generator(buffer.device).manual_seed(int(torch.randint(2**62, ())))
        adapts = chain and rule_name in ("greedy", "sample_match")
        call.overlap = Overlap(Lane(input_device(model), device_of(drafter)), call.shape_of, habit.window, adapts)
    return call


def _split(stopping_criteria: Iterable) -> tuple[set[int], StoppingCriteriaList]:
    """End-of-text ids, which rows look up themselves, and all other criteria but the length, which they know."""
    ends = {token for stop in stopping_criteria if type(stop) is EosTokenCriteria for token in stop.eos_token_id.tolist()}
    rest = [stop for stop in stopping_criteria if type(stop) not in (EosTokenCriteria, MaxLengthCriteria)]
    return ends, StoppingCriteriaList(rest)
