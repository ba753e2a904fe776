"""What can be compared: a list of methods for each question."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..drafters.pard import PardDrafter
from .measure import Prompt
from .methods import Method, assisted, pard_chain, pard_tree, plain, prompt_lookup

TreeSize = int | Literal["auto"]


class Case(StrEnum):
    """Questions.

    `methods`: transformers' own methods and ours. `batches`: ours over several prompts at a time. `compiled`: both sides
    compiled, over static caches. `hopeless`: a drafter that knows nothing, and prompts of random tokens: how much is lost?
    """

    methods = "methods"
    batches = "batches"
    compiled = "compiled"
    hopeless = "hopeless"


def methods_of(
    case: Case,
    drafter: PardDrafter,
    parent: PreTrainedModel | None,
    draft_lengths: Sequence[int] = (4, 8, 12),
    tree_sizes: Sequence[TreeSize] = (16, "auto"),
) -> list[Method]:
    """The methods of a case, the reference first; trees are as deep as the longest chain.

    Args:
        case: which.
        drafter: ours.
        parent: for transformers' assisted generation; without it that is left out.
        draft_lengths: K of chains.
        tree_sizes: N of trees.
    """
    depth, compiled = max(draft_lengths), case == Case.compiled
    if case == Case.hopeless:
        return [plain(), pard_chain(drafter, depth), pard_chain(untrained(drafter), depth, "pard-chain-untrained")]
    peers = []
    if case == Case.methods:
        peers = [assisted(parent, k) for k in (3, 5, 8, None)] if parent is not None else []
        peers.append(prompt_lookup())
    chains = [pard_chain(drafter, k, compiled=compiled) for k in draft_lengths]
    trees = [pard_tree(drafter, depth, size, compiled=compiled) for size in tree_sizes]
    return [plain(compiled), *peers, *chains, *trees]


def untrained(drafter: PardDrafter, seed: int = 0) -> PardDrafter:
    """A drafter of the same shape, dtype and place with random weights."""
    torch.manual_seed(seed)
    fresh = type(drafter).__bases__[1](drafter.config).to(drafter.device, drafter.dtype).eval()
    return PardDrafter.from_causal_lm(fresh, drafter.mask_token_id)


def random_prompts(vocab_size: int, count: int = 8, length: int = 48, seed: int = 0) -> list[Prompt]:
    """Prompts of random tokens: text of no kind."""
    generator = torch.Generator().manual_seed(seed)
    return [Prompt("random tokens", torch.randint(vocab_size, (1, length), generator=generator)) for _ in range(count)]
