"""The picture of the floors, from the code's own imports: part of `make pictures`."""

from pathlib import Path

import grimp
from matplotlib.figure import Figure

from hf_paradraft.report.palette import BLUE, GREY

FLOORS = [
    ["cli"],
    ["demo"],
    ["bench"],
    ["integration"],
    ["auto"],
    ["drafters"],
    ["hub"],
    ["report"],
    ["training"],
    ["decoding"],
    ["trees"],
    ["protocol"],
    ["files", "hardware", "chat"],
]


def imports() -> dict[tuple[str, str], int]:
    """How many modules of one part import one of another."""
    graph, found = grimp.build_graph("hf_paradraft"), {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = tuple(name.split(".")[1] for name in (importer, imported) if "." in name)
            if len(pair) == 2 and pair[0] != pair[1]:
                found[pair] = found.get(pair, 0) + 1
    return found


def draw() -> Figure:
    """Floors from the top down, arrows to what is imported; the more modules do, the stronger."""
    places = {}
    for level, floor in enumerate(FLOORS):
        for index, name in enumerate(floor):
            places[name] = (3.0 * index - 1.5 * (len(floor) - 1), -float(level))
    figure = Figure(figsize=(8, 9.5), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    for (above, below), count in imports().items():
        (x, y), (to_x, to_y) = places[above], places[below]
        assert y > to_y, f"{above} imports {below}, which stands above it"
        side = 0.35 * (y - to_y) / len(FLOORS) * (1 if (y - to_y) % 2 else -1)
        style = {
            "arrowstyle": "->",
            "color": BLUE,
            "alpha": min(0.9, 0.25 + 0.05 * count),
            "linewidth": min(3.0, 0.6 + 0.15 * count),
        }
        style |= {"connectionstyle": f"arc3,rad={side * 3:.2f}", "shrinkA": 12, "shrinkB": 12}
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)
    for name, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": GREY}
        axes.text(x, y, name, ha="center", va="center", fontsize=11, bbox=box, zorder=3)
    axes.set(xlim=(-5.5, 5.5), ylim=(-len(FLOORS) + 0.4, 0.6))
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).parent / "architecture.png", dpi=90)
