"""Notes on an object, kept apart from it while it lives, so that its copies, pickles and saved
folders have nothing of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable
from typing import Any

from transformers import PreTrainedModel


class Notes(dict[Hashable, Any]):
    """A table, and tables of further objects next to the one that it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.deeper: weakref.WeakKeyDictionary[Any, Notes] = weakref.WeakKeyDictionary()


_everything = Notes()


def notes_on(*owners: Any) -> Notes:
    """Look up the table about an object, or about several together.

    The table lives as long as all of them, and keeps none alive.

    Args:
        owners: objects that can be hashed, and weakly referenced.
    """
    notes = _everything
    for owner in owners:
        notes = notes.deeper.setdefault(owner, Notes())
    return notes


def of_pair(model: Any, drafter: Any) -> dict[Any, Any]:
    """Look up the objects that all calls of a target and a drafter share while both live.

    There are none if the drafter cannot be hashed.
    """
    return notes_on(model, drafter) if type(drafter).__hash__ is not None else {}


def pair(drafter: Any, target: PreTrainedModel, **shared: Any) -> Any:
    """Look up or make a drafter's view of one target.

    It has the drafter's weights, and the things that only this target shares with the drafter.

    Args:
        drafter: a module; its copies and pickles hold nothing of a target.
        target: not kept alive.
        shared: the attributes that the pair has of its own; given where it is made, and again where
            they have changed.
    """
    notes = notes_on(drafter, target)
    view = notes.get("view")
    if view is None or any(getattr(view, name) != value for name, value in shared.items()):
        notes["view"] = view = copy.copy(drafter if view is None else view)
        view.__dict__.update(shared)
    view.__dict__["speculation_config"] = drafter.speculation_config
    return view


def remember_target(drafter: Any, target: PreTrainedModel) -> None:
    """Note the target that a drafter was attached to last, for `draft_logits`.

    Neither keeps the other alive.
    """
    notes_on(drafter)["target"] = weakref.ref(target)


def last_target(drafter: Any) -> PreTrainedModel:
    """Look up the target that a drafter was attached to last.

    Raises:
        ValueError: it was attached to none, or that one is gone.
    """
    reference = notes_on(drafter).get("target")
    if reference is None or (target := reference()) is None:
        raise ValueError(f"A {drafter.title} drafts with its target: attach(target) first.")
    return target
