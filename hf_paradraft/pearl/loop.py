"""Draft while verifying (PEARL, section 3): the drafter works on the next window while the target
looks at this one.

The drafter guesses after the window that is being verified, as if all of it were accepted. If it
is, and the target's own next token is one of the guesses, what was guessed after that one is the
next window: no time was lost (*post-verify*). If not, the guesses are dropped, and the target reads
its newest token alone while the drafter writes a new window (*pre-verify*); or the drafter writes
first, where it was seen to be so much faster than the target that this brings more.

A draft is a chain here, whatever `tree_size` says. Drafts are judged by the same rules as ever, and
are drawn without looking at the target's draws; so outputs stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
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

from ..copies import copies_of
from ..decoding.batch import Batch
from ..decoding.begin import begin_call
from ..decoding.call import Call, Terms
from ..decoding.checks import Refused
from ..decoding.group import Group
from ..decoding.loop import SpeculativeOutput, output, speculative_decoding, step
from ..decoding.tree_attention import without_cudnn_attention
from ..decoding.trees import part
from ..hardware import input_device
from ..names import BaseStreamer, decodes
from ..notes import of_pair
from ..protocol import Draft, Drafter, Prefix
from .schedule import OverlapSchedule


def device_of(drafter: Any) -> torch.device | None:
    """Look up the device of a drafter's model; None for a drafter without a model.

    The model is the drafter itself, or the one that it wraps.
    """
    return getattr(getattr(drafter, "model", drafter), "device", None)


def schedule_of(target: PreTrainedModel, drafter: Drafter) -> OverlapSchedule:
    """Look up the schedule of this pair, shared by all its calls."""
    config = drafter.speculation_config
    key = "overlap", config.num_draft_tokens, config.tree_size
    return of_pair(target, drafter).setdefault(key, OverlapSchedule(config.num_draft_tokens))


def decoding_of(
    drafter: Drafter, target: PreTrainedModel
) -> Callable[..., SpeculativeOutput | LongTensor]:
    """Choose the overlapped or the sequential decoding loop for a drafter and a target.

    The loop is overlapped if `overlap` is set, and overlapping may save time or `never_slower` is
    off. In one process on one device there is nothing to win.
    """
    config = drafter.speculation_config
    apart = drafter.apart is not None or device_of(drafter) not in (None, input_device(target))
    overlaps = config.overlap and (apart or not config.never_slower)
    return overlapped_decoding if overlaps else speculative_decoding


def check_overlap(model: PreTrainedModel, drafter: Drafter, recurrent: bool) -> None:
    """Refuse a drafter that cannot go on without the verification, or a recurrent target.

    A target with recurrent layers cannot be overlapped.

    Raises:
        ValueError: with what to change.
    """
    if drafter.needs(model) or drafter.guesses_in_target:
        raise Refused(
            f"overlap=True: {type(drafter).__name__} reads the target's hidden states, so its next "
            "window needs this one's, or guesses in the target's own forward: set overlap=False."
        )
    if recurrent:
        raise Refused(
            f"overlap=True: {type(model).__name__} has recurrent layers, which cannot be "
            "overlapped: set overlap=False."
        )


class DrafterThread:
    """The drafter's thread, which does one job at a time during a verification.

    A job begins with a verification, and is waited for after it. Settings of one thread are made in
    it: no gradients, inference mode, autocast, a stream of its own on a GPU, and
    half of the CPU threads where both sides share the cores.

    Args:
        device: the target's device.
        drafter_device: the drafter's device; None: it has none, and wants no threads.
    """

    def __init__(self, device: torch.device, drafter_device: torch.device | None):
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="paradraft-drafter")
        self.inference = torch.is_inference_mode_enabled()
        kind = device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        drafter_kind = None if drafter_device is None else drafter_device.type
        self.shares = kind == drafter_kind == "cpu"
        self.threads = torch.get_num_threads()
        self.stream = torch.cuda.Stream(drafter_device) if drafter_kind == "cuda" else None
        self.begun = self.ended = 0.0

    def _work(self, job: Callable[[], Any]) -> Any:
        if self.shares:
            torch.set_num_threads(self.threads - self.threads // 2)
        with (
            torch.inference_mode() if self.inference else torch.no_grad(),
            torch.autocast(*self.autocast),
            torch.cuda.stream(self.stream),
        ):
            self.begun = perf_counter()
            try:
                done = job()
                if self.stream is not None:
                    self.stream.synchronize()
                return done
            finally:
                self.ended = perf_counter()

    @contextmanager
    def meanwhile(self, job: Callable[[], Any]) -> Iterator[Future]:
        """Do `job` in the thread while the block runs, and wait for its end after the block.

        After the block the job is over, whatever happens on either side.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        future = self.executor.submit(self._work, job)
        if self.shares:
            torch.set_num_threads(max(1, self.threads // 2))
        try:
            yield future
        finally:
            try:
                if future.exception() is None and self.stream is not None:  # waits
                    torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            finally:  # also where the wait is interrupted
                if self.shares:
                    torch.set_num_threads(self.threads)


class Windows:
    """One call's windows: the drafts to verify next, and those that the drafter writes meanwhile.

    Args:
        call: the call.
        group: the group of its sequences.
        thread: the thread that the drafter works in.
        schedule: chooses how far it guesses.
        adapts: whether the schedule chooses by its measurements; not if drafts are drawn, which
            would then depend on the clock.
    """

    def __init__(
        self,
        call: Call,
        group: Group,
        thread: DrafterThread,
        schedule: OverlapSchedule,
        adapts: bool,
    ):
        self.call, self.group, self.thread, self.schedule = call, group, thread, schedule
        self.adapts = adapts
        self.nothing = group.nothing
        # of each sequence: its next draft, and the guess after that
        self.windows = self.ahead = [self.nothing] * len(call.sequences)
        self.size = 0  # tokens guessed in this round, at most
        self.drafted_first = False  # in this round
        # seconds of this round: after the verification, and during it
        self.waited = self.hidden = 0.0

    def _most(self) -> int:
        """Choose how many tokens are guessed in a row."""
        most = self.call.config.num_draft_tokens
        return min(most, self.schedule.size()) if self.adapts else most

    def ready(self) -> None:
        """Give each sequence its window, or draft first if none has one and that pays.

        Nothing is drafted first before the prompt is read.
        """
        call = self.call
        self.group.builder.asked = False
        none = not call.first and not any(map(len, self.windows))
        first = self.adapts and self.schedule.drafts_first and none
        depth = self._most() if first else call.config.num_draft_tokens
        prefixes = [sequence.prefix(depth) for sequence in call.sequences]
        self.drafted_first = first and any(prefix.room for prefix in prefixes)
        if self.drafted_first:
            self.windows = self._make_drafts(prefixes)
        for sequence, window, prefix in zip(call.sequences, self.windows, prefixes, strict=True):
            sequence.draft = window if prefix.room else self.nothing

    def _make_drafts(self, prefixes: list[Prefix]) -> list[Draft]:
        """Make chains after `prefixes`."""
        drafts = self.group.make_drafts(prefixes, branches=False)
        for sequence, prefix in zip(self.call.sequences, prefixes, strict=True):
            sequence.asked = prefix.ids.shape[1]
        return drafts

    @contextmanager
    def drafting_ahead(self) -> Iterator[None]:
        """Let the drafter guess the next windows while the block verifies the current ones.

        The drafter guesses as if each window were accepted as far as it goes.
        """
        self.waited, self.hidden, self.size = 0.0, 0.0, self._most()
        hoped = []
        for sequence in self.call.sequences:
            window = sequence.draft
            prefix = sequence.prefix(len(window) + self.size)
            ids = torch.cat([prefix.ids, window.tokens[None]], dim=1)
            # One of the guesses stands for the target's own token.
            hoped.append(Prefix(ids, max(0, prefix.room - len(window)), prefix.kept))
        self.ahead = [self.nothing] * len(hoped)
        if not any(prefix.room for prefix in hoped):
            self.size = 0
            yield
            return
        with self.thread.meanwhile(lambda: self._make_drafts(hoped)) as future:
            yield
            verified = perf_counter()
        self.ahead, end = future.result(), self.thread.ended
        self.hidden = max(0.0, min(end, verified) - self.thread.begun)
        self.waited = max(0.0, end - verified)

    def settle(self) -> None:
        """Keep the guesses after windows that were accepted as hoped; drop the others."""
        begin = 0 if self.drafted_first else 1  # a window's first was the target's own token
        self.windows = []
        for sequence, ahead in zip(self.call.sequences, self.ahead, strict=True):
            outcome, next_window = sequence.outcome, self.nothing
            if outcome is not None:
                window, right = len(sequence.draft), len(outcome.accepted)
                # the drafter was asked about more, where not all of the window was accepted
                sequence.asked = min(sequence.asked, outcome.begin - sequence.padding + right)
                for depth in range(min(outcome.judged, window, self.schedule.most - begin)):
                    self.schedule.observe_guess(begin + depth, depth < right)
                new = outcome.emitted[: sequence.length - outcome.begin]
                if len(ahead) and right == window and len(new) == window + 1:
                    guessed = ahead.token_ids[0] == new[-1]
                    self.schedule.observe_guess(0, guessed)
                    if guessed:
                        next_window = part(ahead, range(1, len(ahead)), 0)
            self.windows.append(next_window)

    def observe(self, seconds: float, verify_seconds: float) -> None:
        """Learn the seconds of a round after its first draft, unless it read the prompt."""
        if self.size and not self.call.first:
            drafted = max(len(sequence.draft) for sequence in self.call.sequences)
            self.schedule.judged += drafted > 0
            self.schedule.verify.observe(1 + drafted, seconds - self.waited)
            self.schedule.draft.observe(
                self.size,
                self.thread.ended - self.thread.begun + seconds - self.waited - verify_seconds,
            )


@torch.no_grad()
@without_cudnn_attention()
def overlapped_decoding(
    model: PreTrainedModel,
    input_ids: LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    streamer: BaseStreamer | None,
    terms: Terms,
    **model_kwargs: Any,
) -> SpeculativeOutput | LongTensor:
    """Decode as `speculative_decoding`, with a drafter that works while the target verifies.

    With `never_slower` the faster way is taken, call by call: a drafter would have to read its text
    on both sides.

    Raises:
        ValueError: as there; and a drafter that cannot go on without the verification, or a target
            that cannot be overlapped.
    """
    started = perf_counter()
    schedule, config = schedule_of(model, drafter), drafter.speculation_config
    repeatable = terms.rule.same_text  # whatever the clock says, the text is the same
    overlapped = not (config.never_slower and repeatable) or schedule.turn()
    used = drafter.apart if overlapped and drafter.apart is not None else drafter
    if used is not drafter:
        used.speculation_config = config
        terms = replace(terms, copies=copies_of(used, terms.rule.draws is not None))
    own = logits_processor, stopping_criteria, generation_config
    batch = begin_call(model, input_ids, *own, used, streamer, model_kwargs, terms)
    [call], [group] = batch.calls, batch.groups
    with batch:
        check_overlap(model, drafter, bool(batch.verifier.cache.linear))
        call.drafter = drafter
        # two threads would take turns at torch's generator
        if overlapped and call.rule.draws is not None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            call.rule.draws.generator = torch.Generator(call.buffer.device).manual_seed(seed)
        thread = DrafterThread(input_device(model), device_of(used))
        windows = Windows(call, group, thread, schedule, repeatable)
        with thread.executor:
            while batch.read_piece():
                pass
            take = partial(overlapped_step, batch, windows) if overlapped else partial(step, batch)
            take()
            with decodes(model):
                while not call.finished:
                    begun = perf_counter()
                    take()
                    if windows.size or any(len(sequence.draft) for sequence in call.sequences):
                        emitted = fmean(len(record.emitted) for record in call.parts())
                        schedule.observe_round(overlapped, emitted, perf_counter() - begun)
    return output(call, batch.verifier, started)


def overlapped_step(batch: Batch, windows: Windows) -> None:
    """Take one round of a batch of one call: the drafter works during the verification."""
    begun = perf_counter()
    windows.ready()
    drafted = perf_counter()
    with windows.drafting_ahead():
        clock = perf_counter()
        logits, choices = batch.verify()
        verified = perf_counter()
    try:
        batch.accept(logits, choices)
    finally:
        batch.roll_back()
    windows.settle()
    windows.observe(perf_counter() - drafted, verified - clock)
    batch.observe(logits, begun, drafted - begun + windows.waited, verified - clock, windows.hidden)
