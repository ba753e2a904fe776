"""How drafters are compared: a name and an option for each way to use one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..protocol import Drafter, SpeculationConfig
from ..protocol.config import TreeSize


@dataclass(frozen=True)
class Variant:
    """One way to use a drafter, under the name that it has in benchmarks."""

    name: str
    drafter: Drafter
    config: SpeculationConfig


def with_prompt_lookup(variants: Sequence[Variant]) -> list[Variant]:
    """Make a variant with prompt lookup of each variant that drafts trees."""
    trees = [variant for variant in variants if variant.config.tree_size]
    return [Variant(f"{tree.name}-lookup", tree.drafter, replace(tree.config, prompt_lookup=True)) for tree in trees]


def variants_of(drafter: Drafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    """List chains of all lengths, then trees of all sizes, as deep as the longest chain; of prompt tokens their own tree alone.

    Raises:
        ValueError: a drafter of no kind.
    """
    if not drafter.kind:
        raise ValueError(f"{type(drafter).__name__} is of no kind that this library measures by itself: build Methods of it.")
    if drafter.kind.startswith("ppd"):
        own = drafter.speculation_config
        name = own.tree_size if own.tree_size == "auto" else f"n{own.tree_size}"
        return [Variant(f"{drafter.kind}-{name}", drafter, own)]
    most = drafter.most_drafts
    lengths = lengths if most is None else sorted({min(length, most) for length in lengths})
    depth = max(lengths)
    chains = [Variant(f"{drafter.kind}-chain-k{length}", drafter, SpeculationConfig(length, None)) for length in lengths]
    names = [size if size == "auto" else f"n{size}" for size in sizes]
    trees = [
        Variant(f"{drafter.kind}-tree-k{depth}-{name}", drafter, SpeculationConfig(depth, size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return [*chains, *trees]
