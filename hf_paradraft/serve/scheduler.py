"""Continuous batching of requests: they join the batch after their prompts were read, and leave it
when they end (Orca, 2022, section 3.1).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Condition, Thread
from time import monotonic
from typing import Any

import torch
from torch import LongTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..continuous import NoDrafter, begin, can_join, leave, together
from ..copies import Memory
from ..decoding.batch import Batch
from ..decoding.call import Call
from ..decoding.joining import read_together
from ..decoding.loop import step
from ..drafters.ngram import NgramDrafter
from ..names import decodes
from ..protocol import Drafter, SpeculationStats
from .errors import Refusal
from .grammar import Forced, Grammar
from .prefixes import PrefixCache, reads_in_pieces

logger = logging.get_logger(__name__)
IDLE_SECONDS = 2.0  # seconds without a request before a lesson
LAST_ROUND_SECONDS = 5.0  # seconds that a round may take when the server ends
PIECE = 256  # tokens of a prompt that are read at once, while other requests wait
READ_SECONDS = 0.25  # seconds in which prompts are read between two rounds


class Stopped(Refusal):
    """An error: the server ends before the request does."""

    def __init__(self) -> None:
        super().__init__(
            503, "The server is stopping: ask again when it is back.", "server_stopping"
        )


@dataclass
class News:
    """New tokens of a request, or its end.

    Attributes:
        tokens: the new tokens.
        over: whether the request has ended.
        error: the exception that ended it, after which nothing else comes.
    """

    tokens: list[int] = field(default_factory=list)
    over: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A request that waits or is being answered.

    Attributes:
        ids: the prompt's ids.
        options: arguments for `generate`.
        tell: the function that gets the news, in the scheduler's thread; set before the request is
            submitted.
        seed: the seed of its draws; None for a random one.
        drafts: whether it is drafted for.
        prediction: tokens that the answer may repeat.
        grammar: the grammar of the answer.
        cancelled: whether it has been cancelled; set from any thread.
        since: the number of prompts' tokens that had been read when it was submitted.
        known: the number of its prompt's first tokens that need not be read.
        alone: whether its prompt is read by itself, since reading it with others has failed.
        batch: the batch of its own call, from the first piece of its prompt until it joins others.
        call: its call of `generate`, from the first piece of its prompt to its end.
        num_sent: the number of its tokens that `tell` has got, the prompt's included.
        stats: the statistics of its drafts so far.
        ends: the ids that end its text.
    """

    ids: list[int]
    options: dict[str, Any]
    tell: Callable[[News], None] = lambda news: None
    seed: int | None = None
    drafts: bool = True
    prediction: list[int] | None = None
    grammar: Grammar | None = None
    cancelled: bool = False
    since: int = 0
    known: int = 0
    alone: bool = False
    batch: Batch | None = None
    call: Call | None = None
    num_sent: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    ends: set[int] = field(default_factory=set)

    @property
    def rest(self) -> int:
        """The number of its prompt's tokens that are still to be read."""
        return len(self.ids) if self.batch is None else self.batch.verifier.unread


