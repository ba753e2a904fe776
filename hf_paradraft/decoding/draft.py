"""What a drafter gives the loop, and what the loop gives a drafter."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from .config import SpeculationConfig
from .stats import SpeculationStats

if TYPE_CHECKING:
    from .pace import Pace


@dataclass
class Draft:
    """A tree of guessed tokens below the last known token; a chain is a tree.

    Attributes:
        tokens: int64 `(N,)`, parents before children. `N = 0` means: just decode one token.
        parents: `N` indices into `tokens`, -1 for a child of the last known token.
        q: float32 `(N, V)`, the distribution each token was sampled from, or None where the tokens were not sampled.
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

    def __len__(self) -> int:
        return len(self.parents)

    def children(self, node: int) -> list[int]:
        """Indices of the children of `node`, in the order in which they are tried; -1 is the last known token."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


@dataclass
class Prefix:
    """What is known of one row when a round begins.

    Attributes:
        ids: int64 `(1, n)` on the target's device, without padding: prompt and tokens so far.
        room: how many tokens may be drafted before the target's last token is due; 0 where none are wanted.
        logits_processor: the target's, to be called with `(1, length)` ids and `(1, V)` logits.
        sampled: whether the acceptance rule needs drafts sampled from `q`.
        vocab_size: the target's width `V`.
        branches: whether the target can verify a tree in this round; otherwise only a chain.
        pace: chooses a tree's size, where that is free.
    """

    ids: LongTensor
    room: int
    logits_processor: LogitsProcessorList
    sampled: bool
    vocab_size: int
    branches: bool
    pace: "Pace"


class Drafting(Protocol):
    """One `generate` call's drafting: it owns the state, so a drafter serves many calls at once."""

    def propose(self, prefixes: list[Prefix]) -> list[Draft]:
        """Guess what follows each row's prefix: at most `prefix.room` levels of tokens."""

    def observe(self, outputs: Any, paths: list[list[int] | None]) -> None:
        """See the target's outputs over the drafts and each row's accepted nodes, None for a row that had ended before.

        Most drafters do nothing.
        """


class Drafter(Protocol):
    """What `assistant_model` has to be for this loop."""

    speculation_config: SpeculationConfig
    last_stats: SpeculationStats | None

    def start_drafting(self, max_length: int) -> Drafting:
        """Begin a `generate` call whose rows get no longer than `max_length` tokens, the prompt's padding included."""
