"""A drafter and its target: do they speak the same tokens, and which drafter is set, so that every
`target.generate` drafts with it, from any caller (TRL, evaluation, pipelines, agents)?
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Literal

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..admission import check_drafter
from ..auto import AutoDrafter
from ..decoding.checks import Refused
from ..notes import notes_on
from ..outer_names import commit_of, innermost
from ..protocol import Drafter

logger = logging.get_logger(__name__)
_lock = Lock()


def check_same_tokenizer(
    target: PreTrainedModel,
    drafter: Drafter,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    drafter_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Refuse a drafter that was trained on other tokens than the target's.

    Padded embeddings of different sizes are fine. Tokenizers are compared where both can be had
    without a download. A wrong drafter could only be slow, never change the output, so an unknown
    one passes, with a warning if the vocabulary sizes differ.

    Raises:
        Refused: the tokenizers differ; the message says where.
    """
    if target_tokenizer is not None and drafter_tokenizer is not None:
        difference = _difference(target_tokenizer, drafter_tokenizer)
    else:
        if not drafter.name_or_path or target.name_or_path == drafter.name_or_path:
            return
        commit = commit_of(target)
        options = {} if commit is None else {"revision": commit}
        difference = _stored_difference(
            (target.name_or_path, *options.items()),
            (drafter.name_or_path, *drafter.found_under.items()),
        )
    if difference:
        raise Refused(
            f"The drafter's tokenizer is not the target's: {difference}. Use a drafter of the "
            "target's own model family."
        )
    if difference is None and (config := getattr(drafter, "config", None)) is not None:
        ours, theirs = (one.get_text_config().vocab_size for one in (target.config, config))
        if ours != theirs:
            logger.warning_once(
                f"The target has {ours} token embeddings and the drafter {theirs}, and their "
                "tokenizers could not be compared: drafting over the ids that both have."
            )


@lru_cache
def _stored_difference(target: tuple, drafter: tuple) -> str | None:
    """Compare two stored tokenizers, and describe the difference.

    The description is "" for no difference, and None if one of them is not stored here.
    """
    tokenizers = []
    for name, *found_under in (target, drafter):
        options = {**dict(found_under), "local_files_only": True, "trust_remote_code": False}
        if Path(name).is_dir() and not any(Path(name).glob("*token*")):
            return None  # drafters that stand on their target have none of their own, and need none
        try:
            tokenizers.append(AutoTokenizer.from_pretrained(name, **options))
        # whatever a missing or foreign tokenizer raises, there is nothing to compare
        except Exception:
            return None
    return _difference(*tokenizers)


def _difference(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> str:
    """Name the first id on which two tokenizers disagree, as a clause.

    It is "" if every shared id is the same token. Tokens that only one side has at its end (a mask
    token, say) are no difference. Special tokens of another name are one that a warning is enough
    for: newer models of a family rename reserved ones.
    """
    ours, theirs = (
        {index: token for token, index in side.get_vocab().items()} for side in (target, drafter)
    )
    shared = ours.keys() & theirs.keys()
    wrong = {index for index in shared if ours[index] != theirs[index]}
    special = [
        {index for index, token in side.added_tokens_decoder.items() if token.special}
        for side in (target, drafter)
    ]
    if renamed := special[0] & special[1] & wrong:
        first = min(renamed)
        logger.warning_once(
            f"{len(renamed)} special tokens have another name for the drafter than for the target "
            f"(first id {first}: {theirs[first]!r} and {ours[first]!r}): where they are used, "
            "fewer of its guesses are right."
        )
    if not (wrong := wrong - renamed):
        return ""
    first = min(wrong)
    return (
        f"{len(wrong)} of {len(shared)} shared ids mean other tokens (vocabularies of {len(ours)} "
        f"and {len(theirs)}), first id {first}, {ours[first]!r} for the target and "
        f"{theirs[first]!r} for the drafter"
    )


@dataclass(eq=False)
class Entry:
    """A drafter that is set, at once or in a block, until it has ended."""

    drafter: Drafter | None
    ended: bool = False


class set_drafter:
    """Let every `generate` of a target draft, from now on, or in a `with` block.

    The texts stay the target's own. A call that the loop cannot serve (beams, a cache of another
    kind) is decoded plainly, with one warning for each reason. `assistant_model=` and
    `custom_generate=` in a call win. Nothing of the drafter is copied, pickled or saved with the
    target.

    Args:
        target: the model; or a wrapper around it, of PEFT or `DistributedDataParallel`.
        drafter: as for `assistant_model`; it takes the place of one that was set before. None:
            draft no more. "auto": the one that `AutoDrafter.for_target` finds.

    Raises:
        ValueError: the drafter is none, or was made for another target.
    """

    def __init__(self, target: nn.Module, drafter: Drafter | Literal["auto"] | None = "auto"):
        self.target = innermost(target)
        drafter = AutoDrafter.for_target(self.target) if isinstance(drafter, str) else drafter
        if drafter is not None:
            check_drafter(drafter)
            check_same_tokenizer(self.target, drafter)
            drafter.attach(self.target)
        self.made, self.blocks, notes = Entry(drafter), list[Entry](), notes_on(self.target)
        with _lock:
            self.before, notes["set"] = notes.get("set", ()), (self.made,)

    def __enter__(self) -> Drafter | None:
        with _lock:
            # From here on it is set only for the block; the drafter before it comes back, unless
            # that one has ended.
            self._end(self.made, [entry for entry in self.before if not entry.ended])
            self.blocks.append(Entry(self.made.drafter))
            notes_on(self.target)["set"] += (self.blocks[-1],)
        return self.made.drafter

    def __exit__(self, *_: object) -> None:
        """Take this one away: blocks of several threads may overlap."""
        with _lock:
            self._end(self.blocks.pop(), [])

    def _end(self, entry: Entry, instead: list[Entry]) -> None:
        """Put others in the place of an entry, if it is set."""
        notes, entry.ended = notes_on(self.target), True
        notes["set"] = tuple(
            one for other in notes["set"] for one in (instead if other is entry else [other])
        )


def drafter_on(target: PreTrainedModel) -> Drafter | None:
    """Look up the drafter that is set on a model; None if there is none."""
    entries = notes_on(target).get("set")
    return entries[-1].drafter if entries else None
