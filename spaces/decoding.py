"""Run one way of decoding in a thread, and hand over its tokens as they are emitted."""

import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_paradraft import SpeculationConfig, SpeculationStats
from hf_paradraft.chat import Detokeniser
from hf_paradraft.protocol import RoundStreamer

FRAME = 0.1  # seconds between two pictures of a growing answer
OWN, DRAFTED = "the target's own", "drafted and accepted"


@dataclass
class Progress:
    """What is there of an answer.

    Attributes:
        ids: new tokens.
        origins: of each token: drafted and accepted, or the target's own.
        rounds: target forwards so far.
        seconds: since the call began.
        stats: of a finished call with one of our drafters.
        late: whether the time limit ended it.
    """

    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    stats: SpeculationStats | None = None
    late: bool = False

    @property
    def tokens_per_second(self) -> float:
        """So far."""
        return len(self.ids) / self.seconds if self.seconds else 0.0


class _Blocks(RoundStreamer):
    """Puts every block of new tokens, with its time, into a queue."""

    def __init__(self):
        self.blocks: Queue = Queue()
        self.first = True

    def put(self, value: torch.Tensor) -> None:
        """Put a token of plain decoding; first comes the prompt."""
        if not self.first:
            self.put_round(value.flatten().tolist(), 0)
        self.first = False

    def put_round(self, tokens: list[int], num_accepted: int) -> None:
        self.blocks.put((tokens, time.perf_counter()))

    def end(self) -> None:
        pass


class _Stop(StoppingCriteria):
    """Ends a call whose client has gone, or whose time is up."""

    def __init__(self, deadline: float):
        self.gone = threading.Event()
        self.deadline = deadline

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        stop = self.gone.is_set() or self.late
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool, device=input_ids.device)


def stream(
    target: PreTrainedModel,
    ids: torch.LongTensor,
    assistance: dict[str, Any],
    config: SpeculationConfig | None,
    deadline: float,
    seed: int,
    **arguments: Any,
) -> Iterator[Progress]:
    """Decode, and yield what is there about ten times a second; leaving the iteration stops the
    call.

    Args:
        target: answers.
        ids: int64 `(1, n)`, the prompt.
        assistance: arguments of `generate` for this method. One of our drafters is used through a
            copy with `config`.
        config: for our drafters.
        deadline: of `time.monotonic()`.
        seed: of sampling.
        arguments: of `generate`.

    Raises:
        Exception: what `generate` raised.
    """
    assistance = dict(assistance)
    if config is not None:
        assistance["assistant_model"] = copy.copy(assistance["assistant_model"])
        assistance["assistant_model"].speculation_config = config
    streamer, stop, outcome = _Blocks(), _Stop(deadline), {}

    def run() -> None:
        try:
            torch.manual_seed(seed)
            outcome["output"] = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([stop]),
                return_dict_in_generate=True,
                **assistance,
                **arguments,
            )
        except Exception as error:  # handed to the caller below
            outcome["error"] = error

    progress, began = Progress(), time.perf_counter()
    shown = began
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive() or not streamer.blocks.empty():
            try:
                block, when = streamer.blocks.get(timeout=0.05)
            except Empty:
                continue
            progress.ids += block
            progress.origins += [DRAFTED] * (len(block) - 1) + [OWN]
            progress.rounds += 1
            progress.seconds = when - began
            if streamer.blocks.empty() and when - shown > FRAME:  # drawing takes time from decoding
                shown = when
                yield progress
    finally:
        stop.gone.set()
        thread.join()
    if "error" in outcome:
        raise outcome["error"]
    progress.late = stop.late
    progress.stats = outcome["output"].get("speculation")
    yield progress


class Transcript:
    """An answer as (text, origin) pieces, decoded as it grows, whole characters only.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.detokeniser = Detokeniser(tokenizer)
        self.pieces: list[tuple[str, str]] = []
        self.done = 0  # tokens that are shown

    def update(self, progress: Progress) -> list[tuple[str, str]]:
        """All pieces, with what is new in `progress`."""
        for token, origin in zip(
            progress.ids[self.done :], progress.origins[self.done :], strict=True
        ):
            if new := self.detokeniser.push(token):
                self.pieces.append((new, origin))
        self.done = len(progress.ids)
        return list(self.pieces)
