"""Draft while verifying (PEARL, section 3): the drafter works on the next window while the target looks at this one.

The drafter's lane guesses behind the window that is being verified, as if all of it were accepted. If it is, and the target's own
next token is one of the guesses, what was guessed behind that one is the next window: nobody has waited (*post-verify*). If not,
the guesses are dropped, and the target reads its newest token alone while the drafter writes a new window (*pre-verify*); or the
drafter writes first, where it was seen to be so much faster than the target that this brings more.

Drafts are judged by the same rules as ever, and are drawn without looking at the target's draws; so outputs stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from ..hardware import input_device
from ..protocol import Draft, Drafter, Prefix
from .rows import Taken
from .window import Window


def check_overlap(model: PreTrainedModel, drafter: Drafter, recurrent: bool) -> None:
    """Refuse a drafter that cannot go on without the verification, and a target that cannot be overlapped.

    Raises:
        ValueError: with what to change.
    """
    who = type(drafter).__name__
    if drafter.needs(model):
        raise ValueError(
            f"overlap=True: {who} reads the target's hidden states, so its next window needs this one's: set overlap=False."
        )
    if drafter.riders() is not None:
        raise ValueError(
            f"overlap=True: {who} guesses in the target's own forward, and has nothing to do meanwhile: set it False."
        )
    if recurrent:
        raise ValueError(
            f"overlap=True: {type(model).__name__} has recurrent layers, which cannot be overlapped: set overlap=False."
        )


def device_of(drafter: Any) -> torch.device | None:
    """Where a drafter's model is: itself, or what it wraps; None for one without a model."""
    return getattr(getattr(drafter, "model", drafter), "device", None)


def works_apart(drafter: Any, target: PreTrainedModel) -> bool:
    """Whether a drafter has cores or a device of its own."""
    return getattr(drafter, "has_own_cores", False) or device_of(drafter) not in (None, input_device(target))


def likely_path(draft: Draft) -> list[int]:
    """The nodes of a draft from the first one down, always to the most probable child."""
    path: list[int] = []
    children = draft.children(-1)
    while children:
        path.append(children[0])
        children = draft.children(children[0])
    return path


def below(draft: Draft, token: int) -> Draft:
    """What a draft has behind the child of its root that is `token`; nothing if there is none."""
    ids = draft.token_ids
    root = next((node for node in draft.children(-1) if ids[node] == token), None)
    if root is None:
        return Draft.chain(draft.tokens[:0])
    place = {root: -1}
    for node, parent in enumerate(draft.parents):
        if parent in place and node != root:
            place[node] = len(place) - 1
    nodes = [node for node in place if node != root]
    where = torch.tensor(nodes, dtype=torch.long, device=draft.tokens.device)
    return Draft(
        draft.tokens[where],
        [place[draft.parents[node]] for node in nodes],
        None if draft.q is None or not nodes else draft.q[where.to(draft.q.device)],
        None if draft.beliefs is None else [draft.beliefs[node] for node in nodes],
    )


