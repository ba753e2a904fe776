"""Options of speculative decoding, saved with a drafter under `paradraft` in `config.json`."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from transformers.utils import logging

logger = logging.get_logger(__name__)

TreeSize = int | Literal["auto"] | None  # None: a chain
MAX_TREE = 64  # nodes of a tree that chooses its own size
MOST = 1024  # tokens or nodes of a draft; a larger number is refused as a mistake
MAX_WINDOW = 2**20  # tokens of a prompt
Acceptance = Literal["auto", "greedy", "sample_match", "rejection", "typical"]


@dataclass
class SpeculationConfig:
    """Options of speculative decoding, all safe to change between calls.

    Args:
        num_draft_tokens: tokens drafted in a round (K): the length of a chain, the depth of a tree;
            0 turns drafting off. A call's own `generate(..., num_assistant_tokens=K)` counts
            instead.
        tree_size: `"auto"` for as many draft nodes as pay on this hardware, chosen in every round;
            an int for that many, the most probable paths of all; None for a chain.
        acceptance: the rule that judges drafts. `auto` is `greedy` without sampling and
            `sample_match` with it; both, and `rejection`, leave the target's output (or its
            distribution) as it is. `typical` does not: it accepts tokens that are probable
            enough, for more of them per round.
        never_slower: draft less, or nothing for a while, if the measured times say that drafting
            does not pay. With `rejection` it only pauses drafting, and with `typical` it does
            nothing, since random draws would depend on the clock.
        compile: run drafter and target through `torch.compile` over static caches, every round in
            the same shapes, on a GPU as CUDA graphs. The first calls compile, for some seconds to
            minutes.
        overlap: draft the next window while the target verifies this one (PEARL). With
            `never_slower` only if the drafter has a device or a process of its own, since nothing
            is won otherwise; without it always. Not for drafters that read the target.
        prompt_lookup: copy tokens that followed an earlier match of the text's end: in a tree in
            addition to the drafter's guesses, and beyond K; in a chain instead of them, if more
            tokens are expected to be accepted. Not with `rejection`, which needs drawn drafts.
        trace: keep every round's draft, accepted path and times in `SpeculationStats.trace`.
        draft_window: the number of a prompt's last tokens whose hidden states the drafter reads;
            None: all. After a long prompt, a drafter that was trained on short texts guesses better
            with a window, and reads it faster. Drafters that read no states read the whole prompt.

    Raises:
        ValueError: an option out of range.
    """

    num_draft_tokens: int = 12
    tree_size: TreeSize = "auto"
    acceptance: Acceptance = "auto"
    never_slower: bool = True
    compile: bool = False
    overlap: bool = False
    prompt_lookup: bool = False
    trace: bool = False
    draft_window: int | None = None

    def __post_init__(self):
        for name, words, least, most in (
            ("num_draft_tokens", (), 0, MOST),
            ("tree_size", (None, "auto"), 1, MOST),
            ("draft_window", (None,), 1, MAX_WINDOW),
        ):
            value = getattr(self, name)
            if value not in words and (type(value) is not int or not least <= value <= most):
                others = "".join(f"{word!r} or " for word in words)
                raise ValueError(
                    f"{name} must be {others}an integer from {least} to {most}, but is {value!r}."
                )
        if self.acceptance not in (rules := get_args(Acceptance)):
            raise ValueError(
                f"acceptance must be one of {', '.join(rules)}, but is {self.acceptance!r}."
            )

    def saved(self) -> dict[str, Any]:
        """Return the options as they are saved; a window is, if there is one."""
        options = asdict(self)
        if self.draft_window is None:
            del options["draft_window"]
        return options

    @classmethod
    def from_saved(cls, options: dict[str, Any] | None) -> "SpeculationConfig":
        """Read options from a `config.json`.

        Options that this version does not know, as from a later one, are left out with a warning.

        Raises:
            ValueError: an option out of range.
        """
        options = dict(options) if isinstance(options, dict) else {}
        if "graft" in options:  # until 0.3
            options.setdefault("prompt_lookup", options.pop("graft"))
        understood = {
            name: value for name, value in options.items() if name in cls.__dataclass_fields__
        }
        if more := sorted(options.keys() - understood):
            logger.warning_once(
                "The drafter was saved with options that this version does not know: "
                f"{', '.join(more)}."
            )
        return cls(**understood)

    @property
    def max_nodes(self) -> int:
        """The most tokens that a draft can have."""
        return max(
            self.num_draft_tokens, MAX_TREE if self.tree_size == "auto" else self.tree_size or 0
        )

    @property
    def compiled_width(self) -> int:
        """New tokens that a compiled drafter reads in every round, fewer being padded.

        It is 0 if nothing is compiled.
        """
        return self.num_draft_tokens + 1 if self.compile else 0
