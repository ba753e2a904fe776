"""A drafter that stays: every `target.generate` drafts with it, whoever calls it (TRL, evaluation, pipelines, agents)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from ..decoding.checks import check_drafter
from ..names import innermost
from ..notes import notes_on
from ..protocol import Drafter
from .pairing import check_same_tokenizer

_thread = threading.local()


class set_drafter:
    """Let every `generate` of a target draft, from now on, or in a `with` block.

    The texts stay the target's own. A call that the loop cannot serve (beams, a cache of another kind) is decoded plainly,
    with one warning for each reason. `assistant_model=` and `custom_generate=` in a call win. Nothing of the drafter is copied,
    pickled or saved with the target.

    Args:
        target: the model; or what is wrapped around it, by PEFT or `DistributedDataParallel`.
        drafter: as for `assistant_model`; it takes the place of one that was set before. None: draft no more.

    Raises:
        ValueError: the drafter is none, or was made for another target.
    """

    def __init__(self, target: nn.Module, drafter: Drafter | None):
        self.target = innermost(target)
        if drafter is not None:
            check_drafter(drafter)
            check_same_tokenizer(self.target, drafter)
            drafter.attach(self.target)
        self.drafter, notes = drafter, notes_on(self.target)
        self.made, self.blocks = [drafter], list[list[Drafter | None]]()  # what it has set: at once, and in blocks
        self.before, notes["set"] = notes.get("set", ()), (self.made,)

    def __enter__(self) -> Drafter | None:
        notes = notes_on(self.target)
        # What this object took the place of comes back behind its block, unless it has ended, or others have been set since.
        before = filter(None, self.before) if notes["set"] == (self.made,) else notes["set"]
        self.blocks.append([self.drafter])
        notes["set"] = (*before, self.blocks[-1])
        return self.drafter

    def __exit__(self, *_: object) -> None:
        """Take this one away: blocks of several threads may overlap."""
        notes, own = notes_on(self.target), self.blocks.pop()
        notes["set"] = tuple(other for other in notes["set"] if other is not own)
        own.clear()  # for whoever remembers it


def drafter_on(target: PreTrainedModel) -> Drafter | None:
    """Look up the drafter that is set on a model; None: there is none, or this thread is to decode plainly."""
    drafters = notes_on(target).get("set")
    return None if getattr(_thread, "plain", False) or not drafters else drafters[-1][0]


@contextmanager
def plainly() -> Iterator[None]:
    """Decode without the drafters that are set, in this thread, for the time of the block."""
    before, _thread.plain = getattr(_thread, "plain", False), True
    try:
        yield
    finally:
        _thread.plain = before
