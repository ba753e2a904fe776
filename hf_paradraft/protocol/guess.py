"""What a drafter guesses behind one row's prefix: distributions, or tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor

# For each row the tokens to read, int64 (n,), and their parents: indices into what this round has read for that row so far,
# -1 for the last known token. Gives for each row (n, V'): logits behind each of them.
Extend = Callable[[list[LongTensor], list[list[int]]], list[Tensor]]
# Depths int64 (N,), tokens int64 (N,) in the target's ids, and the states of N nodes; gives (N, V'), to be added to the logits at
# these depths, and the nodes' own states. Depth 0 and the state None stand for the last known token.
Bias = Callable[[LongTensor, LongTensor, list[Any]], tuple[Tensor, list[Any]]]


@dataclass
class Riders:
    """Rows that can ride along in the target's forward without being guesses: PPD's prompts (PPD, section 4).

    Attributes:
        embeddings: `(m·E, hidden)`, their inputs; row `i·E + e` is prompt `i` of ensemble `e`.
        num_ensembles: E; a row sees its node, and those before it of its own ensemble.
        everywhere: below every node, all m of them: static trees, for comparison.
    """

    embeddings: Tensor
    num_ensembles: int = 1
    everywhere: bool = False


@dataclass
class GuessedLogits:
    """A distribution for each of the next distances.

    Attributes:
        logits: `(k, V')`; row `d` guesses the token at distance `d + 1`. `k = 0`: no guess.
        vocabulary: int64 `(V',)`, the target's id of each of the drafter's; None: they are the target's own.
        bias: what to add behind a known token, for heads that look at the token before (DSpark, section 3.2).
        confidences: `k` chances that the guess at a distance is accepted if those before it are; or what gives them for a chain,
            of the token before each of its tokens, int64 `(k,)`.
        accuracy: `accuracy[d][r]`, the counted chance that the guess of rank `r` at distance `d + 1` is right if those before it
            are: trees are built from these instead of the guesses' own probabilities.
        riders: to be placed below the nodes where the round is likely to end.
        extend: reads tokens that the engine chose, and guesses behind each; for all rows at once. Without it the guess is final.
        further: decodes one step further, and gives all rows' guesses anew; for drafters that choose their next tokens alone.
        decoded: how many of the distances are such a drafter's own tokens, which only the rest guesses.
    """

    logits: Tensor
    vocabulary: LongTensor | None = None
    bias: Bias | None = None
    confidences: list[float] | Callable[[LongTensor], list[float]] | None = None
    accuracy: list[list[float]] | None = None
    riders: Riders | None = None
    extend: Extend | None = None
    further: "Callable[[], list[Guess]] | None" = None
    decoded: int = 0


@dataclass
class GuessedTokens:
    """Tokens that were found, not drawn: a chain or a tree.

    Attributes:
        tokens: int64 `(N,)` in the target's ids, parents before children; `N = 0`: no guess.
        parents: `N` indices into `tokens`, -1 for a child of the last known token; None for a chain.
        beliefs: `N` chances that a node is accepted if its parent is.
    """

    tokens: LongTensor
    parents: list[int] | None = None
    beliefs: list[float] | None = None


Guess = GuessedLogits | GuessedTokens
