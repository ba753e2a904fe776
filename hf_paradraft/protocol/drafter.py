"""The four calls of a drafter: `attach`, `start_drafting`, `propose`, `observe`. Drafters guess;
the engine decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from .config import SpeculationConfig
from .guess import Guess
from .stats import SpeculationStats


@dataclass(frozen=True)
class KeyValues:
    """The name of a feature, the keys and values `(f, 2·H·D)` of a layer's cache.

    They are as attention reads them, all heads' keys first.

    Attributes:
        layer: of the target.
    """

    layer: int


# -1: the embedding's output, as the first layer reads it; 0 … L-1: the outputs of the target's
# layers, raw; "normed": the last one after the final norm, as the head reads it; or what a layer's
# cache holds.
FeatureKey = int | Literal["normed"] | KeyValues


@dataclass
class Prefix:
    """One sequence's text and room when a guess is wanted.

    Attributes:
        ids: int64 `(1, n)` on the target's device, without padding: prompt and tokens so far.
        room: how many tokens may be guessed in a row; 0 where none are wanted.
        kept: how many leading tokens are those of the last prefix that was asked about; 0 at first.
        race: where the noise of the target's draws is known: orders logits `(k, V')` of the next
            distances by who wins then. For drafters that give tokens; what others give is ordered
            by the engine.
    """

    ids: LongTensor
    room: int
    kept: int
    race: Any = None  # rules.race.Race


@dataclass
class Observation:
    """One sequence's part of a forward of the target.

    The newest token has no feature: it has not been read.

    Attributes:
        tokens: int64 `(n,)`, new tokens, the target's own included; none for a piece of the prompt.
        begin: position of the first token that has features here.
        features: of what `needs` asked for, `(f, hidden)` each: of the tokens `begin … begin + f -
            1`.
        prompt_logits: float32 `(R, V)`, of the prompt rows below the node where the round ended, in
            order; None for none.
    """

    tokens: LongTensor
    begin: int = 0
    features: dict[FeatureKey, Tensor] = field(default_factory=dict)
    prompt_logits: Tensor | None = None


class Drafting:
    """One `generate` call's drafting: it owns the state, so a drafter serves many calls at once.

    Attributes:
        nbytes: of what `fork` has copied.
    """

    nbytes: int = 0

    def propose(self, prefixes: list[Prefix]) -> Sequence[Guess]:
        """Guess the continuation of each prefix, at least where there is room.

        Logits for more than the room are cut; tokens for more are refused.

        A prefix need not extend the last one of its sequence: what was read after `prefix.kept`
        tokens has to be forgotten.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no propose(prefixes), which gives a guess for each "
            "sequence."
        )

    def check_texts(self, count: int) -> None:
        """Refuse a call of more sequences than the drafter serves. Most serve any number.

        Raises:
            ValueError: they are too many; the message says what to change.
        """

    def observe(self, observations: list[Observation | None]) -> None:
        """Learn from a forward of the target, by each sequence's observation.

        An observation is None for a sequence that had ended before. Most drafters do nothing.
        """

    def join(self, other: "Drafting") -> bool:
        """Take another call's sequences, which have begun, after these.

        Both are then asked at once. A drafting that joins others has `select` too.

        Returns:
            Whether the sequences were taken.
        """
        return False

    def select(self, rows: list[int]) -> None:
        """Go on with some of the sequences, in this order: texts that have ended leave.

        Without it a drafter is asked about all sequences of a call until the last has ended.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has join(other), and no select(rows), which lets sequences go."
        )

    def fork(self, row: int, read: int) -> "Drafting | None":
        """Copy the state of a sequence's beginning, for a later call whose text begins so.

        By default nothing is copied: None.

        The copy has read the first `read + 1` tokens at most, and their features but the last
        one's: the target reads that token again.

        Args:
            row: of the sequence.
            read: at least 1.
        """
        return None


class Drafter:
    """A drafter, as the loop of this library takes it for `assistant_model`.

    Attributes:
        kind: its name, as in `paradraft train NAME` and in benchmarks; "" for one that is not
            measured there.
        title: for people.
        speculation_config: how the engine uses it.
        last_stats: of the last `generate` call it assisted, or None.
        name_or_path: where its tokenizer lies, if it has one of its own.
        found_under: the `revision` and `subfolder` there.
        guesses_in_target: whether it guesses in the target's own forward (PPD), and so cannot work
            meanwhile.
        most_drafts: tokens that it guesses at most; None: any number.
        memory: texts that drafts are copied from, a `Memory`; None: none. With one, copies of the
            text itself join too.
        listener: is told each text of a call that has ended, int64 `(n,)`, and how many of its
            tokens were the prompt's.
        apart: the same drafter in a process of its own, which drafts while the target verifies
            (PEARL); None: there is none.
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = "drafter"
    speculation_config: SpeculationConfig
    last_stats: SpeculationStats | None = None
    name_or_path: str = ""
    found_under: Mapping[str, str] = MappingProxyType({})
    guesses_in_target: bool = False
    most_drafts: int | None = None
    memory: Any = None  # hf_paradraft.Memory
    listener: Callable[[LongTensor, int], None] | None = None
    apart: "Drafter | None" = None

    @property
    def max_rows(self) -> int:
        """The most query rows that a draft has in the target's forward.

        The last token's row is not counted.
        """
        return self.speculation_config.max_nodes

    def attach(self, target: PreTrainedModel) -> None:
        """Check that `target` can be drafted for, and hold what is shared with it, by reference.

        Raises:
            ValueError: another target is needed; the message says why.
        """

    def needs(self, target: PreTrainedModel) -> tuple[FeatureKey, ...]:
        """List the features of the target that `observe` has to receive."""
        return ()

    def start_drafting(self, target: PreTrainedModel, max_length: int) -> Drafting:
        """Begin a `generate` call whose sequences get no longer than `max_length` tokens.

        The prompt's padding is included. A drafter without state of a call may be a `Drafting` too,
        and returns itself.
        """
        if isinstance(self, Drafting):
            return self
        raise NotImplementedError(
            f"{type(self).__name__} has no start_drafting(target, max_length)."
        )