class Lane:
    """The drafter's thread, one job at a time: it begins with a verification and is waited for behind it.

    What belongs to a thread alone is set in it: no gradients, inference mode, autocast, a stream of its own on a GPU, and half of
    the CPU threads where both lanes share the cores.

    Args:
        device: of the target.
        drafter_device: of the drafter; None: it has none, and wants no threads.
    """

    def __init__(self, device: torch.device, drafter_device: torch.device | None):
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="paradraft-drafter")
        self.inference = torch.is_inference_mode_enabled()
        kind = device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self.shares = device.type == "cpu" and drafter_device is not None and drafter_device.type == "cpu"
        self.threads = torch.get_num_threads()
        on_gpu = drafter_device is not None and drafter_device.type == "cuda"
        self.stream = torch.cuda.Stream(drafter_device) if on_gpu else None
        self.begun = self.ended = 0.0

    def _work(self, job: Callable[[], Any]) -> Any:
        if self.shares and self.threads > 1:
            torch.set_num_threads(self.threads - self.threads // 2)
        autocast: Any = nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], dtype=self.autocast[1])
        with torch.inference_mode() if self.inference else torch.no_grad(), autocast, torch.cuda.stream(self.stream):
            self.begun = perf_counter()
            try:
                done = job()
                if self.stream is not None:
                    self.stream.synchronize()
                return done
            finally:
                self.ended = perf_counter()

    @contextmanager
    def beside(self, job: Callable[[], Any]) -> Iterator[Future]:
        """Do `job` in the lane while the block runs; behind the block it is over, whatever happens in either lane."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        future = self.executor.submit(self._work, job)
        if self.shares and self.threads > 1:
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

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)


class Overlap:
    """One call's windows.

    Args:
        lane: of the drafter.
        shape: makes drafts: `(prefixes) -> drafts`, run in the lane.
        window: what is known of their speed.
        adapts: whether windows follow what was measured; not where drafts are drawn, which would then depend on the clock.
    """

    def __init__(self, lane: Lane, shape: Callable[[list[Prefix]], list[Draft]], window: Window, adapts: bool = True):
        self.lane, self.shape, self.window, self.adapts = lane, shape, window, adapts
        self.on = True  # in this round
        self.size = 0  # tokens guessed in this round, at most
        self.paths: list[list[int]] = []  # of each row, the nodes that the lane takes for accepted
        self.ahead: list[Draft] = []  # of each row, what it guessed behind them
        self.windows: list[Draft] = []  # of each row, what is verified next
        self.asked: list[LongTensor] = []  # of each row, the prefix that the drafter was asked about last
        self.drafted_first = False  # in this round
        self.waited = self.hidden = 0.0  # seconds of the last round: behind the verification, and during it

    def begin(self, drafts: bool) -> None:
        """In a round that does not draft, nobody works ahead."""
        self.on = drafts
        self.waited = self.hidden = 0.0
        if not self.on:
            self.windows = []

    def drafts(self, prefixes: list[Prefix], reads_prompt: bool) -> list[Draft]:
        """What is ready to be verified, cut to the room that is left; where nothing is, what is drafted now, if that pays: not
        before the prompt was read, which takes both sides long."""
        self.drafted_first = self.adapts and self.window.drafts_first and not any(map(len, self.windows)) and not reads_prompt
        if self.drafted_first:
            size = self.window.size()
            return self.first([replace(prefix, room=min(prefix.room, size)) for prefix in prefixes])
        nothing = [Draft.chain(prefix.ids[0, :0]) for prefix in prefixes]
        return [
            window if prefix.room else none
            for window, none, prefix in zip(self.windows or nothing, nothing, prefixes, strict=True)
        ]

    def _asked(self, prefixes: list[Prefix]) -> list[Prefix]:
        """These prefixes, each with how much of it is as it was when the drafter was asked before."""
        before = self.asked or [prefix.ids[0, :0] for prefix in prefixes]
        self.asked = [prefix.ids[0].clone() for prefix in prefixes]
        found = []
        for prefix, old, new in zip(prefixes, before, self.asked, strict=True):
            most = min(len(old), len(new))
            wrong = (old[:most] != new[:most]).nonzero()
            found.append(replace(prefix, kept=int(wrong[0]) if len(wrong) else most))
        return found

    def first(self, prefixes: list[Prefix]) -> list[Draft]:
        """Drafts of a round that verifies afterwards."""
        return self.shape(self._asked(prefixes))

    @contextmanager
    def beside(self, prefixes: list[Prefix], drafts: list[Draft], most: int) -> Iterator[None]:
        """Let the drafter guess on while the block verifies `drafts`, as if each were accepted as far as it goes.

        Args:
            prefixes: of the rows, with room for what may follow in all.
            drafts: that are being verified.
            most: tokens guessed, at most.
        """
        self.size = min(most, self.window.size()) if self.adapts else most
        self.paths = [likely_path(draft) for draft in drafts]
        hoped = []
        for prefix, draft, path in zip(prefixes, drafts, self.paths, strict=True):
            ids = torch.cat([prefix.ids, draft.tokens[path][None]], dim=1)
            room = min(self.size, max(0, prefix.room - len(path)))  # one of them stands for the target's own token
            hoped.append(Prefix(ids, room, 0))
        if not any(prefix.room for prefix in hoped):
            self.ahead = [Draft.chain(prefix.ids[0, :0]) for prefix in hoped]
            self.size = 0
            yield
            return
        asked = self._asked(hoped)
        with self.lane.beside(lambda: self.shape(asked)) as future:
            yield
            verified = perf_counter()
        self.ahead = future.result()
        end = self.lane.ended
        self.hidden, self.waited = max(0.0, min(end, verified) - self.lane.begun), max(0.0, end - verified)

    def settle(self, drafts: list[Draft], taken: Sequence[Taken | None], tokens: Sequence[Tensor | None]) -> None:
        """Keep what was guessed behind rows that went as expected; drop the rest.

        Args:
            drafts: that were verified.
            taken: what each row got of its own; None for one that has ended.
            tokens: the rows' new tokens, the target's own last.
        """
        begin = 1 if self.on and not self.drafted_first else 0  # a window's first was the target's own token
        for draft, one in zip(drafts, taken, strict=True):
            for place in range(0 if one is None else min(one.judged, len(draft), self.window.most - begin)):
                self.window.observe_guess(begin + place, place < len(one.path))
        if not self.on:
            return
        self.windows = []
        for draft, likely, ahead, one, new in zip(drafts, self.paths, self.ahead, taken, tokens, strict=True):
            fits = one is not None and new is not None and one.path == likely and len(new) == len(one.path) + 1
            self.windows.append(below(ahead, int(new[-1])) if fits else Draft.chain(draft.tokens[:0]))
            if fits and len(ahead):
                self.window.observe_guess(0, any(ahead.token_ids[node] == int(new[-1]) for node in ahead.children(-1)))

    def observe(self, drafts: list[Draft], seconds: tuple[float, float, float]) -> None:
        """Learn from a round that drafted.

        Args:
            drafts: that were verified.
            seconds: in which the target waited for drafts, of its forward, and of the round.
        """
        draft, verify, whole = seconds
        if self.on and self.size:
            self.window.judged += any(map(len, drafts))
            self.window.verify.observe(1 + max(map(len, drafts)), whole - draft)
            self.window.draft.observe(self.size, self.lane.ended - self.lane.begun + whole - draft - verify)