class Scheduler:
    """A scheduler that answers requests in its own thread.

    Several are answered at a time if the target's sequences can join a batch.

    Args:
        target: the model that answers.
        drafter: the drafter; None: nothing is drafted.
        max_batch_size: the most requests that are answered together.
        max_queue: the most requests that wait for a place.
        lesson: a function that is called after a while without requests; its argument tells whether
            one has come.
        prefix_bytes: the most bytes of text beginnings that are kept, so that they need not be read
            again.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | None,
        max_batch_size: int = 8,
        max_queue: int = 64,
        lesson: Callable[[Callable[[], bool]], bool] | None = None,
        prefix_bytes: int = 0,
    ):
        self.target, self.drafter, self.max_queue, self.lesson = target, drafter, max_queue, lesson
        self.places = max_batch_size if can_join(target, drafter) else 1
        in_pieces = reads_in_pieces(target, drafter)
        # rows of prompts that are read in one forward; None: a whole prompt
        self.piece = PIECE if in_pieces else None
        self.prefixes = PrefixCache(prefix_bytes * in_pieces)
        self.entering = list[Job]()  # waiting, or their prompts are being read in pieces
        self.ready = list[Job]()  # their prompts' last pieces are read next, together
        self.running = list[Job]()
        self.num_read = 0  # the number of prompts' tokens read so far
        self.batch: Batch | None = None
        self.changed = Condition()
        self.stopping = False
        self.thread = Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            Refusal: too many requests wait already, or the scheduler has been stopped.
        """
        with self.changed:
            if self.stopping:
                raise Stopped
            count = len(self.entering) + len(self.ready) + len(self.running)
            if count >= self.places + self.max_queue:
                raise Refusal(
                    429,
                    f"{self.max_queue} requests are waiting already: try again in a moment.",
                    "queue_full",
                    headers={"Retry-After": "1"},
                )
            job.since = self.num_read
            self.entering.append(job)
            self.changed.notify()

    def cancel(self, job: Job) -> None:
        """Cancel a request: it leaves before the next round."""
        job.cancelled = True

    def stop(self) -> None:
        """End the thread after its current round; all open requests get an error."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self.thread.is_alive():
            self.thread.join(LAST_ROUND_SECONDS)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self.changed:
                called = self.changed.wait_for(
                    self._has_work, None if self.lesson is None else IDLE_SECONDS
                )
            if self.stopping:
                stopped = Stopped()
                self._fail_running(stopped)
                self._fail(self.entering, stopped)
                return
            if not called and self.lesson(self._has_work):
                self.prefixes.texts.clear()  # they were read by the drafter's old weights
            self._drop_cancelled()
            self._read()
            self._decode()

    def _has_work(self) -> bool:
        return self.stopping or bool(self.entering or self.running)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self.entering if job.cancelled]:
            self.entering.remove(job)
            self._close(job)
        for job in self.running:
            if job.cancelled:
                job.call.sequences[0].finished = True
        self._leave()

    def _read(self) -> None:
        """Read pieces of new requests' prompts, for a while.

        After its last piece, each request joins the batch. Short last pieces of several prompts
        are read in one forward.
        """
        begun = monotonic()
        while (job := self._next()) is not None and monotonic() - begun <= READ_SECONDS:
            try:
                if job.batch is None:
                    if self.prefixes.would_help(job.ids, [one.ids for one in self.ready]):
                        self._join()
                    self._open(job)
                rest = job.rest
                goes_on = job.batch.read_piece()
                self.num_read += rest - (job.rest if goes_on else 0)
            except Exception as error:  # the others go on
                self.entering.remove(job)
                self._fail([job], error)
                continue
            if not goes_on:
                self.entering.remove(job)
                self._make_ready(job)
        self._join()

    def _next(self) -> Job | None:
        """Pick the request whose prompt is read next: the one with the least left to read.

        It is None if there is no place. A request waits for at most as many tokens of later
        prompts as its own prompt has.
        """
        if len(self.running) + len(self.ready) >= self.places:
            return None
        entering = list(self.entering)
        begun = [job for job in entering if job.batch is not None]
        able = entering if len(begun) < self.places else begun
        return min(able, key=lambda job: job.since + job.rest, default=None)

    def _make_ready(self, job: Job) -> None:
        """Put a request among those that are read next; read them where they fill a forward."""
        most = 0 if job.alone or self.piece is None else self.piece
        longest = max(one.rest for one in (*self.ready, job))
        if (len(self.ready) + 1) * longest > most:
            self._join()
        self.ready.append(job)
        if len(self.ready) * longest >= most:
            self._join()

    def _join(self) -> None:
        """Read the last pieces of prompts, and join these requests to the batch."""
        jobs, self.ready = self.ready, []
        if not jobs:
            return
        batch = jobs[0].batch
        try:
            if len(jobs) == 1:
                step(batch)
            else:
                batch = read_together([job.batch for job in jobs])
            self.batch = together(self.batch, batch) if self.places > 1 else batch
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs, error)
                return
            for job in jobs:  # one of them may be the cause: they begin anew, each by itself
                self._close(job)
                job.alone = True
            self.entering += jobs
            return
        for job in jobs:
            job.batch = None
            self._keep(job)
            self._send_tokens(job)
        self.running += jobs
        self._leave()

    def _keep(self, job: Job) -> None:
        """Keep the read part of a request's text for later requests.

        With a drafter, only texts that were drafted for are kept, since the drafter has read them.
        """
        if job.call.error is not None or (self.drafter is not None and not job.drafts):
            return
        try:
            self.prefixes.keep(self.batch, job.call.sequences[0].place)
        except Exception:  # there is no memory for it, say
            logger.exception("Nothing is kept of what was read.")
            self.prefixes.texts.clear()

    def _decode(self) -> None:
        """Run a round of the requests that have read their prompts."""
        if self.batch is None:
            return
        try:
            with decodes(self.target):
                step(self.batch)
        except Exception as error:
            self._fail_running(error)
            return
        for job in self.running:
            self._send_tokens(job)
        self._leave()

    def _open(self, job: Job) -> None:
        """Begin a request's call of `generate`, with a generator of its own."""
        drafter: Drafter = self.drafter if self.drafter is not None and job.drafts else NoDrafter()
        copies = None
        if job.drafts and (job.prediction or job.grammar):
            drafter = NgramDrafter() if self.drafter is None else copy.copy(self.drafter)
            if job.prediction:
                drafter.memory = Memory(len(job.prediction) + 8)
                drafter.memory.add(job.prediction)
            # A grammar can only follow one text, and some rules show processors others.
            if job.grammar:
                copies = Forced(job.grammar, drafter.memory)
                drafter.speculation_config = replace(drafter.speculation_config, acceptance="auto")
        ids = LongTensor([job.ids]).to(self.target.device)
        known = self.prefixes.find(job.ids, job.drafts)
        job.known = 0 if known is None else known.read
        generator = torch.Generator(ids.device)
        generator.seed() if job.seed is None else generator.manual_seed(job.seed)
        job.batch = begin(
            self.target,
            ids,
            drafter,
            generator,
            known,
            copies,
            attention_mask=torch.ones_like(ids),
            **{"prefill_chunk_size": self.piece, **job.options},
        )
        [job.call] = job.batch.calls
        job.num_sent, job.stats, job.ends = len(job.ids), job.call.stats, job.call.ends.tokens

    def _send_tokens(self, job: Job) -> None:
        [sequence] = job.call.sequences
        if (error := job.call.error) is not None:
            self._send_error(job, error)
            return
        tokens = sequence.ids[0, job.num_sent : sequence.length].tolist()
        job.num_sent = sequence.length
        if tokens or sequence.finished:
            job.tell(News(tokens, sequence.finished))

    def _leave(self) -> None:
        """Remove requests that have ended from batch and cache."""
        over = [job for job in self.running if job.call.finished]
        if not over:
            return
        self.running = [job for job in self.running if not job.call.finished]
        try:
            for job in over:
                self._keep(job)
            leave(self.batch)
        except Exception as error:
            self._fail_running(error)
        for job in over:
            self._show_listener(job)
            self._close(job)
        if not self.running:
            self.batch = None

    def _show_listener(self, job: Job) -> None:
        """Show the text that the target has written to a drafter that learns.

        A cancelled request's text is shown too.
        """
        if self.drafter is None or self.drafter.listener is None or job.num_sent == len(job.ids):
            return
        try:
            self.drafter.listener(job.call.sequences[0].ids[0, : job.num_sent], len(job.ids))
        except Exception:  # requests go on
            logger.exception("A text was not learned from.")

    def _close(self, job: Job) -> None:
        """Drop a request's call, since the reader of its news keeps the job for longer."""
        if job.batch is not None:
            job.batch.close()
        job.batch = job.call = None

    def _fail_running(self, error: Exception) -> None:
        """Fail the requests that are running, with their batch."""
        jobs, batch, self.running, self.batch = self.running, self.batch, [], None
        if batch is not None:
            batch.close()
        self._fail(jobs, error)

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            self._close(job)
            self._send_error(job, error)

    def _send_error(self, job: Job, error: Exception) -> None:
        """Send the error that ended a request."""
        if not isinstance(error, ValueError | Refusal):
            logger.error("A request failed.", exc_info=error)
        job.tell(News(error=error))
