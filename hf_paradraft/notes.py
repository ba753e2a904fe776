"""Notes on an object, kept apart from it while it lives, so that its copies, pickles and saved
folders have nothing of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary


class Notes(dict[Hashable, Any]):
    """A table, and tables of further objects next to the one that it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.deeper: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


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
