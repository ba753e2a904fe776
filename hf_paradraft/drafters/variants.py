"""Names of drafters, and how they are compared with others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..protocol import Drafter, SpeculationConfig
from ..protocol.config import TreeSize


@dataclass(frozen=True)
class Variant:
    """One way to use a drafter, under the name that it has in benchmarks."""

    name: str
    drafter: Drafter
    config: SpeculationConfig


def with_prompt_lookup(variants: Sequence[Variant]) -> list[Variant]:
    """The trees among them, with prompt lookup."""
    trees = [variant for variant in variants if variant.config.tree_size]
    return [Variant(f"{tree.name}-lookup", tree.drafter, replace(tree.config, prompt_lookup=True)) for tree in trees]


class NamedDrafter(Drafter):
    """A drafter of this library: its name, and how it is compared with others.

    Attributes:
        kind: its name, as in `paradraft train NAME` and in benchmarks.
        title: for people.
    """

    kind: ClassVar[str]
    title: ClassVar[str]

    def variants(self, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
        """List the variants for benchmarks: chains of all lengths, then trees of all sizes, as deep as the longest chain."""
        most = self.most_drafts
        lengths = lengths if most is None else sorted({min(length, most) for length in lengths})
        depth = max(lengths)
        chains = [Variant(f"{self.kind}-chain-k{length}", self, SpeculationConfig(length, None)) for length in lengths]
        names = [size if size == "auto" else f"n{size}" for size in sizes]
        trees = [
            Variant(f"{self.kind}-tree-k{depth}-{name}", self, SpeculationConfig(depth, size))
            for name, size in zip(names, sizes, strict=True)
        ]
        return [*chains, *trees]

    def untrained(self) -> Drafter:
        """One of the same shape that knows nothing.

        Raises:
            ValueError: it cannot be made.
        """
        raise ValueError(f"An untrained {self.title} cannot be made: the case 'hopeless' is for PARD drafters.")
