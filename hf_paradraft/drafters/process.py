"""A drafter in a process of its own: beside an overlapped verification no interpreter is shared, only ids cross.

Threads of one process take turns at the interpreter, which small eager forwards need most of the time; two processes do not.
"""

from __future__ import annotations

import itertools
import pickle
import signal
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import Any

import torch
from torch import LongTensor
from transformers import LogitsProcessorList, PretrainedConfig, PreTrainedModel

from ..decoding.pace import Pace
from ..decoding.shape import Shape
from ..protocol import Drafter, Drafting, GuessedTokens, Observation, Prefix, SpeculationConfig

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
        self.drafting = drafter.start_drafting(target, begin.max_length)
        pace = Pace(config.num_draft_tokens, chain=size is None, adaptive=False)
        vocab_size = target.config.get_text_config().vocab_size
        self.shape = Shape(config, False, pace, vocab_size, type(drafter).__name__)
        self.rows: list[LongTensor] = []

    def propose(self, rows: list[Asked]) -> list[Found]:
        """A draft for each row."""
        before = self.rows or [torch.empty((1, 0), dtype=torch.long) for _ in rows]
        new = [torch.tensor([row.tokens], dtype=torch.long) for row in rows]
        self.rows = [torch.cat([old[:, : row.kept], ids], dim=1) for old, ids, row in zip(before, new, rows, strict=True)]
        prefixes = [Prefix(ids, row.room, row.kept) for ids, row in zip(self.rows, rows, strict=True)]
        drafts = self.shape(self.drafting, prefixes, [LogitsProcessorList()] * len(rows), self.shape.config.tree_size is not None)
        return [Found(draft.token_ids, draft.parents, draft.beliefs) for draft in drafts]

    def observe(self, observations: list[Observation | None]) -> None:
        """What the target brought."""
        self.drafting.observe(observations)


def serve(connection: Connection, threads: int) -> None:
    """Answer until the other side closes: `(number, ended, call, method, arguments)` by `(number, answer or exception)`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the call on the other side, and then this connection
    torch.set_num_threads(threads)
    with suppress(EOFError), torch.inference_mode():
        drafter, kind, config = pickle.loads(connection.recv_bytes())
        with torch.device("meta"):
            target = kind(config)
        calls: dict[int, Worker] = {}
        while True:
            number, ended, call, method, arguments = connection.recv()
            for old in ended:
                calls.pop(old, None)
            try:
                if method == "begin":
                    answer = None
                    calls[call] = Worker(drafter, target, arguments)
                else:
                    answer = getattr(calls[call], method)(arguments)
            except Exception as error:
                answer = error
            connection.send((number, answer))


def end(connection: Connection, process: BaseProcess) -> None:
    """Close, and wait for the other side."""
    connection.close()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()


class ProcessDrafter(Drafter):
    """Lets any drafter that works on its own draft in another process, with threads of its own; made for `overlap=True`.

    The process starts with the first call, takes a copy of the drafter, and ends with `close`, with the `with` block, or when
    nobody holds this object any more. As with all spawned processes, a script that starts one needs `if __name__ == "__main__":`.
    Under `rejection` its drafts count as certain, for distributions do not cross.

    Args:
        drafter: PARD, autoregressive, n-gram, or anything that reads nothing of the target's states and can be pickled.
        threads: CPU threads of the process; default: half of this one's.
    """

    has_own_cores = True

    def __init__(self, drafter: Drafter, threads: int | None = None):
        self.drafter, self.speculation_config = drafter, drafter.speculation_config
        self.threads = threads or max(1, torch.get_num_threads() // 2)
        self.name_or_path, self.found_under = drafter.name_or_path, drafter.found_under
        self.lock, self.numbers, self.ended = Lock(), itertools.count(), deque[int]()
        self.served: PretrainedConfig | None = None
        self.finish: Any = lambda: None

    @property
    def config(self) -> Any:
        """The drafter's, by which vocabularies are compared."""
        return getattr(self.drafter, "config", None)

    @property
    def device(self) -> torch.device | None:
        """Where the drafter was, and is in its process."""
        return getattr(self.drafter, "device", None)

    def attach(self, target: PreTrainedModel) -> None:
        """Check the drafter with `target`, and start its process.

        Raises:
            ValueError: it cannot draft for `target`, or needs what lives in the target's process.
        """
        who = type(self.drafter).__name__
        self.drafter.attach(target)
        if self.drafter.needs(target) or self.drafter.riders() is not None:
            raise ValueError(f"{who} reads the target's forward, so it has to be in the target's process: pass it as it is.")
        if self.served is target.config:
            return
        self.close()
        context = get_context("spawn")
        connection, other = context.Pipe()
        process = context.Process(target=serve, args=(other, self.threads), name="paradraft-drafter", daemon=True)
        process.start()
        other.close()
        self.connection, self.process = connection, process
        self.finish = weakref.finalize(self, end, connection, process)
        try:
            connection.send_bytes(pickle.dumps((self.drafter, type(target), target.config)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise ValueError(f"{who} cannot be sent to a process of its own: {error}") from error
        self.served = target.config

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> ProcessDrafting:
        """Begin a `generate` call over there."""
        return ProcessDrafting(self, Begin(self.speculation_config, max_length))

    def ask(self, call: int, method: str, arguments: Any) -> Any:
        """What the worker's method gives.

        Raises:
            RuntimeError: the process is gone.
            Exception: what went wrong over there.
        """
        with self.lock:
            number = next(self.numbers)
            ended = [self.ended.popleft() for _ in range(len(self.ended))]
            try:
                self.connection.send((number, ended, call, method, arguments))
                answered, answer = self.connection.recv()
                while answered != number:  # a question whose asker was interrupted
                    answered, answer = self.connection.recv()
            except (EOFError, OSError) as error:
                self.process.join(PATIENCE)
                code = self.process.exitcode
                self.close()
                raise RuntimeError(f"The drafter's process ended, exit code {code}: the next call starts another.") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process; the next call starts another."""
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
        self.drafter, self.call = drafter, next(drafter.numbers)
        weakref.finalize(self, drafter.ended.append, self.call)
        drafter.ask(self.call, "begin", begin)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """The worker's drafts, as tokens that were found."""
        rows = [Asked(prefix.kept, prefix.ids[0, prefix.kept :].tolist(), prefix.room) for prefix in prefixes]
        found = self.drafter.ask(self.call, "propose", rows)
        return [
            GuessedTokens(prefix.ids.new_tensor(one.tokens), one.parents, one.beliefs)
            for prefix, one in zip(prefixes, found, strict=True)
        ]

    def observe(self, observations: list[Observation | None]) -> None:
        """Pass on what the target brought: ids alone, for no features are asked for."""
        own = [None if one is None else replace(one, tokens=one.tokens.cpu(), rider_logits=None) for one in observations]
        self.drafter.ask(self.call, "observe", own)
