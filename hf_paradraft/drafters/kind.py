"""What the library has to know of a kind of drafter, beside how it drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..hub.card import CardFields
from ..protocol import Drafter, SpeculationConfig
from ..protocol.config import TreeSize


@dataclass(frozen=True)
class Variant:
    """One way to use a drafter, under the name that it has in benchmarks."""

    name: str
    drafter: Drafter
    config: SpeculationConfig


def chains_and_trees(name: str, drafter: Drafter, lengths: Sequence[int], sizes: Sequence[TreeSize]) -> list[Variant]:
    """Chains of all lengths that the drafter has, then trees of all sizes, as deep as the longest chain."""
    lengths = lengths if drafter.most_drafts is None else sorted({min(length, drafter.most_drafts) for length in lengths})
    depth = max(lengths)
    chains = [Variant(f"{name}-chain-k{length}", drafter, SpeculationConfig(length, None)) for length in lengths]
    trees = [
        Variant(f"{name}-tree-k{depth}-{size if size == 'auto' else f'n{size}'}", drafter, SpeculationConfig(depth, size))
        for size in sizes
    ]
    return [*chains, *trees]


def with_prompt_lookup(variants: Sequence[Variant]) -> list[Variant]:
    """The trees among them, with prompt lookup."""
    trees = [one for one in variants if one.config.tree_size]
    return [Variant(f"{one.name}-lookup", one.drafter, replace(one.config, prompt_lookup=True)) for one in trees]


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    Attributes:
        name: short, as in `paradraft train NAME`.
        title: for people.
        drafters: its classes.
        recognises: whether a folder holds one.
        load: the drafter in a folder; further arguments as for `AutoDrafter.from_pretrained`.
        check: refuses a folder that is incomplete.
        card: what its model card says beside what all cards say.
        describe: a folder, as (name, value) pairs.
        variants: what benchmarks compare, for draft lengths K and tree sizes; trees are as deep as the longest chain.
        study: a comparison of its own, or None.
        untrained: one of the same shape that knows nothing, or None.
        adopt: the drafter that a model given as `assistant_model` is for a target, or None.
        export: writes a folder for another engine, or None: no other engine has it.
    """

    name: str
    title: str
    drafters: tuple[type, ...]
    recognises: Callable[[Path], bool]
    load: Callable[..., Drafter]
    check: Callable[[Path], None]
    card: Callable[[Path], CardFields]
    describe: Callable[[Path], list[tuple[str, Any]]]
    variants: Callable[[Any, Sequence[int], Sequence[TreeSize]], list[Variant]]
    study: Callable[[Any], list[Variant]] | None = None
    untrained: Callable[[Any], Drafter] | None = None
    adopt: Callable[[PreTrainedModel, object], Drafter | None] | None = None
    export: Callable[..., str] | None = None
