"""The drafter's side of a process of its own: it keeps the calls, and answers with drafts."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from traceback import format_exception
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..decoding.accept import Greedy
from ..decoding.budget import Budget, RowLatency
from ..decoding.drafts import DraftBuilder
from ..decoding.tree_attention import without_cudnn_attention
from ..protocol import Drafter, Drafting, Observation, Prefix, SpeculationConfig
from .loop import device_of


class Worker:
    """One `generate` call, on the drafter's side.

    Args:
        drafter, target: the target without weights, which a drafter reads sizes of.
        config: the options of the call.
        max_length: tokens of a sequence at most.
    """

    def __init__(
        self, drafter: Drafter, target: PreTrainedModel, config: SpeculationConfig, max_length: int
    ):
        config = replace(
            config, tree_size=None, overlap=False, prompt_lookup=False, never_slower=False
        )
        drafter.speculation_config = config
        self.drafting, self.device = drafter.start_drafting(target, max_length), device_of(drafter)
        budget = Budget(RowLatency([1], [1.0]), config.num_draft_tokens)
        vocab_size = target.config.get_text_config().vocab_size
        self.builder = DraftBuilder(config, Greedy(), budget, vocab_size, type(drafter).__name__)

    def propose(
        self, asked: list[tuple[list[int], int, int]]
    ) -> list[tuple[list[int], list[float] | None]]:
        """Draft a chain for each sequence: tokens and their acceptance.

        Args:
            asked: ids, `room` and `kept` of each sequence's `Prefix`.
        """
        prefixes = [
            Prefix(torch.tensor([ids], device=self.device), room, kept) for ids, room, kept in asked
        ]
        processors = [LogitsProcessorList()] * len(prefixes)
        drafts = self.builder(self.drafting, prefixes, processors, branches=False)
        return [(draft.token_ids, draft.acceptance) for draft in drafts]

    def observe(self, brought: list[tuple[list[int], int] | None]) -> None:
        """Take each sequence's tokens, and the position of the first that was read."""
        self.drafting.observe(
            [
                None if pair is None else Observation(torch.tensor(pair[0], device="cpu"), pair[1])
                for pair in brought
            ]
        )


def sendable(error: Exception) -> Exception:
    """Add the traceback to an error; one that cannot be sent becomes a `RuntimeError`.

    The `RuntimeError` keeps the words of the error.
    """
    note = "In the drafter's process:\n" + "".join(format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def keep_to_last_cores(count: int) -> None:
    """Restrict this process to the last `count` of the cores that it may use.

    Nothing changes if there are no more cores than that, or where the system does not allow it.
    """
    if sys.platform == "linux" and count < len(cores := sorted(os.sched_getaffinity(0))):
        with suppress(OSError):
            os.sched_setaffinity(0, cores[-count:])


def serve(connection: Connection, threads: int, own_cores: bool) -> None:
    """Answer questions until the other side ends.

    Questions are `(ended calls, call, method, arguments)`; each gets an answer or an exception.
    """
    # Ctrl-C ends the call on the other side, and then this connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if own_cores:
        keep_to_last_cores(threads)
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError), torch.inference_mode(), without_cudnn_attention():
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
                    calls[call] = Worker(drafter, target, *arguments)
                    # whether it wants to know the target's tokens
                    answer: Any = type(calls[call].drafting).observe is not Drafting.observe
                else:
                    answer = getattr(calls[call], method)(arguments)
            except Exception as error:
                answer = sendable(error)
            connection.send(answer)
