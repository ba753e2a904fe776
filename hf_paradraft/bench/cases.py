"""Lists of methods to compare, one for each question."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.causal import AutoregressiveDrafter
from ..drafters.ngram import NgramDrafter
from ..drafters.pard.model import PardDrafter
from ..outer_names import ASSISTS_COMPILED
from ..pearl import ProcessDrafter
from ..protocol import Drafter, SpeculationConfig
from ..protocol.config import TreeSize
from .methods import (
    Method,
    assisted,
    drafted,
    plain,
    prompt_lookup,
    prompt_lookup_variants,
    variants_of,
)


class Case(StrEnum):
    """Questions that a benchmark can answer, each by a list of methods.

    `methods`: transformers' own methods and ours. `batches`: ours over several prompts at a time.
    `compiled`: both sides compiled, over static caches. `overlap`: drafting while verifying against
    one after the other, a core each, and with all cores. `hopeless`: a drafter that knows nothing,
    and prompts of random tokens: how much is lost?
    """

    methods = "methods"
    batches = "batches"
    compiled = "compiled"
    hopeless = "hopeless"
    overlap = "overlap"


def _untrained(drafter: Drafter) -> Drafter:
    """Make a drafter of the same shape, dtype and place with random weights.

    Raises:
        ValueError: it is no PARD drafter.
    """
    if not isinstance(drafter, PardDrafter):
        raise ValueError(
            f"An untrained {drafter.title} cannot be made: the case 'hopeless' is for PARD "
            "drafters."
        )
    torch.manual_seed(0)
    made: Any = type(drafter)
    fresh = made(drafter.config).to(drafter.device, drafter.dtype).eval()
    return PardDrafter.from_causal_lm(fresh, drafter.mask_token_id)


def _overlapped(name: str, drafter: Drafter, length: int) -> list[Method]:
    """Make sequential and overlapped methods of chains of one length.

    In order: sequential on one core, overlapped in one process, overlapped in two processes, and
    sequential on all cores.
    """
    config = SpeculationConfig(length, None, never_slower=False)
    chain, overlap = f"{name}-chain-k{length}", replace(config, overlap=True)
    return [
        replace(drafted(f"{chain}-one-core", drafter, config), threads=1),
        drafted(f"pearl-{name}-k{length}", drafter, overlap),
        drafted(f"pearl-process-{name}-k{length}", ProcessDrafter(drafter), overlap),
        drafted(chain, drafter, config),
    ]


def _variants_of_all(
    drafters: Sequence[Drafter], lengths: Sequence[int], sizes: Sequence[TreeSize]
) -> list[Method]:
    """List the variants of all drafters, and append the drafter's folder to names of several.

    Where folders do not tell drafters apart, the drafter's number in the order given is appended.
    """
    variants = [variants_of(drafter, lengths, sizes) for drafter in drafters]
    uses = Counter(variant.name for own in variants for variant in own)
    folders = [Path(drafter.name_or_path).name for drafter in drafters]
    for number, (folder, own) in enumerate(zip(folders, variants, strict=True), 1):
        label = folder if folder and folders.count(folder) == 1 else number
        for variant in own:
            if uses[variant.name] > 1:
                variant.name = f"{variant.name}@{label}"
    return [variant for own in variants for variant in own]


def methods_of(
    case: Case,
    drafter: Drafter,
    parent: PreTrainedModel | None,
    draft_lengths: Sequence[int] = (4, 8, 12),
    tree_sizes: Sequence[TreeSize] = (16, "auto"),
    others: Sequence[Drafter] = (),
    recurrent: bool = False,
    lookup: bool = False,
) -> list[Method]:
    """List the methods of a case, the reference first; trees are as deep as the longest chain.

    Args:
        case: the question to answer.
        drafter: our drafter.
        parent: the assistant of transformers' own assisted generation; None leaves that out.
        draft_lengths: K of chains.
        tree_sizes: N of trees.
        others: more drafters for the same target.
        lookup: add copied drafts by themselves, and our trees once more with copies in them.
        recurrent: whether the target has a state, which transformers' own methods refuse.

    Raises:
        ValueError: a case that this drafter cannot serve.
    """
    if case == Case.overlap:
        overlapped = _overlapped(drafter.kind, drafter, max(draft_lengths))
        if parent is not None:
            overlapped += _overlapped("autoregressive", AutoregressiveDrafter(parent), 5)
        return [plain(), *overlapped]
    compiled = case == Case.compiled
    if case == Case.hopeless:
        length = max(draft_lengths)
        name, chain = f"{drafter.kind}-chain", SpeculationConfig(length, None)
        return [
            plain(),
            drafted(f"{name}-k{length}", drafter, chain),
            drafted(f"{name}-untrained-k{length}", _untrained(drafter), chain),
        ]
    peers = []
    if compiled and parent is not None and ASSISTS_COMPILED and not recurrent:
        peers = [assisted(parent, None, compiled=True)]
    if case == Case.methods and not recurrent:
        peers = [assisted(parent, k) for k in (3, 5, 8, None)] if parent is not None else []
        peers.append(prompt_lookup())
    drafters = [drafter, *others] if case == Case.methods else [drafter]
    variants = _variants_of_all(drafters, draft_lengths, tree_sizes)
    if lookup:
        peers.append(drafted("ngram-chain-k10", NgramDrafter(), SpeculationConfig(10, None)))
        variants += prompt_lookup_variants(variants)
    for variant in variants:
        variant.config = replace(variant.config, compile=compiled)
    return [plain(compiled), *peers, *variants]
