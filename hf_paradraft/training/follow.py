"""A drafter that follows a target which is being trained (Online Speculative Decoding, arXiv
2310.07177, section 4).
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState
from torch import LongTensor, nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from ..outer_names import innermost
from .rows import IGNORED

logger = logging.get_logger(__name__)
HELD_OUT = 8  # of so many texts one is never learned, and judges


@dataclass(frozen=True)
class Lesson:
    """The record of one attempt to learn.

    Attributes:
        step: the step of the target's trainer; None without a trainer.
        before, after: the losses on held-out texts; None for a loss that was no number any more.
        kept: whether the new weights are used.
        seconds: the seconds that it took.
    """

    step: int | None
    before: float
    after: float | None
    kept: bool
    seconds: float


class FollowTarget(TrainerCallback):
    """A callback that teaches a drafter its target's current texts while the target is trained.

    There is a lesson every few steps of the target's trainer. The newest texts of the calls that
    the drafter assists are kept. A lesson takes short steps of the kind's own loss on them, on
    states of the target as it is then, and its weights are used only if texts that were held back
    are guessed better with them. The target's training goes on as if nothing had happened: weights,
    gradients and random numbers are as they were.

    Trainings of several processes leave the drafter as it is. Without a trainer, call
    `learn(target)` whenever there is time.

    Args:
        drafter: the drafter that assists, as by `set_drafter(target, drafter)`; it is changed in
            place.
        every: the steps of the target's trainer from one lesson to the next.
        max_tokens: the tokens of the texts that are kept; the oldest texts go first.
        num_steps: the steps of a lesson.
        learning_rate: the constant learning rate of a lesson.
        batch_size: the texts of a step.

    Attributes:
        lessons: the records of all attempts.

    Raises:
        ValueError: the drafter is of a kind or a form that does not learn here, or a number is
            below 1.
    """

    def __init__(
        self,
        drafter: Any,
        every: int = 10,
        max_tokens: int = 32_768,
        num_steps: int = 8,
        learning_rate: float = 2e-4,
        batch_size: int = 8,
    ):
        if min(every, max_tokens, num_steps, batch_size) < 1:
            raise ValueError("every, max_tokens, num_steps and batch_size have to be 1 at least.")
        if getattr(type(drafter), "training_options", None) is None:
            raise ValueError(
                f"{type(drafter).__name__} is of no kind that is trained here: it cannot follow "
                "its target."
            )
        try:
            from .run import options_of  # training needs packages that drafting does not
        except ModuleNotFoundError as error:
            raise ImportError(
                f"Lessons need {error.name}, which is not installed: pip install "
                "'hf-paradraft[train]'."
            ) from error
        self.kind = options_of(type(drafter))
        self.kind.check_drafter(drafter)
        self.drafter, self.every, self.max_tokens = drafter, every, max_tokens
        self.num_steps, self.learning_rate, self.batch_size = num_steps, learning_rate, batch_size
        self.lessons: list[Lesson] = []
        self.texts: deque[dict[str, Any]] = deque()  # rows to learn, and whether one is held out
        self.num_texts, self.num_tokens = 0, 0
        self.pupil: Any = None  # in fp32, so that small steps add up
        drafter.listener = self

    def __call__(self, ids: LongTensor, prompt: int) -> None:
        """Keep a text.

        Args:
            ids: the text, int64 `(n,)`.
            prompt: the number of its tokens that were given.
        """
        tokens, held = ids.tolist(), self.num_texts % HELD_OUT == 0
        labels = [IGNORED] * prompt + tokens[prompt:]
        row = {"input_ids": tokens, "labels": labels, "length": len(tokens), "held": held}
        self.texts.append(row)
        self.num_texts, self.num_tokens = self.num_texts + 1, self.num_tokens + len(tokens)
        while self.num_tokens > self.max_tokens and len(self.texts) > 1:
            self.num_tokens -= self.texts.popleft()["length"]

    def __reduce__(self) -> tuple:
        """Become None in copies and pickles of the drafter, which are not taught."""
        return type(None), ()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ):
        """Give a lesson if it is time for one."""
        if args.world_size > 1:  # whose processes see other texts, and would wait for each other
            logger.warning_once(
                "Lessons are given in trainings of one process: the drafter stays as it is."
            )
        elif model is not None and state.global_step % self.every == 0:
            try:
                self.learn(model, state.global_step, args)
            except Exception:  # the target's training goes on
                logger.exception("A lesson failed: the drafter stays as it is.")

    def learn(
        self,
        target: nn.Module,
        step: int | None = None,
        arguments: TrainingArguments | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Lesson | None:
        """Give a lesson, after which the drafter has the better weights.

        Args:
            target: the model that wrote the texts, or a wrapper around it.
            step: the step of its trainer.
            arguments: its trainer's arguments, whose devices and number formats hold here too.
            interrupted: asked after every text whether the lesson is to be given up, with nothing
                learned; default: never.

        Returns:
            The lesson; None if there are too few texts yet, or if it was given up.
        """
        begun, model = time.perf_counter(), innermost(target)
        rows = len(model.get_input_embeddings().weight)
        whole = [  # no images
            text
            for text in self.texts
            if text["length"] > 2 and 0 <= min(text["input_ids"]) <= max(text["input_ids"]) < rows
        ]
        learned = [text for text in whole if not text["held"]]
        judged = [text for text in whole if text["held"]]
        if not learned or not judged:
            return None
        if self.pupil is None:
            self.pupil = copy.deepcopy(self.drafter).float()
        pupil = copy.deepcopy(self.pupil)  # a lesson that is cut off leaves nothing half learned
        with _untouched(model), tempfile.TemporaryDirectory() as folder:
            pupil.attach(model)
            at_once = self.batch_size if interrupted is None else 1
            trainer = self._trainer(pupil, model, (learned, judged), folder, arguments, at_once)
            if interrupted is not None:
                trainer.add_callback(_Interruption(interrupted))
            try:
                before, after = trainer.evaluate()["eval_loss"], None
                try:
                    trainer.train()
                    after = trainer.evaluate()["eval_loss"]
                except ValueError as error:  # the loss is no number any more
                    logger.warning("The drafter has learned nothing. %s", error)
            except _GivenUp:
                return None
        if kept := after is not None and after < before:
            self.pupil = pupil
            weights = zip(self.drafter.parameters(), pupil.parameters(), strict=True)
            for mine, taught in weights:
                mine.data.copy_(taught.data)
        self.lessons.append(Lesson(step, before, after, kept, time.perf_counter() - begun))
        logger.info("%s", self.lessons[-1])
        return self.lessons[-1]

    def _trainer(
        self,
        pupil: Any,
        target: PreTrainedModel,
        texts: tuple[list[dict[str, Any]], list[dict[str, Any]]],
        folder: str,
        arguments: TrainingArguments | None,
        at_once: int,
    ) -> Trainer:
        """Make the trainer of the kind's own run, with the options of the drafter's training."""
        from datasets import Dataset

        from .run import RunInputs

        record = self.drafter.paradraft.get("training") or {}
        options = fields(self.kind)
        needed = {item.name: "" for item in options if item.default is MISSING}
        known = {item.name: record[item.name] for item in options if item.name in record}
        run = self.kind(**{**needed, **known})
        outer: dict[str, Any] = {"use_cpu": pupil.device.type == "cpu"}
        if arguments is not None:
            outer = {name: getattr(arguments, name) for name in ("bf16", "fp16", "use_cpu")}
            outer["accelerator_config"] = {"use_configured_state": True}  # its trainer's stays
        inner = TrainingArguments(
            output_dir=folder,
            max_steps=self.num_steps,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=at_once,
            per_device_eval_batch_size=at_once,
            gradient_accumulation_steps=self.batch_size // at_once,
            seed=len(self.lessons),  # other anchors every time
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **outer,
        )
        sets = map(Dataset.from_list, texts)
        trainer = run.trainer(pupil, RunInputs(target, None, inner, *sets))
        trainer.remove_callback(PrinterCallback)
        return trainer


class _GivenUp(Exception):
    """A signal that a lesson was interrupted."""


class _Interruption(TrainerCallback):
    """A callback that gives a lesson up once `interrupted` says so."""

    def __init__(self, interrupted: Callable[[], bool]):
        self.interrupted = interrupted

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Ask."""
        if self.interrupted():
            raise _GivenUp

    on_substep_end = on_step_end = on_prediction_step


@contextmanager
def _untouched(target: PreTrainedModel) -> Iterator[None]:
    """Leave a model, its trainer's state and all random numbers as they were before the block.

    Of the model, gradients and mode are left as they were.
    """
    learned = [parameter for parameter in target.parameters() if parameter.requires_grad]
    modes = {part: part.training for part in target.modules()}
    luck, luck_of_numpy = random.getstate(), np.random.get_state()
    steps = dict(GradientState._shared_state)
    with torch.random.fork_rng(), torch.enable_grad():
        target.eval().requires_grad_(False)
        try:
            yield
        finally:
            for parameter in learned:
                parameter.requires_grad_(True)
            for part, training in modes.items():
                part.training = training
            random.setstate(luck)
            np.random.set_state(luck_of_numpy)
            GradientState._shared_state.clear()
            GradientState._shared_state.update(steps)
