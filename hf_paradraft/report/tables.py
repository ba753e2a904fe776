"""The records that `paradraft bench --json` writes, one for each method, batch size and
temperature, and their tables, for the terminal and as Markdown.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, OverflowMethod
from rich.markup import escape
from rich.table import Table

from ..files import read_json

Record = Mapping[str, Any]
NUMBERS = ("batch_size", "temperature", "tokens_per_second", "speedup", "tau")
SPLIT = ("draft", "verify", "engine")  # parts of a call's time
MOST = 1e12  # for a number of a record
COLUMNS = 4  # categories next to each other, where there are many


def _is_record(row: Any) -> bool:
    try:
        low, middle, high = row["speedup_quartiles"]
        share = row["matches_reference"]
        numbers = [
            *(row[name] for name in NUMBERS),
            *(low, middle, high, 0 if share is None else share),
            *row["by_category"].values(),
            *row["tau_by_category"].values(),
            *row.get("acceptance_by_position", ()),
        ]
        if "time_split" in row:
            numbers += [*row["acceptance_by_position"], *(row["time_split"][n] for n in SPLIT)]
        # a bool is none
        return isinstance(row["method"], str) and all(
            type(value) in (int, float) and abs(value) < MOST for value in numbers
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


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


def printable(name: str) -> str:
    """Replace characters of a foreign name that a terminal would obey, or that end its line."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in name)


def _shown(name: str) -> str:
    return escape(printable(name))


def _escape_cell(name: str) -> str:
    """Keep a name within a cell of Markdown."""
    return printable(name).replace("|", "/")


def groups(rows: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Yield groups of records of one batch size and temperature, each after its title.

    Records of a group can be compared.
    """
    for (size, temperature), group in groupby(
        rows, lambda row: (row["batch_size"], row["temperature"])
    ):
        kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        yield f"batch {size}, {kind}", list(group)


def _format_figures(row: Record) -> list[str]:
    """Format a record's speed, speed-up, quartiles, τ and equality."""
    low, _, high = row["speedup_quartiles"]
    share = row["matches_reference"]
    return [
        f"{row['tokens_per_second']:.0f}",
        f"{row['speedup']:.2f}",
        f"{low:.2f}–{high:.2f}",
        f"{row['tau']:.2f}",
        "–" if share is None else f"{share:.0%}",
    ]


def table(rows: Sequence[Record], title: str) -> Group:
    """Make tables for 80 columns: methods on average, by category, inside our own rounds.

    Args:
        rows: from `records`.
        title: above them.
    """
    made = []
    for kind, group in groups(rows):
        average = _table(
            f"{title}, {kind}", ("tokens/s", "speed-up", "quartiles", "τ", "equal (fp32)")
        )
        average.columns[3].no_wrap = True  # a range stays on one line
        best = max(row["speedup"] for row in group)
        for row in group:
            average.add_row(
                _shown(row["method"]),
                *_format_figures(row),
                style="bold green" if row["speedup"] == best else None,
            )
        made += (
            [average, *_by_category(group, kind)] if len(group[0]["by_category"]) > 1 else [average]
        )
        if ours := [row for row in group if "time_split" in row]:
            made.append(_time_table(ours, kind))
    return Group(*made)


def _table(title: str, columns: Iterable[str], overflow: OverflowMethod = "ellipsis") -> Table:
    """Make an empty table with a column of methods, and columns of figures."""
    made = Table(title=title, title_justify="left")
    made.add_column("method", no_wrap=True)
    for name in columns:
        made.add_column(name, justify="right", overflow=overflow, min_width=3)
    return made


def _by_category(rows: Sequence[Record], kind: str) -> Iterator[Table]:
    """Yield tables of the speed-up by category; many categories are shown a few at a time."""
    names = list(rows[0]["by_category"])
    columns = COLUMNS if len(names) > COLUMNS + 2 else len(names)
    best = max(row["speedup"] for row in rows)
    for begin in range(0, len(names), columns):
        shown = names[begin : begin + columns]
        made = _table(f"speed-up by category, {kind}", map(_shown, shown), "fold")
        for row in rows:
            values = [f"{row['by_category'][name]:.2f}" for name in shown]
            made.add_row(
                _shown(row["method"]),
                *values,
                style="bold green" if row["speedup"] == best else None,
            )
        yield made


def _time_table(rows: Sequence[Record], kind: str) -> Table:
    """Make the table of time shares and of acceptance by position."""
    made = _table(f"inside a call, %, {kind}", (*SPLIT, "accepted at 1", "2", "4", "8"))
    for row in rows:
        rates = row["acceptance_by_position"]
        made.add_row(
            _shown(row["method"]),
            *(f"{100 * row['time_split'][part]:.0f}" for part in SPLIT),
            *(
                f"{100 * rates[position - 1]:.0f}" if position <= len(rates) else "–"
                for position in (1, 2, 4, 8)
            ),
        )
    return made


def markdown(rows: Sequence[Record], by_category: bool = True) -> str:
    """Render records as Markdown tables, one for each batch size and temperature.

    Args:
        rows: from `records`.
        by_category: whether each category's speed-up has a column; else there are two, for the
            best and the worst.
    """
    grouped = list(groups(rows))
    parts = []
    for kind, group in grouped:
        categories = (
            [*map(_escape_cell, group[0]["by_category"])]
            if by_category
            else ["best category", "worst"]
        )
        lines = [
            "| method | tokens/s | speed-up | quartiles over prompts | τ | equal (fp32) | "
            f"{' | '.join(categories)} |",
            "|---|" + "---:|" * (5 + len(categories)),
        ]
        for row in group:
            cells = _format_figures(row)
            cells[1] = f"**{cells[1]}**"
            speeds = row["by_category"]
            last = [f"{value:.2f}" for value in speeds.values()]
            if not by_category:
                ends = max(speeds, key=speeds.get), min(speeds, key=speeds.get)
                last = [f"{_escape_cell(name)} {speeds[name]:.2f}" for name in ends]
            lines.append(f"| {' | '.join([_escape_cell(row['method']), *cells, *last])} |")
        heading = f"{kind[0].upper()}{kind[1:]}:\n\n" if len(grouped) > 1 else ""
        parts.append(heading + "\n".join(lines) + "\n")
    return "\n".join(parts)
