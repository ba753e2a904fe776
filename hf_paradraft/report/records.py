"""The JSON rows that `paradraft bench --json` writes, one for each method, batch size and temperature."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import read_json

Record = Mapping[str, Any]
WANTED = {
    "method", "batch_size", "temperature", "tokens_per_second", "speedup", "speedup_quartiles", "tau", "by_category",
    "tau_by_category", "matches_reference",
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_record(row: Any) -> bool:
    if not isinstance(row, dict) or not row.keys() >= WANTED or not isinstance(row["method"], str):
        return False
    by_name = (row["by_category"], row["tau_by_category"])
    if not isinstance(row["speedup_quartiles"], list) or not all(isinstance(values, dict) for values in by_name):
        return False
    alone = [row[name] for name in ("batch_size", "temperature", "tokens_per_second", "speedup", "tau")]
    return all(map(_is_number, [*alone, *row["speedup_quartiles"], *by_name[0].values(), *by_name[1].values()]))


def read_bench(file: Path) -> list[dict[str, Any]]:
    """Records of a file.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    if not file.is_file():
        raise OSError(f"There is no file {file}: paradraft bench --json writes one.")
    rows = read_json(file, list)
    if not rows or not all(map(_is_record, rows)):
        raise ValueError(f"{file} is not what this version's paradraft bench --json writes: measure again.")
    return rows
