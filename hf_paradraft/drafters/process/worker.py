"""The drafter's side of a process of its own: it keeps the calls, and answers with drafts."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from traceback import format_exception
from typing import Any

import torch
from torch import LongTensor
from transformers import LogitsProcessorList, PreTrainedModel

from ...decoding.budget import Budget
from ...decoding.drafts import DraftBuilder
from ...decoding.latency import RowLatency
from ...decoding.pearl import device_of
from ...protocol import Drafter, Drafting, Observation, Prefix, SpeculationConfig

WHOLE_TREE = 32  # nodes that are sent where the engine chooses how many of them are verified


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
    acceptance: list[float] | None


class Worker:
    """One `generate` call, on the drafter's side.

    Args:
        drafter, target: the target without weights, which a drafter reads sizes of.
        begin: the call.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel, begin: Begin):
        size = WHOLE_TREE if begin.config.tree_size == "auto" else begin.config.tree_size
        config = replace(begin.config, tree_size=size, overlap=False, prompt_lookup=False, never_slower=False)
        drafter.speculation_config = config
        self.drafting, self.device = drafter.start_drafting(target, begin.max_length), device_of(drafter)
        budget = Budget(RowLatency([1], [1.0]), config.num_draft_tokens)
        vocab_size = target.config.get_text_config().vocab_size
        self.builder = DraftBuilder(config, "greedy", budget, vocab_size, type(drafter).__name__)
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
        processors = [LogitsProcessorList()] * len(rows)
        drafts = self.builder(self.drafting, prefixes, processors, self.builder.config.tree_size is not None)
        return [Found(draft.token_ids, draft.parents, draft.acceptance) for draft in drafts]

    def observe(self, brought: list[tuple[list[int], int] | None]) -> None:
        """What the target brought each row: tokens, and the position of the first that was read."""
        self.drafting.observe([None if pair is None else Observation(torch.tensor(pair[0]), pair[1]) for pair in brought])


def sendable(error: Exception) -> Exception:
    """The error with where it happened, or its words where it cannot be sent."""
    note = "In the drafter's process:\n" + "".join(format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def keep_to_last_cores(count: int) -> None:
    """Let this process run on the last `count` of the cores that it may use, if there are more and the system allows it."""
    if sys.platform == "linux" and count < len(cores := sorted(os.sched_getaffinity(0))):
        with suppress(OSError):
            os.sched_setaffinity(0, cores[-count:])


def serve(connection: Connection, threads: int, own_cores: bool) -> None:
    """Answer until the other side ends: questions `(ended calls, call, method, arguments)`; an answer, or an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the call on the other side, and then this connection
    if own_cores:
        keep_to_last_cores(threads)
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
