"""The best N-node tree over independent guesses, exactly.

A parallel drafter's distributions `q_d` do not depend on each other, so a path's probability is the product of its tokens'. The N
most probable paths always form a tree (a path is never less probable than its continuation), and walking from the most
probable one finds them in O(N log N): after a node come its next-best sibling and its best child, and nothing else.
"""

from heapq import heappop, heappush
from math import exp

import numpy
import torch
from torch import Tensor

from ..decoding.draft import Draft


def best_first_tree(logits: Tensor, num_nodes: int, factors: numpy.ndarray | None = None) -> Draft:
    """The tree with the largest expected number of accepted tokens, if the guesses mean what they say.

    Args:
        logits: `(K, V)`; row `d` guesses the token at distance `d + 1`.
        num_nodes: N, at least 1; fewer nodes come back only if there are no more.
        factors: `(K,)`, by which each distance's probabilities are corrected; default: taken at their word.

    Returns:
        A draft of N nodes, most probable first (so parents come before children, and the first n nodes are the best tree of n),
        with `beliefs` and without `q`.

    Raises:
        ValueError: `num_nodes` below 1.
    """
    if num_nodes < 1:
        raise ValueError(f"A tree needs at least one node, but num_nodes is {num_nodes}.")
    depth, width = logits.shape[0], min(num_nodes, logits.shape[1])
    top, ids = logits.float().log_softmax(-1).topk(width, dim=-1)
    if factors is not None:
        top = top + torch.from_numpy(factors).to(top)[:, None].log()
    scores, tokens = top.tolist(), ids.tolist()
    heap = [(-scores[0][0], 0, 0, -1, 0.0)]  # (minus log-probability, depth, rank, parent, the parent's log-probability)
    chosen: list[int] = []
    parents: list[int] = []
    beliefs: list[float] = []
    while heap and len(chosen) < num_nodes:
        cost, d, rank, parent, base = heappop(heap)
        node = len(chosen)
        chosen.append(tokens[d][rank])
        parents.append(parent)
        beliefs.append(exp(scores[d][rank]))
        if rank + 1 < width:
            heappush(heap, (-(base + scores[d][rank + 1]), d, rank + 1, parent, base))
        if d + 1 < depth:
            heappush(heap, (cost - scores[d + 1][0], d + 1, 0, node, -cost))
    return Draft(torch.tensor(chosen, device=logits.device), parents, beliefs=beliefs)
