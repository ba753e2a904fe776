"""What can be compared: a list of methods for each question."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..drafters.pard import PardDrafter
from ..drafters.ppd.drafter import PpdDrafter
from ..drafters.ppd.prompted import PromptedDrafter
from .methods import Method, assisted, pard_chain, pard_tree, plain, ppd, ppd_chain, ppd_static, prompt_lookup, prompted

TreeSize = int | Literal["auto"]
PPD_SIZES = (6, 10, 15, 22, 31)


class Case(StrEnum):
    """Questions.

    `methods`: transformers' own methods and ours. `prompts`: PPD, its trees and sizes. `batches`: ours over several prompts at
    a time. `compiled`: both sides compiled, over static caches. `hopeless`: a drafter that knows nothing, and prompts of random
    tokens: how much is lost?
    """

    methods = "methods"
    prompts = "prompts"
    batches = "batches"
    compiled = "compiled"
    hopeless = "hopeless"


def methods_of(
    case: Case,
    drafter: PardDrafter | PpdDrafter,
    parent: PreTrainedModel | None,
    draft_lengths: Sequence[int] = (4, 8, 12),
    tree_sizes: Sequence[TreeSize] = (16, "auto"),
    adapter: PpdDrafter | None = None,
    prompted_parent: PromptedDrafter | None = None,
    recurrent: bool = False,
) -> list[Method]:
    """The methods of a case, the reference first; trees are as deep as the longest chain.

    Args:
        case: which.
        drafter: ours.
        parent: for transformers' assisted generation; without it that is left out.
        draft_lengths: K of chains.
        tree_sizes: N of trees.
        adapter: calibrated prompt tokens of the target.
        prompted_parent: the parent with prompt tokens.
        recurrent: whether the target has a state, which transformers' own methods refuse.

    Raises:
        ValueError: a case that this drafter cannot serve.
    """
    if isinstance(drafter, PpdDrafter):
        if case not in (Case.methods, Case.batches, Case.prompts):
            raise ValueError(f"The case {case!r} is about PARD drafters, and this is a PPD adapter.")
        adapter = drafter
    if case == Case.prompts:
        if adapter is None or adapter.config.accuracy is None:
            raise ValueError("The case 'prompts' needs calibrated prompt tokens: paradraft calibrate, then --drafter ADAPTER.")
        sizes = [ppd(adapter, size) for size in PPD_SIZES]
        return [plain(), *sizes, ppd(adapter, "auto"), ppd_static(adapter, 15), ppd_chain(adapter, 15)]
    depth, compiled = max(draft_lengths), case == Case.compiled
    if case == Case.hopeless:
        return [plain(), pard_chain(drafter, depth), pard_chain(untrained(drafter), depth, "pard-chain-untrained")]
    peers = []
    if case == Case.methods and not recurrent:
        peers = [assisted(parent, k) for k in (3, 5, 8, None)] if parent is not None else []
        peers.append(prompt_lookup())
    if isinstance(drafter, PpdDrafter):
        return [plain(), *peers, ppd(drafter, "auto" if drafter.config.accuracy is not None else 15)]
    chains = [pard_chain(drafter, k, compiled=compiled) for k in draft_lengths]
    trees = [pard_tree(drafter, depth, size, compiled=compiled) for size in tree_sizes]
    ours = [ppd(adapter, "auto")] if case == Case.methods and adapter is not None else []
    if case == Case.methods and prompted_parent is not None:
        ours += [prompted(prompted_parent, 12), prompted(prompted_parent, 16, max(12, prompted_parent.num_prompts + 2))]
    return [plain(compiled), *peers, *chains, *trees, *ours]


def untrained(drafter: PardDrafter, seed: int = 0) -> PardDrafter:
    """A drafter of the same shape, dtype and place with random weights."""
    torch.manual_seed(seed)
    fresh = type(drafter).__bases__[1](drafter.config).to(drafter.device, drafter.dtype).eval()
    return PardDrafter.from_causal_lm(fresh, drafter.mask_token_id)
