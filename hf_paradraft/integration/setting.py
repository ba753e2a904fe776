"""A drafter that stays: every `target.generate` drafts with it, from any caller (TRL, evaluation,
pipelines, agents).
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from ..admission import check_drafter
from ..auto import AutoDrafter
from ..notes import notes_on
from ..outer_names import innermost
from ..protocol import Drafter
from .pairing import check_same_tokenizer

_lock = Lock()


@dataclass(eq=False)
class Entry:
    """A drafter that is set, at once or in a block, until it has ended."""

    drafter: Drafter | None
    ended: bool = False


class set_drafter:
    """Let every `generate` of a target draft, from now on, or in a `with` block.

    The texts stay the target's own. A call that the loop cannot serve (beams, a cache of another
    kind) is decoded plainly, with one warning for each reason. `assistant_model=` and
    `custom_generate=` in a call win. Nothing of the drafter is copied, pickled or saved with the
    target.

    Args:
        target: the model; or a wrapper around it, of PEFT or `DistributedDataParallel`.
        drafter: as for `assistant_model`; it takes the place of one that was set before. None:
            draft no more. "auto": the one that `AutoDrafter.for_target` finds.

    Raises:
        ValueError: the drafter is none, or was made for another target.
    """

    def __init__(self, target: nn.Module, drafter: Drafter | Literal["auto"] | None = "auto"):
        self.target = innermost(target)
        drafter = AutoDrafter.for_target(self.target) if isinstance(drafter, str) else drafter
        if drafter is not None:
            check_drafter(drafter)
            check_same_tokenizer(self.target, drafter)
            drafter.attach(self.target)
        self.made, self.blocks, notes = Entry(drafter), list[Entry](), notes_on(self.target)
        with _lock:
            self.before, notes["set"] = notes.get("set", ()), (self.made,)

    def __enter__(self) -> Drafter | None:
        with _lock:
            # From here on it is set only for the block; the drafter before it comes back, unless
            # that one has ended.
            self._end(self.made, [entry for entry in self.before if not entry.ended])
            self.blocks.append(Entry(self.made.drafter))
            notes_on(self.target)["set"] += (self.blocks[-1],)
        return self.made.drafter

    def __exit__(self, *_: object) -> None:
        """Take this one away: blocks of several threads may overlap."""
        with _lock:
            self._end(self.blocks.pop(), [])

    def _end(self, entry: Entry, instead: list[Entry]) -> None:
        """Put others in the place of an entry, if it is set."""
        notes, entry.ended = notes_on(self.target), True
        notes["set"] = tuple(
            one for other in notes["set"] for one in (instead if other is entry else [other])
        )


def drafter_on(target: PreTrainedModel) -> Drafter | None:
    """Look up the drafter that is set on a model; None if there is none."""
    entries = notes_on(target).get("set")
    return entries[-1].drafter if entries else None
