"""Training texts apart from what drafters are measured on: none may share a run of 13 words with it
(Brown et al., 2020, C).
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

WORDS = 13  # of a run
SHORT = (
    5  # words of a text that is shorter than a run, and counts as one; fewer are names and roles
)
# Chinese and Japanese have no spaces
WORD = re.compile(r"[\u3041-\u30ff\u3400-\u9fff]|[^\W\u3041-\u30ff\u3400-\u9fff]+")


def texts_in(row: Any) -> Iterator[str]:
    """Yield every text in a JSON value, at any nesting depth, except for system turns.

    All rows of a set may share system turns.
    """
    if isinstance(row, str):
        yield row
    elif isinstance(row, dict | list) and not (
        isinstance(row, dict) and "system" in (row.get("role"), row.get("from"))
    ):
        for part in row.values() if isinstance(row, dict) else row:
            yield from texts_in(part)


def runs_in(row: Any) -> set[tuple[str, ...]]:
    """Collect the runs of 13 consecutive words in a row's texts, and shorter texts whole.

    Case and punctuation do not count. Texts of fewer than `SHORT` words are left out.
    """
    runs: set[tuple[str, ...]] = set()
    for text in texts_in(row):
        words = WORD.findall(text.lower())
        if SHORT <= len(words) < WORDS:
            runs.add(tuple(words))
        runs.update(zip(*(words[begin:] for begin in range(WORDS)), strict=False))
    return runs


def disjoint(rows: Iterable[Any], measured: Iterable[Any]) -> list[Any]:
    """Keep the rows that share no run of 13 words with any row that drafters are measured on."""
    avoided = set().union(*map(runs_in, measured))
    return [row for row in rows if avoided.isdisjoint(runs_in(row))]
