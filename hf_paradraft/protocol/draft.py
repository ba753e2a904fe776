"""Guesses after a prefix, distributions or tokens; and drafts for the target to verify, which are
made of them: a tree of tokens, and prompt rows that ride along.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import LongTensor, Tensor


@dataclass
class PromptRows:
    """Query rows in the target's forward that are no guesses: PPD's prompt tokens.

    They guess for the next round (PPD, section 4).

    Attributes:
        nodes: the node that each of R rows belongs to; -1 is the last known token.
        parents: the parent of each row, which sees it and its ancestors: a node of N, or `N + r`
            for row `r`.
        embeddings: `(R, hidden)`, the rows' inputs.
    """

    nodes: list[int]
    parents: list[int]
    embeddings: Tensor


# Takes, for each sequence, the tokens to read, int64 (n,), and their parents: indices into the
# tokens that this round has read for that sequence so far, -1 for the last known token. Returns,
# for each sequence, the logits (n, V') after these tokens.
Extend = Callable[[list[LongTensor], list[list[int]]], list[Tensor]]
# Takes depths int64 (N,), tokens int64 (N,) in the target's ids, and the states of the parents of N
# nodes. Returns (N, V'), to be added to the logits at these depths, and the nodes' own states.
# Depth 0 and the state None are those of the last known token.
Bias = Callable[[LongTensor, LongTensor, list[Any]], tuple[Tensor, list[Any]]]


@dataclass
class GuessedLogits:
    """A distribution for each of the next distances.

    Attributes:
        logits: `(k, V')`; row `d` guesses the token at distance `d + 1`. `k = 0`: no guess.
        vocabulary: int64 `(V',)`, the target's id of each of the drafter's; None: they are the
            target's own.
        bias: the function that computes logits to add after a known token, for heads that read the
            token before (DSpark, section 3.2).
        confidences: `k` chances that the guess at a distance is accepted if those before it are; or
            a function that computes them for a chain from the tokens before each of its tokens,
            int64 `(k,)`.
        extend: the function that reads tokens that the engine chose, and guesses after each, for
            all sequences at once: all guesses of a round have the same one. Without it the guess is
            final.
    """

    logits: Tensor
    vocabulary: LongTensor | None = None
    bias: Bias | None = None
    confidences: list[float] | Callable[[LongTensor], list[float]] | None = None
    extend: Extend | None = None


@dataclass
class GuessedTokens:
    """Tokens that were found, not drawn: a chain or a tree.

    Attributes:
        tokens: int64 `(N,)` in the target's ids, parents before children; `N = 0`: no guess.
        parents: `N` indices into `tokens`, -1 for a child of the last known token; None for a
            chain.
        acceptance: `N` chances that a node is accepted if its parent is.
        prompt_rows: rows to read in the same forward (PPD); the tree is then verified as it is.
    """

    tokens: LongTensor
    parents: list[int] | None = None
    acceptance: list[float] | None = None
    prompt_rows: PromptRows | None = None


Guess = GuessedLogits | GuessedTokens


@dataclass
class Draft:
    """A tree of guessed tokens below the last known token; a chain is a tree.

    Attributes:
        tokens: int64 `(N,)`, parents before children. `N = 0` means: just decode one token.
        parents: `N` indices into `tokens`, -1 for a child of the last known token.
        q: float32 `(N, V)`, the distribution that each token was sampled from; None: the tokens
            were not sampled, and count as certain.
        acceptance: `N` chances that a node is accepted if its parent is; None if they are not
            known.
        prompt_rows: PPD's prompt rows; None for none.
    """

    tokens: LongTensor
    parents: list[int]
    q: Tensor | None = None
    acceptance: list[float] | None = None
    prompt_rows: PromptRows | None = None

    @property
    def row_parents(self) -> list[int]:
        """The parent of each of the N + R query rows after the root's.

        A row sees its parent and that one's ancestors.
        """
        return (
            self.parents if self.prompt_rows is None else [*self.parents, *self.prompt_rows.parents]
        )

    @classmethod
    def chain(
        cls, tokens: LongTensor, q: Tensor | None = None, acceptance: list[float] | None = None
    ) -> "Draft":
        """Make a draft of `(N,)` tokens in a row."""
        return cls(tokens, list(range(-1, len(tokens) - 1)), q, acceptance)

    @classmethod
    def of_ids(cls, ids: list[int], device: torch.device, *rest: Any) -> "Draft":
        """Make a draft on a device from ids on the host; `rest` are the class's other fields."""
        draft = cls(torch.tensor(ids, dtype=torch.long, device=device), *rest)
        draft.token_ids = ids
        return draft

    @property
    def depths(self) -> list[int]:
        """The depth of each node, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    @property
    def depth(self) -> int:
        """The number of tokens in its longest path."""
        return max(self.depths, default=0)

    @cached_property
    def token_ids(self) -> list[int]:
        """The ids of `tokens` on the host, fetched once.

        A comparison per node would wait for the device each time.
        """
        return self.tokens.tolist()

    @cached_property
    def path_probability(self) -> list[float]:
        """Compute the chance that each node is accepted with all above it.

        The list is empty if the chances are not known.
        """
        chances: list[float] = []
        for chance, parent in zip(self.acceptance or [], self.parents, strict=False):
            chances.append(min(1.0, chance) * (chances[parent] if parent >= 0 else 1.0))
        return chances

    def __len__(self) -> int:
        return len(self.parents)

    def children(self, node: int) -> list[int]:
        """List the indices of the children of `node`, in the order in which they are tried.

        As a node, -1 is the last known token.
        """
        return [child for child, parent in enumerate(self.parents) if parent == node]
