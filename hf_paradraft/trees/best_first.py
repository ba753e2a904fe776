"""The best N-node tree over independent guesses, exactly.

A parallel drafter's distributions `q_d` do not depend on each other, so a path's probability is the product of its tokens'. The N
most probable paths always form a tree (a path is never less probable than its continuation), and walking from the most
probable one finds them in O(N log N): after a node come its next-best sibling and its best child, and nothing else.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp


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
