"""Lessons between requests: the drafter is trained on the texts that the target writes (Online
Speculative Decoding, arXiv 2310.07177).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..training.follow import FollowTarget
from ..training.output import replace_model

logger = logging.get_logger(__name__)
NEW_TEXTS = 32  # new texts since the last lesson, at least


class Lessons:
    """The training of a drafter while no request waits; a better drafter is saved each time.

    Args:
        target: the model that writes the texts.
        drafter: the drafter that is trained on them.
        tokenizer: the tokenizer that is saved next to a drafter that needs one.
        folder: the new folder where the drafter is saved.

    Raises:
        ValueError: the drafter is of a kind that is not trained here, or the folder has files.
        ImportError: packages for training are missing.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Any,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
    ):
        if drafter is None:
            raise ValueError("nothing drafts, so nothing can learn.")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already: name a new one.")
        self.target, self.drafter, self.tokenizer, self.folder = target, drafter, tokenizer, folder
        self.follow, self.learned = FollowTarget(drafter), 0

    def __call__(self, interrupted: Callable[[], bool]) -> bool:
        """Give a lesson if enough texts are new, and tell whether the drafter's weights changed.

        Args:
            interrupted: the function that tells whether a request waits: the lesson then ends, and
                is given later.
        """
        if self.follow.num_texts - self.learned < NEW_TEXTS:
            return False
        before, self.learned = self.learned, self.follow.num_texts
        try:
            lesson = self.follow.learn(self.target, interrupted=interrupted)
            if lesson is None:
                self.learned = before
                return False
            if lesson.kept:
                replace_model(self.folder, self._save)
            after = "no number" if lesson.after is None else f"{lesson.after:.3f}"
            what = f"saved in {self.folder}" if lesson.kept else "not kept"
            print(
                f"Lesson of {lesson.seconds:.0f} s: loss {lesson.before:.3f}, then {after}; "
                f"{what}.",
                flush=True,
            )
        except Exception:  # requests go on
            logger.exception("A lesson failed: the drafter stays as it is.")
            return False
        return lesson.kept

    def _save(self, folder: Path) -> None:
        self.drafter.save_pretrained(folder)
        if self.drafter.has_tokenizer:
            self.tokenizer.save_pretrained(folder)
