"""Figures of what happened in a call."""

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from hf_paradraft import SpeculationStats
from hf_paradraft.protocol import RoundTrace
from hf_paradraft.report import BLUE, GREEN, GREY, ORANGE


def acceptance(stats: SpeculationStats) -> Figure:
    """How often each draft position was accepted, given that the one before was."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    rates = [100 * rate for rate in stats.acceptance_by_position]
    axes.bar(range(1, len(rates) + 1), rates, color=GREEN)
    axes.set(
        xlabel="draft position",
        ylabel="accepted, %",
        ylim=(0, 105),
        title="Accepted, where the one before was",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def round_times(stats: SpeculationStats) -> Figure:
    """Each round's time in the drafter, in the target, and in between."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(stats.trace)
    rest = [
        trace.total_seconds - trace.draft_seconds - trace.verify_seconds for trace in stats.trace
    ]
    parts = (
        ("draft", [trace.draft_seconds for trace in stats.trace], BLUE),
        ("verify", [trace.verify_seconds for trace in stats.trace], GREEN),
        ("engine", rest, ORANGE),
    )
    for label, seconds, colour in parts:
        axes.bar(
            range(1, len(seconds) + 1),
            [1000 * s for s in seconds],
            bottom=bottom,
            label=label,
            color=colour,
            width=1.0,
        )
        bottom = [low + 1000 * s for low, s in zip(bottom, seconds, strict=True)]
    axes.set(xlabel="round", ylabel="ms", title="Where the time of a round goes")
    axes.legend()
    return figure


def draft_tree(trace: RoundTrace, tokenizer: PreTrainedTokenizerBase) -> Figure:
    """A round's drafted tokens as a tree, the accepted path in green."""
    parents, accepted = trace.parents, set(trace.accepted)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    places: dict[int, tuple[float, float]] = {}
    leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        below = [place(child, depth + 1) for child in children.get(node, [])]
        if not below:
            leaves += 1
        # the first child is the likeliest: the best path is a straight line
        height = below[0] if below else -float(leaves)
        places[node] = (depth, height)
        return height

    place(-1, 0)
    deepest = max(depth for depth, _ in places.values())
    figure = Figure(figsize=(max(5, 0.9 * deepest + 1), max(1.2, 0.4 * leaves + 0.4)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for node, parent in enumerate(parents):
        colour = GREEN if node in accepted else GREY
        axes.plot(
            *zip(places[parent], places[node], strict=True),
            color=colour,
            linewidth=2.5 if node in accepted else 1,
            zorder=1,
        )
    for node, (depth, height) in places.items():
        colour = GREEN if node in accepted or node == -1 else GREY
        text = (
            "…"
            if node == -1
            else repr(tokenizer.decode([trace.drafted[node]]))[1:-1].replace(" ", "␣")
        )
        style = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour}
        axes.text(
            depth,
            height,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox=style,
            parse_math=False,
            zorder=2,
        )
    axes.margins(x=0.08, y=0.15)
    return figure
