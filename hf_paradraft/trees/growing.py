"""The best tree over distributions that become known node by node.

With a head that looks at the token before, or with a drafter that has to read a node to guess behind it, a path is no product of
independent factors; but it is still never more probable than its beginning. So the N best paths over what is known form a tree,
and once every node of it that may have children has been read, no other tree of N nodes promises more.

A node is a slot: a rank among its parent's children. Where tokens are drawn, a slot's promise comes from its parent's
distribution and its rank, never from its own token; and it can only be driven out by slots that promise more: by earlier
siblings, its own or its ancestors', by what stands below those, or by what was drawn apart from it. So the draws are what
recursive rejection takes them for.
"""

from heapq import heappop, heappush
from math import exp

ROOT = -1


class GrowingTree:
    """The tree of one row.

    Args:
        num_nodes: N, at most.
        depth: levels, at most.
    """

    def __init__(self, num_nodes: int, depth: int):
        self.num_nodes, self.depth = num_nodes, depth
        self.parents: list[int] = []  # of every slot that was ever in the tree, in the order in which it came in
        self.ranks: list[int] = []
        self.depths: list[int] = []
        self.slots: dict[tuple[int, int], int] = {}
        self.scores: dict[int, list[float]] = {}  # of each node that was read, its children's log-chances, falling
        self.chosen: list[int] = []  # the tree: slots, most probable first
        self.beliefs: list[float] = []  # of the chosen, given their parents
        self.reach: dict[int, float] = {ROOT: 1.0}  # of each slot in the tree, the chance of its whole path

    def read(self, node: int, scores: list[float]) -> None:
        """A node's children become known; `scores` are log-chances that fall from rank to rank, and may be empty."""
        self.scores[node] = scores

    def choose(self) -> None:
        """Find the best tree over what is known."""
        self.chosen, self.beliefs, self.reach = [], [], {ROOT: 1.0}
        heap: list[tuple[float, int, int, float]] = []

        def offer(parent: int, rank: int, base: float) -> None:
            if rank < len(scores := self.scores.get(parent, ())):
                heappush(heap, (base - scores[rank], parent, rank, base))

        offer(ROOT, 0, 0.0)
        while heap and len(self.chosen) < self.num_nodes:
            cost, parent, rank, base = heappop(heap)
            slot = self._slot(parent, rank)
            self.chosen.append(slot)
            self.beliefs.append(exp(self.scores[parent][rank]))
            self.reach[slot] = exp(-cost)
            offer(parent, rank + 1, base)
            offer(slot, 0, cost)

    def unread(self) -> list[int]:
        """Nodes of the tree that may have children and were not read, most probable first."""
        return [slot for slot in self.chosen if slot not in self.scores and self.depths[slot] < self.depth]

    def path(self, node: int) -> list[int]:
        """Slots from below the root down to `node`."""
        slots: list[int] = []
        while node != ROOT:
            slots.append(node)
            node = self.parents[node]
        return slots[::-1]

    def _slot(self, parent: int, rank: int) -> int:
        if (parent, rank) not in self.slots:
            self.slots[parent, rank] = len(self.parents)
            self.parents.append(parent)
            self.ranks.append(rank)
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return self.slots[parent, rank]
