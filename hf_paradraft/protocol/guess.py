"""A drafter's guesses after one sequence's prefix: distributions, or tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor

from .draft import PromptRows

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
