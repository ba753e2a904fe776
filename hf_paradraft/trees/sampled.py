"""A tree whose tokens are drawn, for recursive rejection (ParallelSpec, Algorithm 1)."""

import torch
from torch import Tensor

from ..decoding.draft import Draft
from .best_first import best_first_tree


def sampled_tree(q: Tensor, num_nodes: int) -> Draft:
    """A tree of the best-first shape whose siblings are drawn from `q` without replacement.

    The shape depends on `q` alone and never on what is drawn, so that the draws are what the rule takes them for.

    Args:
        q: float32 `(K, V)`, the distribution at each distance.
        num_nodes: N, at least 1; fewer come back where fewer tokens are possible.

    Returns:
        A draft with `q` for every node; siblings stand in the order in which they were drawn.
    """
    shape = best_first_tree(q.log(), num_nodes)
    size = next((node for node, belief in enumerate(shape.beliefs) if belief == 0), len(shape))
    parents, depths = shape.parents[:size], []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    # The k largest of log q + Gumbel noise are k draws without replacement, in order.
    noise = -torch.empty((len(set(parents)), q.shape[1]), device=q.device).exponential_().log()
    tokens = torch.empty(size, dtype=torch.long, device=q.device)
    for row, parent in enumerate(dict.fromkeys(parents)):
        children = [node for node in range(size) if parents[node] == parent]
        tokens[children] = (q[depths[children[0]]].log() + noise[row]).topk(len(children)).indices
    return Draft(tokens, parents, q[torch.tensor(depths, device=q.device)])
