"""The best tree over distributions that become known node by node.

With a head that looks at the token before, or with a drafter that has to read a node to guess behind it, a path is no product of
independent factors; but it is still never more probable than its beginning. So the N best paths over what is known form a tree;
what is not among them will never be, for more is only added; and once every node of it that may have children has been read, no
other tree of N nodes promises more.

A node stands at a rank among its parent's children. Where tokens are drawn, its promise comes from its parent's distribution and
its rank, never from its own token; and it can only be driven out by nodes that promise more: by earlier siblings, its own or its
ancestors', by what stands below those, or by what was drawn apart from it. So the draws are what recursive rejection takes them
for.
"""

from math import inf

import numpy
from numpy import ndarray

ROOT = -1


class GrowingTree:
    """The tree of one row.

    Args:
        num_nodes: N, at most.
        depth: levels, at most.

    Attributes:
        parents, tokens, depths, scores: of every node that was ever in the tree, in the order in which it came in; a score is the
            log-chance of the whole path.
        chosen: the tree, most probable first, so parents before children.
    """

    def __init__(self, num_nodes: int, depth: int):
        self.num_nodes, self.depth = num_nodes, depth
        self.parents: list[int] = []
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.chosen: list[int] = []
        self.read = {ROOT}

    def grow(self, nodes: list[int], scores: ndarray, tokens: ndarray) -> None:
        """The children of nodes become known, and the best stay.

        Args:
            nodes: of the tree, or the root.
            scores: `(n, r)`, log-chances of children given their parent, falling from rank to rank; -inf where there is none.
            tokens: int64 `(n, r)`.
        """
        self.read.update(nodes)
        ranks = scores.shape[1]
        paths = (scores + numpy.array([self.score(node) for node in nodes])[:, None]).ravel()
        full = len(self.chosen) >= self.num_nodes
        offered = (paths > (self.scores[self.chosen[-1]] if full else -inf)).nonzero()[0]
        # Sorted so that what is equal stays in its order: parents before children, and siblings by rank.
        merged = numpy.concatenate([[self.scores[node] for node in self.chosen], paths[offered]])
        best = numpy.argsort(-merged, kind="stable")[: self.num_nodes].tolist()
        kept, known = self.chosen, len(self.chosen)
        self.chosen = []
        for place in best:
            if place < known:
                self.chosen.append(kept[place])
                continue
            where = int(offered[place - known])
            self.chosen.append(len(self.parents))
            self.parents.append(parent := nodes[where // ranks])
            self.tokens.append(int(tokens.flat[where]))
            self.depths.append(self.below(parent))
            self.scores.append(float(paths[where]))

    def score(self, node: int) -> float:
        """The log-chance of the path down to `node`."""
        return 0.0 if node == ROOT else self.scores[node]

    def below(self, node: int) -> int:
        """How deep the children of `node` stand."""
        return 1 if node == ROOT else self.depths[node] + 1

    def unread(self) -> list[int]:
        """Nodes of the tree that may have children and were not read, most probable first."""
        return [node for node in self.chosen if node not in self.read and self.depths[node] < self.depth]

    def reach(self, nodes: list[int]) -> float:
        """Expected number of tokens that are accepted of `nodes`."""
        return float(numpy.exp([self.scores[node] for node in nodes]).sum())

    def beliefs(self) -> list[float]:
        """Of the chosen, their chances given their parents."""
        return numpy.exp([self.scores[node] - self.score(self.parents[node]) for node in self.chosen]).tolist()

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]
