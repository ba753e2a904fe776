"""The four calls of a drafter: `attach`, `start_drafting`, `propose`, `observe`. Drafters guess; the engine decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from .config import SpeculationConfig
from .guess import Guess, Riders
from .stats import SpeculationStats

# -1: the embedding's output, as the first layer reads it; 0 … L-1: the outputs of the target's layers, raw; "normed": the last
# one after the final norm, as the head reads it.
FeatureKey = int | Literal["normed"]


@dataclass
class Prefix:
    """What is known of one row when a guess is wanted.

    Attributes:
        ids: int64 `(1, n)` on the target's device, without padding: prompt and tokens so far.
        room: how many tokens may be guessed in a row; 0 where none are wanted.
        kept: how many leading tokens are those of the last prefix that this row was asked about; 0 at first.
    """

    ids: LongTensor
    room: int
    kept: int


@dataclass
class Observation:
    """What one forward of the target brought one row. The newest token has no feature: it has not been read.

    Attributes:
        tokens: int64 `(n,)`, new tokens of the row, the target's own included; none for a piece of the prompt.
        begin: position of the first token that has features here.
        features: of what `needs` asked for, `(f, hidden)` each: of the row's tokens `begin … begin + f - 1`.
        rider_logits: float32 `(R, V)`, of the riders below the node where the row ended, in their order; None for none.
    """

    tokens: LongTensor
    begin: int = 0
    features: dict[FeatureKey, Tensor] = field(default_factory=dict)
    rider_logits: Tensor | None = None


class Drafting:
    """One `generate` call's drafting: it owns the state, so a drafter serves many calls at once."""

    def propose(self, prefixes: list[Prefix]) -> Sequence[Guess]:
        """Guess what follows each row's prefix, at least where there is room. Logits for more than that are cut, tokens refused.

        A prefix need not extend the last one of its row: what was read behind `prefix.kept` tokens has to be forgotten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no propose(prefixes), which gives a guess for each row.")

    def observe(self, observations: list[Observation | None]) -> None:
        """Learn what a forward of the target brought each row; None for a row that had ended before. Most do nothing."""


class Drafter:
    """What `assistant_model` has to be for the loop of this library.

    Attributes:
        speculation_config: how the engine uses it.
        last_stats: of the last `generate` call it assisted, or None.
        name_or_path: where its tokenizer lies, if it has one of its own.
        found_under: the `revision` and `subfolder` there.
        has_own_cores: whether it works in a process of its own, and so may draft while the target verifies on the same device.
    """

    speculation_config: SpeculationConfig
    last_stats: SpeculationStats | None = None
    name_or_path: str = ""
    found_under: Mapping[str, str] = MappingProxyType({})
    has_own_cores: bool = False

    def attach(self, target: PreTrainedModel) -> None:
        """Check that `target` can be drafted for, and hold what is shared with it, by reference.

        Raises:
            ValueError: another target is needed; the message says why.
        """

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """Which of the target's hidden states `observe` is to bring."""
        return ()

    def riders(self) -> Riders | None:
        """What it hangs into the target's forward beside its guesses, if it does."""
        return None

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call whose rows get no longer than `max_length` tokens, the prompt's padding included."""
        raise NotImplementedError(f"{type(self).__name__} has no start_drafting(target, max_length).")

    def start_in_place(self, target: PreTrainedModel, max_length: int) -> Drafting | None:
        """The same as `start_drafting` on the target's own cores, for calls that do not overlap; None: it is there already."""
        return None
