"""The picture of the floors, from the code's own imports: part of `make pictures`."""

import tomllib
from pathlib import Path

import grimp
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hf_paradraft.report import BLUE, GREY

ROOT = Path(__file__).parents[1]
WHAT = {
    "cli": "the paradraft command",
    "serve": "the OpenAI endpoint",
    "demo": "what it shows",
    "bench": "measuring",
    "integration": "the doors into transformers",
    "pearl": "drafting while the target verifies",
    "auto": "AutoDrafter",
    "drafters": "a folder for each kind",
    "hub": "cards and commits",
    "report": "tables and figures",
    "training": "one run for every kind",
    "continuous": "many prompts through one batch",
    "admission": "which calls are served, on which terms",
    "copies": "tokens copied from texts",
    "rules": "of acceptance beyond greedy decoding",
    "decoding": "the engine: draft, verify, accept, roll back",
    "protocol": "what drafters and engine say to each other",
}
HEIGHT, HALF = 0.62, 3.4


def floors() -> list[list[str]]:
    """The parts from the top down, as the contract in pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "Floors")
    return [[part.strip().split(".")[1] for part in layer.split(":")] for layer in layers]


def imports() -> dict[str, set[str]]:
    """Which parts each part imports."""
    graph, parts = grimp.build_graph("hf_paradraft"), {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            above, below = (
                name.split(".")[1] if "." in name else "" for name in (importer, imported)
            )
            if above and below and above != below:
                parts.setdefault(above, set()).add(below)
    return parts


def draw() -> Figure:
    """Floors from the top down. An arrow is an import that no chain of others implies; the ground
    is everyone's.
    """
    below = imports()
    levels = {part: level for level, floor in enumerate(floors()) for part in floor}

    def all_below(part: str) -> set[str]:
        return below.get(part, set()).union(*(all_below(other) for other in below.get(part, set())))

    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    for level, floor in enumerate(floors()):
        name, what = (
            (floor[0], WHAT[floor[0]])
            if len(floor) == 1
            else ("", "used by all: " + " · ".join(floor))
        )
        axes.text(-HALF + 0.15, -level, name, va="center", fontsize=12, weight="bold")
        axes.text(
            -HALF + 1.85 if name else 0,
            -level,
            what,
            va="center",
            ha="left" if name else "center",
            fontsize=10,
            color=GREY,
        )
        axes.add_patch(
            Rectangle((-HALF, -level - HEIGHT / 2), 2 * HALF, HEIGHT, fill=False, edgecolor=GREY)
        )
    arrow = {"arrowstyle": "-|>", "color": BLUE, "shrinkA": 0, "shrinkB": 0}
    spans = set()
    for part, others in below.items():
        direct = {
            other
            for other in others
            if not any(other in all_below(between) for between in others - {other})
        }
        spans |= {
            (levels[other] - levels[part], levels[part])
            for other in direct
            if levels[other] < len(floors()) - 1
        }
    assert all(span > 0 for span, _ in spans), "something imports what stands above it"
    for index, (span, level) in enumerate(sorted(spans)):
        if span == 1:
            axes.annotate(
                "", (0, HEIGHT / 2 - level - 1), (0, -HEIGHT / 2 - level), arrowprops=arrow
            )
        else:
            x = HALF + 0.2 * (1 + index - sum(other == 1 for other, _ in spans))
            axes.plot([HALF, x, x], [-level, -level, -level - span], color=BLUE, linewidth=1.2)
            axes.annotate("", (HALF, -level - span), (x, -level - span), arrowprops=arrow)
    axes.set(xlim=(-HALF - 0.1, HALF + 0.2 * len(spans)), ylim=(-len(floors()) + 0.4, 0.6))
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).parent / "architecture.png", dpi=90)
