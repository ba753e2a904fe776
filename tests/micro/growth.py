"""From pytest-benchmark's JSON to ratios, exponents and a log-log plot: `make micro`.

Times are ratios to a reference operation of the same run, so that a baseline means something on
another machine.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

BASELINE = Path(__file__).parent / "baseline.json"
SLOWER = 1.5  # times the baseline is worth a look

Ratios = dict[str, dict[str, dict[int, float]]]  # by operation, dimension and value


def ratios(results: dict) -> Ratios:
    """Median times ÷ the reference's."""
    every = [(entry["extra_info"], entry["stats"]["median"]) for entry in results["benchmarks"]]
    reference = next(seconds for info, seconds in every if info["operation"] == "reference")
    measured: Ratios = {}
    for info, seconds in every:
        if info["operation"] != "reference":
            line = measured.setdefault(info["operation"], {}).setdefault(info["dimension"], {})
            line[int(info["value"])] = seconds / reference
    return measured


def exponent(line: dict[int, float]) -> float:
    """p of time ~ size^p, where it grows fastest: between the two largest sizes."""
    (x, y), (larger, longer) = list(line.items())[-2:]
    return float(numpy.log(longer / y) / numpy.log(larger / x))


def worse_than_linear(measured: Ratios) -> list[str]:
    """Operations of a round that grow faster than its context; training rows have a mask as large
    as its square.
    """
    lines = {
        name: by["context"]
        for name, by in measured.items()
        if "context" in by and name != "training_rows"
    }
    return [name for name, line in lines.items() if exponent(line) > 1.1]


def load(file: Path) -> Ratios:
    """A committed baseline; JSON's keys as numbers again."""
    return {
        operation: {
            dimension: {int(value): ratio for value, ratio in line.items()}
            for dimension, line in lines.items()
        }
        for operation, lines in json.loads(file.read_text()).items()
    }


def plot(measured: Ratios) -> Figure:
    """Time over size, both logarithmic, a panel for each dimension."""
    dimensions = list(
        dict.fromkeys(dimension for lines in measured.values() for dimension in lines)
    )
    figure = Figure(figsize=(3.2 * len(dimensions), 3.6), layout="constrained")
    for axes, dimension in zip(
        figure.subplots(1, len(dimensions), sharey=True), dimensions, strict=True
    ):
        for number, (operation, lines) in enumerate(measured.items()):
            if dimension in lines:
                label = operation.replace("_", " ")
                axes.loglog(
                    *zip(*lines[dimension].items(), strict=True),
                    marker="o",
                    color=f"C{number}",
                    label=label,
                )
        axes.set_xlabel(dimension)
        axes.set_xticks(
            values := sorted(
                {value for lines in measured.values() for value in lines.get(dimension, ())}
            ),
            values,
        )
        axes.minorticks_off()
        axes.tick_params(axis="x", rotation=60)
    figure.axes[0].set_ylabel("time ÷ reference")
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(measured))
    return figure


def main(
    results: Annotated[Path, typer.Argument(help="Written by pytest --benchmark-json.")],
    write: Annotated[bool, typer.Option("--write", help="Make this the baseline.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the growth here.")] = None,
) -> None:
    """Show how operations grow and how they compare with the baseline."""
    measured = ratios(json.loads(results.read_text()))
    baseline = measured if write else load(BASELINE)
    table = Table("operation", "by", "grows as", "slowest ÷ baseline", title="Micro-benchmarks")
    late = [] if write else worse_than_linear(measured)
    for operation, lines in measured.items():
        for dimension, line in lines.items():
            worst = max(
                ratio / baseline[operation][dimension][value] for value, ratio in line.items()
            )
            table.add_row(operation, dimension, f"{dimension}^{exponent(line):.2f}", f"{worst:.2f}")
            late += [f"{operation} by {dimension}"] if worst > SLOWER else []
    Console().print(table)
    if write:
        BASELINE.write_text(json.dumps(measured, indent=1) + "\n")
    if figure is not None:
        plot(measured).savefig(figure, dpi=110)
    if late:
        raise SystemExit(
            f"Slower than {SLOWER} times the baseline, or worse than linear in context: "
            f"{', '.join(late)}"
        )


if __name__ == "__main__":
    typer.run(main)
