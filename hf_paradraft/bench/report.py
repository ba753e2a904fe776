"""From measurements to records, a table and a plot."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from .measure import Measurement


def speedups(results: Sequence[Measurement], method: str, category: str | None = None) -> list[float]:
    """Per prompt: the method's tokens per second over plain's."""
    wanted = [r for r in results if category is None or r.category == category]
    reference = results[0].method
    ours = [r for r in wanted if r.method == method]
    plain = [r for r in wanted if r.method == reference]
    return [(o.tokens / o.seconds) / (p.tokens / p.seconds) for o, p in zip(ours, plain, strict=True)]


def records(results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One record per method.

    Each has `method`, `tokens`, `seconds`, `tokens_per_second`, `speedup` (the mean over categories of the median over prompts),
    `tau` (tokens per row and target forward, bonus included), `matches_reference` (share of prompts with plain's output, or
    None), `by_category` and `speedup_quartiles` over all prompts.
    """
    made = []
    categories = list(dict.fromkeys(r.category for r in results))
    for method in dict.fromkeys(r.method for r in results):
        mine = [r for r in results if r.method == method]
        tokens, seconds = sum(r.tokens for r in mine), sum(r.seconds for r in mine)
        by_category = {category: median(speedups(results, method, category)) for category in categories}
        every = speedups(results, method)
        same = [r.same for r in mine]
        made.append(
            {
                "method": method,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "speedup": mean(by_category.values()),
                "speedup_quartiles": quantiles(every, n=4) if len(every) > 1 else every * 3,
                "tau": tokens / sum(r.forwards * r.rows for r in mine),
                "matches_reference": None if None in same else mean(same),
                "by_category": by_category,
                "tau_by_category": {
                    category: sum(r.tokens for r in mine if r.category == category)
                    / sum(r.forwards * r.rows for r in mine if r.category == category)
                    for category in categories
                },
            }
        )
    return made


def table(rows: Sequence[dict[str, Any]], title: str) -> Group:
    """Two tables that fit a terminal of 80 columns: every method on average, and its speed-up by category.

    Args:
        rows: from `records`.
        title: above them.
    """
    average = Table(title=title, title_justify="left")
    average.add_column("method", no_wrap=True)
    for name in ("tokens/s", "speed-up", "quartiles", "τ", "equal (fp32)"):
        average.add_column(name, justify="right")
    detail = Table(title="speed-up by category", title_justify="left")
    detail.add_column("method", no_wrap=True)
    for category in rows[0]["by_category"]:
        detail.add_column(category, justify="right")
    best = max(row["speedup"] for row in rows)
    for row in rows:
        share = row["matches_reference"]
        low, _, high = row["speedup_quartiles"]
        style = "bold green" if row["speedup"] == best else None
        average.add_row(
            row["method"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}×",
            f"{low:.2f}–{high:.2f}",
            f"{row['tau']:.2f}",
            "–" if share is None else f"{share:.0%}",
            style=style,
        )
        detail.add_row(row["method"], *(f"{value:.2f}" for value in row["by_category"].values()), style=style)
    return Group(average, detail)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same figures as a Markdown table, speed-ups by category included."""
    categories = list(rows[0]["by_category"])
    lines = [
        f"| method | tokens/s | speed-up | quartiles over prompts | τ | equal (fp32) | {' | '.join(categories)} |",
        "|---|" + "---:|" * (5 + len(categories)),
    ]
    for row in rows:
        low, _, high = row["speedup_quartiles"]
        share = row["matches_reference"]
        cells = [
            f"{row['tokens_per_second']:.0f}",
            f"**{row['speedup']:.2f}**",
            f"{low:.2f}–{high:.2f}",
            f"{row['tau']:.2f}",
            "–" if share is None else f"{share:.0%}",
            *(f"{value:.2f}" for value in row["by_category"].values()),
        ]
        lines.append(f"| {row['method']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], file: Path, figure_of: Literal["speedup", "tau"] = "speedup") -> None:
    """Speed-up or τ by category, a group of bars per category; the file's suffix picks the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    detail, label = {
        "speedup": ("by_category", "tokens per second ÷ plain generate's"),
        "tau": ("tau_by_category", "τ: tokens per target forward"),
    }[figure_of]
    categories = [*rows[0]["by_category"], "average"]
    figure, axes = pyplot.subplots(figsize=(1.9 * len(categories), 4), layout="constrained")
    width = 0.8 / len(rows)
    colours = pyplot.get_cmap("tab20")
    for index, row in enumerate(rows):
        heights = [*row[detail].values(), row[figure_of]]
        axes.bar(
            [i + index * width for i in range(len(categories))], heights, width, label=row["method"], color=colours(index % 20)
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(categories))], categories)
    axes.set_ylabel(label)
    figure.legend(loc="outside upper center", fontsize="small", ncols=5)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
