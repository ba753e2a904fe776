"""What the target verifies: a tree of tokens, and rows that ride along."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import LongTensor, Tensor


@dataclass
class Draft:
    """A tree of guessed tokens below the last known token; a chain is a tree.

    Attributes:
        tokens: int64 `(N,)`, parents before children. `N = 0` means: just decode one token.
        parents: `N` indices into `tokens`, -1 for a child of the last known token.
        q: float32 `(N, V)`, the distribution each token was sampled from; None: they were not sampled, and count as certain.
        beliefs: `N` chances that a node is accepted if its parent is, as the drafter sees it; None where it does not say.
        rider_nodes: for each of R rows that ride along in the target's forward without being guesses (PPD's prompts), the node
            that it belongs to; -1 is the last known token.
        rider_parents: what each of them sees, with that one's ancestors: a node, or `N + r` for rider `r`.
        rider_embeddings: `(R, hidden)`, their inputs.
    """

    tokens: LongTensor
    parents: list[int]
    q: Tensor | None = None
    beliefs: list[float] | None = None
    rider_nodes: list[int] = field(default_factory=list)
    rider_parents: list[int] = field(default_factory=list)
    rider_embeddings: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N + R."""
        return len(self.parents) + len(self.rider_parents)

    @classmethod
    def chain(cls, tokens: LongTensor, q: Tensor | None = None) -> "Draft":
        """A draft of `(N,)` tokens in a row."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), q)

    def first(self, size: int) -> "Draft":
        """The tree of the first `size` nodes, which no sampled tree may be cut to."""
        beliefs = None if self.beliefs is None else self.beliefs[:size]
        return Draft(self.tokens[:size], self.parents[:size], beliefs=beliefs)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @cached_property
    def token_ids(self) -> list[int]:
        """`tokens` on the host, fetched once: a comparison per node would wait for the device each time."""
        return self.tokens.tolist()

    def reach(self) -> list[float]:
        """Of each node, the chance that it is accepted with all above it, by `beliefs`; empty where there are none."""
        found: list[float] = []
        for belief, parent in zip(self.beliefs or [], self.parents, strict=False):
            found.append(belief * (found[parent] if parent >= 0 else 1.0))
        return found

    def __len__(self) -> int:
        return len(self.parents)

    def children(self, node: int) -> list[int]:
        """Indices of the children of `node`, in the order in which they are tried; -1 is the last known token."""
        return [child for child, parent in enumerate(self.parents) if parent == node]
