"""The JSON rows that `paradraft bench --json` writes, one for each method, batch size and
temperature.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json

Record = Mapping[str, Any]
NUMBERS = ("batch_size", "temperature", "tokens_per_second", "speedup", "tau")
BY_CATEGORY = ("by_category", "tau_by_category")
SPLIT, MOST = ("draft", "verify", "engine"), 1e12
WANTED = {*NUMBERS, *BY_CATEGORY, "method", "speedup_quartiles", "matches_reference"}


def _is_record(row: Any) -> bool:
    if not isinstance(row, dict) or not row.keys() >= WANTED or not isinstance(row["method"], str):
        return False
    quartiles, by_category = row["speedup_quartiles"], [row[name] for name in BY_CATEGORY]
    if (
        not isinstance(quartiles, list)
        or len(quartiles) != 3
        or not all(isinstance(values, dict) for values in by_category)
    ):
        return False
    rates = row.get("acceptance_by_position", [])
    split = row.get("time_split", dict.fromkeys(SPLIT, 0))
    if not isinstance(rates, list) or not isinstance(split, dict) or split.keys() != {*SPLIT}:
        return False
    if "time_split" in row and "acceptance_by_position" not in row:
        return False
    share = row["matches_reference"]
    numbers = [
        *(row[name] for name in NUMBERS),
        *quartiles,
        *(value for values in by_category for value in values.values()),
    ]
    numbers += [*rates, *split.values(), *([] if share is None else [share])]
    # a bool is none
    return all(type(value) in (int, float) and abs(value) < MOST for value in numbers)


def read_bench(file: Path) -> list[dict[str, Any]]:
    """Read the records of a file that `paradraft bench --json` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    if not file.is_file():
        raise OSError(f"There is no file {file}: paradraft bench --json writes one.")
    rows = read_json(file, list)
    if not rows or not all(map(_is_record, rows)):
        raise ValueError(
            f"{file} is not what this version's paradraft bench --json writes: measure again."
        )
    return rows
