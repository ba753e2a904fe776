"""A drafter in a process of its own: beside an overlapped verification no interpreter is shared, only ids cross.

Threads of one process take turns at the interpreter, which small eager forwards need most of the time; two processes do not.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import RLock
from traceback import format_exception
from typing import Any

import torch
from torch import LongTensor
from transformers import LogitsProcessorList, PretrainedConfig, PreTrainedModel

from ..decoding.overlap import device_of
from ..decoding.pace import Pace
from ..decoding.shape import Shape
from ..protocol import Drafter, Drafting, GuessedTokens, Observation, Prefix, SpeculationConfig
from .borrowed import Borrowed

WHOLE_TREE = 32  # nodes that are sent where the engine chooses how many of them are verified
PATIENCE = 10.0  # seconds until a process that does not end by itself is ended


@dataclass
class Begin:
    """What a `generate` call asks with: how drafts are shaped, and how long its rows get."""

    config: SpeculationConfig
    max_length: int


@dataclass
class Asked:
    """What changed in one row since it was asked about last.

    Attributes:
        kept: leading tokens that stay.
        tokens: behind them.
        room: as in `Prefix`.
    """

    kept: int
    tokens: list[int]
    room: int


@dataclass
class Found:
    """One row's draft."""

    tokens: list[int]
    parents: list[int]
    beliefs: list[float] | None


class Worker:
    """One `generate` call, on the drafter's side.

    Args:
        drafter, target: the target without weights, which a drafter reads sizes of.
        begin: the call.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel, begin: Begin):
        size = WHOLE_TREE if begin.config.tree_size == "auto" else begin.config.tree_size
        config = replace(begin.config, tree_size=size, overlap=False, graft=False)
        drafter.speculation_config = config
        self.drafting, self.device = drafter.start_drafting(target, begin.max_length), device_of(drafter)
        pace = Pace(config.num_draft_tokens, chain=size is None, adaptive=False)
        vocab_size = target.config.get_text_config().vocab_size
        self.shape = Shape(config, False, pace, vocab_size, type(drafter).__name__)
        self.rows: list[LongTensor] = []

    @property
    def learns(self) -> bool:
        """Whether it wants to know what the target brought."""
        return type(self.drafting).observe is not Drafting.observe

    def propose(self, rows: list[Asked]) -> list[Found]:
        """A draft for each row."""
        before = self.rows or [torch.empty((1, 0), dtype=torch.long, device=self.device) for _ in rows]
        new = [torch.tensor([row.tokens], dtype=torch.long, device=self.device) for row in rows]
        self.rows = [torch.cat([old[:, : row.kept], ids], dim=1) for old, ids, row in zip(before, new, rows, strict=True)]
        prefixes = [Prefix(ids, row.room, row.kept) for ids, row in zip(self.rows, rows, strict=True)]
        drafts = self.shape(self.drafting, prefixes, [LogitsProcessorList()] * len(rows), self.shape.config.tree_size is not None)
        return [Found(draft.token_ids, draft.parents, draft.beliefs) for draft in drafts]

    def observe(self, brought: list[tuple[list[int], int] | None]) -> None:
        """What the target brought each row: tokens, and the position of the first that was read."""
        self.drafting.observe([None if one is None else Observation(torch.tensor(one[0]), one[1]) for one in brought])


def sendable(error: Exception) -> Exception:
    """The error with where it happened, or its words where it cannot be sent."""
    note = "In the drafter's process:\n" + "".join(format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def serve(connection: Connection, threads: int) -> None:
    """Answer until the other side ends: questions `(ended calls, call, method, arguments)`; an answer, or an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the call on the other side, and then this connection
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError), torch.inference_mode():
        try:
            drafter, kind, config = pickle.loads(connection.recv_bytes())
            with torch.device("meta"):
                target = kind(config)
        except Exception as error:
            connection.send(sendable(error))
            return
        connection.send(None)  # ready
        calls: dict[int, Worker] = {}
        while (question := connection.recv()) is not None:
            ended, call, method, arguments = question
            for old in ended:
                calls.pop(old, None)
            try:
                if method == "begin":
                    calls[call] = Worker(drafter, target, arguments)
                    answer: Any = calls[call].learns
                else:
                    answer = getattr(calls[call], method)(arguments)
            except Exception as error:
                answer = sendable(error)
            connection.send(answer)


