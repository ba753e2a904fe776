"""Tasks with checkable answers, made by generators, for the embedded family to learn and to be
measured on.

Held-out prompts are disjoint from training prompts by construction: a prompt's hash decides which
side it is on.
"""

import hashlib
from collections.abc import Callable, Iterator
from random import Random

from .arithmetic import make_word_problem
from .calendar import make_calendar_question
from .dialogue import make_dialogue
from .functions import make_functions
from .records import make_csv, make_json
from .task import Task

CATEGORIES: dict[str, Callable[[Random], Task]] = {
    "functions": make_functions,
    "word problems": make_word_problem,
    "dates and units": make_calendar_question,
    "JSON": make_json,
    "CSV": make_csv,
    "dialogue": make_dialogue,
}

HELD_OUT_SHARE = 1 / 16


def is_held_out(prompt: str) -> bool:
    """Whether `prompt` belongs to evaluation; the same answer on every machine."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def tasks(category: str, seed: int, held_out: bool) -> Iterator[Task]:
    """An endless stream of tasks of one category, all on one side of the split.

    Args:
        category: a key of `CATEGORIES`.
        seed: the same seed gives the same stream.
        held_out: the evaluation side or the training side.
    """
    rng = Random(f"{category}/{seed}/{held_out}")
    while True:
        task = CATEGORIES[category](rng)
        if is_held_out(task.prompt) == held_out:
            yield task
