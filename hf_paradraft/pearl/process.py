"""A drafter in a process of its own: next to an overlapped verification no interpreter is shared,
only ids cross.

Threads of one process take turns at the interpreter, which small eager forwards need most of the
time; two processes do not.
"""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import RLock
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..decoding.target_head import TargetHead
from ..protocol import Drafter, Drafting, GuessedTokens, Observation, Prefix, SpeculationConfig
from .loop import device_of
from .worker import serve

PROCESS_NAME = "paradraft-drafter"
END_SECONDS = 10.0  # seconds until a process that does not end by itself is ended


def end(connection: Connection, process: BaseProcess) -> None:
    """Tell the other side to end, and wait for it."""
    with suppress(OSError):
        connection.send(None)
    connection.close()
    process.join(END_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


class ProcessDrafter(Drafter):
    """A drafter that runs another drafter in a process of its own, for `overlap=True`.

    The other drafter works on its own, and its process has threads of its own. The process starts
    with the first call, takes a copy of the drafter, and ends with `close`, with the `with` block,
    or when this object is held no more. As with all spawned processes, a script that starts one
    needs `if __name__ == "__main__":`. Under `rejection` its drafts count as certain, for
    distributions do not cross.

    Args:
        drafter: PARD, autoregressive, n-gram, or anything that reads nothing of the target and can
            be pickled.
        threads: CPU threads of the process; default: half of this one's. The first one keeps to as
            many cores, on Linux.
    """

    def __init__(self, drafter: Drafter, threads: int | None = None):
        self.drafter, self.speculation_config = drafter, drafter.speculation_config
        self.threads = threads or max(1, torch.get_num_threads() // 2)
        self.name_or_path, self.found_under = drafter.name_or_path, drafter.found_under
        self.lock, self.numbers, self.ended = RLock(), itertools.count(), deque[int]()
        self.served: PretrainedConfig | None = None
        self.process: BaseProcess | None = None
        self.finish: Any = lambda: None
        self.apart = RemoteDrafter(self)

    @property
    def config(self) -> Any:
        """The drafter's, by which vocabularies are compared."""
        return getattr(self.drafter, "config", None)

    def attach(self, target: PreTrainedModel) -> None:
        """Check the drafter with `target`, and start its process.

        Raises:
            ValueError: it cannot draft for `target`, stands on the target's own weights or states,
                or cannot be sent to another process.
            RuntimeError: its process did not start.
        """
        who = type(self.drafter).__name__
        self.drafter.attach(target)
        borrows = any(isinstance(value, TargetHead) for value in vars(self.drafter).values())
        if borrows or self.drafter.needs(target) or self.drafter.guesses_in_target:
            raise ValueError(
                f"{who} stands on the target, so it has to be in the target's process: pass it as "
                "it is."
            )
        with self.lock:
            if self.served is target.config and self.process.is_alive():
                return
            self.close()
            try:
                sent = pickle.dumps((self.drafter, type(target), target.config))
            except Exception as error:
                raise ValueError(
                    f"{who}, or the target's class, cannot be sent to another process: {error}"
                ) from error
            context = get_context("spawn")
            connection, other = context.Pipe()
            # others keep to the last cores
            alone = all(child.name != PROCESS_NAME for child in active_children())
            process = context.Process(
                target=serve, args=(other, self.threads, alone), name=PROCESS_NAME, daemon=True
            )
            process.start()
            other.close()
            self.connection, self.process = connection, process
            self.finish = weakref.finalize(self, end, connection, process)
            try:
                connection.send_bytes(sent)
                failed = connection.recv()
            except (EOFError, OSError):
                failed = RuntimeError(
                    f"{who}'s process did not start; a script that starts one needs `if __name__ "
                    "== '__main__':` around its work."
                )
            except BaseException as error:
                failed = error
            if failed is not None:
                self.close()
                raise failed
            self.served = target.config

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call that does not overlap, with the drafter in this process.

        The drafter is still here too, and no other process has to be woken.
        """
        here = object.__new__(type(self.drafter))  # with the same weights, and options of its own
        here.__dict__.update(vars(self.drafter), speculation_config=self.speculation_config)
        return here.start_drafting(target, max_length)

    def ask(self, process: BaseProcess, call: int, method: str, arguments: Any) -> Any:
        """Call a method of the worker and return its result.

        Raises:
            RuntimeError: the process is gone.
            Exception: the worker's own error.
        """
        with self.lock:
            if process is not self.process or self.served is None:
                raise RuntimeError(
                    "The drafter's process was ended under this call, by `close` or by a call with "
                    "another target."
                )
            ended = [self.ended.popleft() for _ in range(len(self.ended))]
            try:
                self.connection.send((ended, call, method, arguments))
                answer = self.connection.recv()
            except (EOFError, OSError) as error:
                process.join(END_SECONDS)
                self.close()
                raise RuntimeError(
                    f"The drafter's process ended, exit code {process.exitcode}: the next call "
                    "starts another."
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


class RemoteDrafter(Drafter):
    """The drafter in the other process, as an overlapped call asks it.

    Args:
        owner: the owner of the process; not kept alive.
    """

    def __init__(self, owner: ProcessDrafter):
        self.owner = weakref.ref(owner)

    @property
    def device(self) -> torch.device | None:
        """Its device in its process."""
        return device_of(self.owner().drafter)

    def attach(self, target: PreTrainedModel) -> None:
        """Attach the owner's drafter."""
        self.owner().attach(target)

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> ProcessDrafting:
        """Begin a `generate` call over there."""
        return ProcessDrafting(self.owner(), self.speculation_config, max_length)


class ProcessDrafting(Drafting):
    """One `generate` call, on the target's side.

    Args:
        drafter: the drafter with the process.
        config: the options of the call.
        max_length: tokens of a sequence at most.
    """

    def __init__(self, drafter: ProcessDrafter, config: SpeculationConfig, max_length: int):
        self.drafter, self.process, self.call = drafter, drafter.process, next(drafter.numbers)
        weakref.finalize(self, drafter.ended.append, self.call)
        self.learns = self._ask("begin", (config, max_length))

    def _ask(self, method: str, arguments: Any) -> Any:
        return self.drafter.ask(self.process, self.call, method, arguments)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Ask the worker for its drafts, and return them as `GuessedTokens`."""
        asked = [(prefix.ids[0].tolist(), prefix.room, prefix.kept) for prefix in prefixes]
        return [
            GuessedTokens(prefix.ids.new_tensor(tokens), acceptance=acceptance)
            for prefix, (tokens, acceptance) in zip(
                prefixes, self._ask("propose", asked), strict=True
            )
        ]

    def observe(self, observations: list[Observation | None]) -> None:
        """Send the target's tokens to the process, if its drafter learns from them.

        Only ids are sent, for no features are asked for.
        """
        if self.learns:
            self._ask(
                "observe",
                [
                    None if seen is None else (seen.tokens.tolist(), seen.begin)
                    for seen in observations
                ],
            )
