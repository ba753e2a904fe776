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


def read_bench(file: Path) -> list[dict[str, Any]]:
    """Records of a file.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    if not file.is_file():
        raise OSError(f"There is no file {file}: paradraft bench --json writes one.")
    rows = read_json(file, list)
    if not rows or not all(isinstance(row, dict) and row.keys() >= WANTED for row in rows):
        raise ValueError(f"{file} is not what this version's paradraft bench --json writes: measure again.")
    return rows
