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
from .draft import Guess
from .stats import SpeculationStats


@dataclass(frozen=True)
class KeyValues:
    """The name of a feature: the keys and values `(f, 2·H·D)` of a layer's cache.

    They are as attention reads them, all heads' keys first.

    Attributes:
        layer: the index of the target's layer.
    """

    layer: int


# -1: the embedding's output, as the first layer reads it; 0 … L-1: the outputs of the target's
# layers, raw; "normed": the last one after the final norm, as the head reads it; or the keys and
# values of a layer's cache.
FeatureKey = int | Literal["normed"] | KeyValues


@dataclass
class Prefix:
    """One sequence's text so far, and room for guesses.

    Attributes:
        ids: int64 `(1, n)` on the target's device, without padding: prompt and tokens so far.
        room: the number of tokens that may be guessed in a row; 0 if none are wanted.
        kept: the number of leading tokens that the last prefix of this sequence had too; 0 at
            first.
        race: a scorer of logits `(k, V')` of the next distances by the noise of the target's draws,
            if that is known. For drafters that give tokens; the engine scores logits itself.
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
        features: the features that `needs` asked for, `(f, hidden)` each, of the tokens `begin …
            begin + f - 1`.
        prompt_logits: float32 `(R, V)`, the logits of the prompt rows below the node where the
            round ended, in order; None for none.
    """

    tokens: LongTensor
    begin: int = 0
    features: dict[FeatureKey, Tensor] = field(default_factory=dict)
    prompt_logits: Tensor | None = None


class Drafting:
    """The drafter's state in one `generate` call, so that a drafter serves many calls at once.

    Attributes:
        nbytes: the number of bytes that `fork` has copied.
    """

    nbytes: int = 0

    def propose(self, prefixes: list[Prefix]) -> Sequence[Guess]:
        """Guess the continuation of each prefix, at least of those with room.

        Logits for more than the room are cut; tokens for more are refused.

        A prefix need not extend the last one of its sequence: tokens that were read after the first
        `prefix.kept` have to be forgotten.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no propose(prefixes), which gives a guess for each "
            "sequence."
        )

    def observe(self, observations: list[Observation | None]) -> None:
        """Learn from a forward of the target, by each sequence's observation.

        An observation is None for a sequence that had ended before. Most drafters do nothing.
        """

    def join(self, other: "Drafting") -> bool:
        """Append another call's sequences, which have begun, to these.

        Both are then asked at once. A class that implements `join` implements `select` too.

        Returns:
            Whether the sequences were taken.
        """
        return False

    def select(self, rows: list[int]) -> None:
        """Keep only some of the sequences, in this order: texts that have ended leave.

        Without it a drafter is asked about all sequences of a call until the last has ended.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has join(other), and no select(rows), which lets sequences go."
        )

    def fork(self, row: int, read: int) -> "Drafting | None":
        """Copy a sequence's state after its first tokens, for a later call with the same beginning.

        By default nothing is copied: None.

        The copy has read the first `read + 1` tokens at most, and their features but the last
        one's: the target reads that token again.

        Args:
            row: the sequence's index.
            read: the number of tokens that the target has read, at least 1.
        """
        return None


class Drafter:
    """The base class of drafters, which `generate` takes as `assistant_model`.

    Attributes:
        kind: the method's name, as in `paradraft train NAME` and in benchmarks; "" for one that
            is not measured there.
        title: the method's name for readers.
        speculation_config: the options by which the engine uses it.
        last_stats: the statistics of the last `generate` call that it assisted, or None.
        name_or_path: the repository or folder of its tokenizer, if it has one of its own.
        found_under: the `revision` and `subfolder` there.
        guesses_in_target: whether it guesses in the target's own forward (PPD), and so cannot draft
            during verification.
        most_drafts: the most tokens that it guesses; None: any number.
        memory: a `Memory` of texts that drafts are copied from; None: none. With one, tokens are
            copied from the text itself too.
        listener: a function that gets each finished text of a call, int64 `(n,)`, and the number of
            its prompt's tokens.
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

        The prompt's padding is included. A drafter that keeps no state for a call may be a
        `Drafting` too, and returns itself.
        """
        if isinstance(self, Drafting):
            return self
        raise NotImplementedError(
            f"{type(self).__name__} has no start_drafting(target, max_length)."
        )
