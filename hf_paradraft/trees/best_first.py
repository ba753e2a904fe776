"""The best N-node tree over independent guesses, exactly.

A parallel drafter's distributions `q_d` do not depend on each other, so a path's probability is the product of its tokens'. The N
most probable paths always form a tree (a path is never less probable than its continuation), and walking from the most
probable one finds them in O(N log N): after a node come its next-best sibling and its best child, and nothing else.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp

import numpy
import torch
from torch import Tensor

from ..decoding.draft import Draft


@dataclass
class Paths:
    """A tree of guesses by rank, most probable first: parents come before children, and the first n nodes are the best n.

    Attributes:
        parents: of the nodes; -1 is the root.
        depths: from 0.
        ranks: which guess of its depth each node is; 0 is the best.
        beliefs: the chance of each node, given its parent.
        reach: the chance of the whole path to it.
    """

    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    beliefs: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)


def best_paths(scores: list[list[float]], num_nodes: int) -> Paths:
    """The most probable paths.

    Args:
        scores: by depth and rank, log-probabilities that fall from rank to rank.
        num_nodes: N; fewer come back only if there are no more.
    """
    paths = Paths()
    heap = [(-scores[0][0], 0, 0, -1, 0.0)]  # (minus log-probability, depth, rank, parent, the parent's log-probability)
    while heap and len(paths.parents) < num_nodes:
        cost, depth, rank, parent, base = heappop(heap)
        node = len(paths.parents)
        paths.parents.append(parent)
        paths.depths.append(depth)
        paths.ranks.append(rank)
        paths.beliefs.append(exp(scores[depth][rank]))
        paths.reach.append(exp(-cost))
        if rank + 1 < len(scores[depth]):
            heappush(heap, (-(base + scores[depth][rank + 1]), depth, rank + 1, parent, base))
        if depth + 1 < len(scores):
            heappush(heap, (cost - scores[depth + 1][0], depth + 1, 0, node, -cost))
    return paths


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
    top, ids = logits.float().log_softmax(-1).topk(min(num_nodes, logits.shape[1]), dim=-1)
    if factors is not None:
        top = top + torch.from_numpy(factors).to(top)[:, None].log()
    paths, tokens = best_paths(top.tolist(), num_nodes), ids.tolist()
    chosen = [tokens[depth][rank] for depth, rank in zip(paths.depths, paths.ranks, strict=True)]
    return Draft(torch.tensor(chosen, device=logits.device), paths.parents, beliefs=paths.beliefs)
