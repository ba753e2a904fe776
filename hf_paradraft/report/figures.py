"""Figures of measurements, all from the records that `paradraft bench --json` writes.

All but the one by batch size show the first batch size and temperature of the run.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import color_sequences
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from . import BLUE, GREEN, ORANGE
from .tables import SPLIT, Record, groups, printable


def _canvas(width: float = 5.5, height: float = 3.6) -> tuple[Figure, Any]:
    """Make a figure with its axes; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _first_group(rows: Sequence[Record]) -> list[Record]:
    return next(groups(rows))[1]


def _plain(name: str) -> str:
    """Let matplotlib write a dollar as a dollar, and read no mathematics after it."""
    return printable(name).replace("$", r"\$")


def by_task(
    rows: Sequence[Record], detail: str = "by_category", average: str = "speedup"
) -> Figure:
    """Draw speed-up (or τ) by category and over all, a group of bars for each.

    Over all, the bars show the mean of the speed-ups, or τ over all tokens.
    """
    rows = _first_group(rows)
    bars = {_plain(row["method"]): [*row[detail].values(), row[average]] for row in rows}
    categories = [*map(_plain, rows[0][detail]), "all"]
    figure, axes = _canvas(max(6.0, 1.9 * len(categories)), 4)
    colours = color_sequences["tab20"]
    DataFrame(bars, categories).plot.bar(ax=axes, width=0.8, rot=0, color=colours, legend=False)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel(
        "tokens per second ÷ plain generate's"
        if average == "speedup"
        else "τ: tokens per target forward"
    )
    figure.legend(loc="outside upper center", fontsize="small", ncols=5)
    return figure


def tau_by_task(rows: Sequence[Record]) -> Figure:
    """Draw τ by category, a group of bars for each."""
    return by_task(rows, "tau_by_category", "tau")


def _lines(
    lines: Mapping[str, Mapping[int, float]], powers: Sequence[int] = (), **labels: Any
) -> Figure:
    """Draw a line of points for each method, over whole numbers or these powers of two."""
    figure, axes = _canvas()
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=_plain(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(powers, powers)
    axes.set(**labels)
    axes.legend(fontsize="small")
    return figure


def tau_by_length(rows: Sequence[Record]) -> Figure | None:
    """Draw τ by the number of drafted tokens K; None without two lengths of one method.

    Methods that differ only in K, as `pard-chain-k4` and `pard-chain-k8`, are one line.
    """
    lines: dict[str, dict[int, float]] = {}
    for row in _first_group(rows):
        if match := re.fullmatch(r"(.+?)-k(\d+)(.*)", row["method"]):
            lines.setdefault(match[1] + match[3], {})[int(match[2])] = row["tau"]
    if all(len(points) < 2 for points in lines.values()):
        return None
    return _lines(
        lines, xlabel="K: drafted tokens", ylabel="τ: tokens per target forward", ylim=(1, None)
    )


def acceptance(rows: Sequence[Record]) -> Figure | None:
    """Draw how often each position of a chain was accepted where the one before was.

    The figure is None without chains of ours.
    """
    lines = {
        row["method"]: {
            position: 100 * rate for position, rate in enumerate(row["acceptance_by_position"], 1)
        }
        for row in _first_group(rows)
        if row.get("acceptance_by_position") and "chain" in row["method"]
    }
    if not lines:
        return None
    return _lines(
        lines, xlabel="draft position", ylabel="accepted where the one before was, %", ylim=(0, 102)
    )


def time_split(rows: Sequence[Record]) -> Figure | None:
    """Draw the time of a call by its parts, relative to plain's for the same tokens.

    The figure is None without methods of ours.
    """
    ours = [row for row in _first_group(rows) if "time_split" in row]
    if not ours:
        return None
    figure, axes = _canvas(6.5, 0.4 * len(ours) + 1.4)
    plain = _first_group(rows)[0]["tokens_per_second"]
    seconds = {
        part: [row["time_split"][part] * plain / row["tokens_per_second"] for row in ours]
        for part in SPLIT
    }
    names = [_plain(row["method"]) for row in ours]
    DataFrame(seconds, names).plot.barh(ax=axes, stacked=True, color=[BLUE, GREEN, ORANGE])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per token ÷ plain generate's")
    axes.legend(fontsize="small")
    return figure


def speedup_by_batch(rows: Sequence[Record]) -> Figure | None:
    """Draw the speed-up over plain decoding of the same batch, by batch size.

    Only the first temperature is shown. The figure is None for one size.
    """
    sizes = sorted({row["batch_size"] for row in rows})
    if len(sizes) < 2:
        return None
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["temperature"] == rows[0]["temperature"]:
            lines.setdefault(row["method"], {})[row["batch_size"]] = row["speedup"]
    return _lines(
        {name: points for name, points in lines.items() if len(points) > 1},
        sizes,
        xlabel="prompts answered together",
        ylabel="tokens per second ÷ plain generate's",
        ylim=(0, None),
    )


def latency_by_rows(rows: Sequence[Record]) -> Figure | None:
    """Draw the time of a target forward by its new tokens, relative to that of one token.

    The figure is None where the time was not measured.
    """
    if (latency := rows[0].get("latency")) is None:
        return None
    one = latency["seconds"][0]
    times = {
        count: seconds / one
        for count, seconds in zip(latency["rows"], latency["seconds"], strict=True)
    }
    return _lines(
        {"target": times},
        latency["rows"],
        xlabel="new tokens in a target forward",
        ylabel="time ÷ that of one token",
        ylim=(0, None),
    )


# of each picture: the key of its metadata that names the program
FORMATS = {
    ".png": "Software",
    ".svg": "Creator",
    ".pdf": "Creator",
}
MARK = "hf_paradraft bench"
FIGURES = {
    "speedup": by_task,
    "tau": tau_by_task,
    "tau-by-length": tau_by_length,
    "acceptance": acceptance,
    "time": time_split,
    "batches": speedup_by_batch,
    "latency": latency_by_rows,
}


def draw(rows: Sequence[Record], output: Path) -> Iterator[Path]:
    """Write figures, and name them.

    Args:
        rows: from `records`.
        output: a file, for speed-up by task (its suffix picks the format), or a folder, for every
            figure there is data for.
    """
    for file, figure_of in places(output).items():
        if (figure := figure_of(rows)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=120, metadata={FORMATS[file.suffix]: MARK})
            yield file


def places(output: Path) -> dict[Path, Callable[[Sequence[Record]], Figure | None]]:
    """List the files that `draw` may write, each with the function that draws it."""
    if output.suffix and not output.is_dir():
        return {output: by_task}
    return {output / f"{name}.png": figure_of for name, figure_of in FIGURES.items()}


def is_drawn_here(file: Path) -> bool:
    """Tell whether `draw` wrote a picture."""
    return MARK.encode() in file.read_bytes()