def end(connection: Connection, process: BaseProcess) -> None:
    """Tell the other side to end, and wait for it."""
    with suppress(OSError):
        connection.send(None)
    connection.close()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Ctrl-C waits, and a process that is started inside never gets it."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessDrafter(Drafter):
    """Lets any drafter that works on its own draft in another process, with threads of its own; made for `overlap=True`.

    The process starts with the first call, takes a copy of the drafter, and ends with `close`, with the `with` block, or when
    nobody holds this object any more. As with all spawned processes, a script that starts one needs `if __name__ == "__main__":`.
    Under `rejection` its drafts count as certain, for distributions do not cross.

    Args:
        drafter: PARD, autoregressive, n-gram, or anything that reads nothing of the target and can be pickled.
        threads: CPU threads of the process; default: half of this one's.
    """

    has_own_cores = True

    def __init__(self, drafter: Drafter, threads: int | None = None):
        self.drafter, self.speculation_config = drafter, drafter.speculation_config
        self.threads = threads or max(1, torch.get_num_threads() // 2)
        self.name_or_path, self.found_under = drafter.name_or_path, drafter.found_under
        self.lock, self.numbers, self.ended = RLock(), itertools.count(), deque[int]()
        self.served: PretrainedConfig | None = None
        self.process: BaseProcess | None = None
        self.finish: Any = lambda: None

    @property
    def config(self) -> Any:
        """The drafter's, by which vocabularies are compared."""
        return getattr(self.drafter, "config", None)

    @property
    def device(self) -> torch.device | None:
        """Where the drafter was, and is in its process."""
        return device_of(self.drafter)

    def attach(self, target: PreTrainedModel) -> None:
        """Check the drafter with `target`, and start its process.

        Raises:
            ValueError: it cannot draft for `target`, needs what lives in the target's process, or cannot be sent to another.
            RuntimeError: its process did not start.
        """
        who = type(self.drafter).__name__
        self.drafter.attach(target)
        borrows = any(isinstance(own, Borrowed) for own in vars(self.drafter).values())
        if borrows or self.drafter.needs(target) or self.drafter.riders() is not None:
            raise ValueError(f"{who} stands on the target, so it has to be in the target's process: pass it as it is.")
        with self.lock:
            if self.served is target.config and self.process.is_alive():
                return
            self.close()
            try:
                sent = pickle.dumps((self.drafter, type(target), target.config))
            except Exception as error:
                raise ValueError(f"{who}, or the target's class, cannot be sent to another process: {error}") from error
            context = get_context("spawn")
            connection, other = context.Pipe()
            process = context.Process(target=serve, args=(other, self.threads), name="paradraft-drafter", daemon=True)
            with without_interrupts():
                process.start()
            other.close()
            self.connection, self.process = connection, process
            self.finish = weakref.finalize(self, end, connection, process)
            try:
                connection.send_bytes(sent)
                failed = connection.recv()
            except (EOFError, OSError) as error:
                self.close()
                raise RuntimeError(
                    f"{who}'s process did not start; a script that starts one needs `if __name__ == '__main__':` around its work."
                ) from error
            except BaseException:
                self.close()
                raise
            if failed is not None:
                self.close()
                raise failed
            self.served = target.config

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> ProcessDrafting:
        """Begin a `generate` call over there."""
        return ProcessDrafting(self, Begin(self.speculation_config, max_length))

    def ask(self, process: BaseProcess, call: int, method: str, arguments: Any) -> Any:
        """What the worker's method gives.

        Raises:
            RuntimeError: the process is gone.
            Exception: what went wrong over there.
        """
        with self.lock:
            if process is not self.process or self.served is None:
                raise RuntimeError(
                    "The drafter's process was ended under this call, by `close` or by a call with another target."
                )
            ended = [self.ended.popleft() for _ in range(len(self.ended))]
            try:
                self.connection.send((ended, call, method, arguments))
                answer = self.connection.recv()
            except (EOFError, OSError) as error:
                process.join(PATIENCE)
                self.close()
                raise RuntimeError(
                    f"The drafter's process ended, exit code {process.exitcode}: the next call starts another."
                ) from error
            except BaseException:  # an answer may be half read
                self.close()
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self.lock:
            self.finish()
            self.served = None

    def __enter__(self) -> ProcessDrafter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessDrafting(Drafting):
    """One `generate` call, on the target's side.

    Args:
        drafter: whose process is asked.
        begin: the call.
    """

    def __init__(self, drafter: ProcessDrafter, begin: Begin):
        self.drafter, self.process, self.call = drafter, drafter.process, next(drafter.numbers)
        weakref.finalize(self, drafter.ended.append, self.call)
        self.learns = self._ask("begin", begin)

    def _ask(self, method: str, arguments: Any) -> Any:
        return self.drafter.ask(self.process, self.call, method, arguments)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """The worker's drafts, as tokens that were found."""
        rows = [Asked(prefix.kept, prefix.ids[0, prefix.kept :].tolist(), prefix.room) for prefix in prefixes]
        return [
            GuessedTokens(prefix.ids.new_tensor(one.tokens), one.parents, one.beliefs)
            for prefix, one in zip(prefixes, self._ask("propose", rows), strict=True)
        ]

    def observe(self, observations: list[Observation | None]) -> None:
        """Pass on what the target brought, where that is wanted: ids alone, for no features are asked for."""
        if self.learns:
            self._ask("observe", [None if one is None else (one.tokens.tolist(), one.begin) for one in observations])
