"""One training run, for every kind of drafter: check, data, model, trainer, checkpoints, save,
evaluate.

A kind describes its run in a dataclass of options, of which `paradraft train KIND` is made too.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..outer_names import get_available_reporting_integrations
from .data import encode_rows
from .output import (
    LOCK,
    Checkpoints,
    check_output,
    newest_checkpoint,
    replace_model,
    written_alone,
)
from .source import load_rows
from .target import check_context, check_ids, fingerprint, open_tokenizer
from .trainer import ResumableTrainer

# how an option's number is compared with a bound, in words and in fact
BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "most": ("at most", operator.le),
}


def option(help: str, default: Any = MISSING, *, read: bool = False, **bounds: float) -> Any:
    """Make the dataclass field of an option of a run: its help text, default and range.

    Args:
        help: one line, for the command line and the docs.
        default: none if it has to be given.
        read: whether it names a source of the run, which must not be written to; a kind's first is
            the model that the run begins with, whose tokenizer it takes.
        bounds: the bounds of its number, by names in `BOUNDS`.
    """
    return field(default=default, metadata={"help": help, "read": read, "bounds": bounds})


SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


@dataclass
class RunInputs:
    """The inputs of a run, of which a kind makes its drafter and its trainer.

    Attributes:
        model: the model that the kind's options opened.
        tokenizer: the model's tokenizer.
        arguments: the trainer's arguments.
        train_set, eval_set: the samples, from `encode_rows`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    arguments: TrainingArguments
    train_set: Dataset
    eval_set: Dataset | None

    @property
    def sets(self) -> dict[str, Dataset | None]:
        """Name them as a `Trainer` does."""
        return {"train_dataset": self.train_set, "eval_dataset": self.eval_set}


@dataclass(kw_only=True)
class TrainingOptions(ABC):
    """The options of every run; a kind adds its own, and says how its drafter is made and saved."""

    kind: ClassVar[str]
    example: ClassVar[str]
    recorded: ClassVar[
        tuple[str, ...]
        # names of options that are kept with the drafter, in addition to those of its base classes
    ] = ()

    train_file: str = option(
        "JSON lines with 'text' or 'messages', or a Hub dataset; best answered by the target."
    )
    output_dir: Path = option("Where the drafter and its checkpoints go.")
    eval_file: str | None = option(
        "Rows for the loss by depth, and the prompts of the acceptance.", None
    )
    max_length: int = option("Tokens of a sample at most; longer ones are cut.", 512, least=2)
    max_steps: int = option("Optimiser steps; -1: by epochs.", -1, least=-1)
    num_train_epochs: float = option("Times that every sample is read.", 4.0, above=0)
    per_device_train_batch_size: int = option("Samples of a forward.", 8, least=1)
    gradient_accumulation_steps: int = option("Forwards of a step.", 1, least=1)
    learning_rate: float = option("Peak learning rate.", 5e-4, above=0)
    lr_scheduler_type: str = option("Schedule: cosine, linear, constant, …", "cosine")
    warmup_steps: int = option("Warm-up steps.", 20, least=0)
    save_steps: int = option("Steps between checkpoints.", 500, least=1)
    seed: int = option("Random seed.", 0, least=0, most=2**32 - 1)
    report_to: str = option("Who draws the run's curves: trackio, tensorboard, wandb, …", "none")
    resume: bool = option("Go on from the newest whole checkpoint.", False)
    overwrite: bool = option("Write into an output folder that has files.", False)

    def __post_init__(self):
        self.output_dir = Path(self.output_dir)

    @property
    def defaults(self) -> dict[str, Any]:
        """The paper's values for arguments of the trainer that are no options here."""
        return {}

    def check(self) -> None:
        """Refuse options that cannot be meant.

        Raises:
            ValueError: a number out of range, or a word that is not among those that can be chosen.
        """
        kinds = get_type_hints(type(self))
        for item in fields(self):
            value = getattr(self, item.name)
            if get_origin(kinds[item.name]) is Literal and value not in (
                words := get_args(kinds[item.name])
            ):
                raise ValueError(f"{item.name} is {value!r}, and has to be {' or '.join(words)}.")
            if not isinstance(value, int | float):
                continue
            for name, bound in item.metadata["bounds"].items():
                relation, holds = BOUNDS[name]
                if not holds(value, bound):
                    raise ValueError(f"{item.name} must be {relation} {bound}, but is {value}.")
            if not math.isfinite(value):
                raise ValueError(f"{item.name} must be a finite number, but is {value}.")
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(
                f"lr_scheduler_type is {self.lr_scheduler_type!r}, and has to be one of "
                f"{', '.join(SCHEDULES)}."
            )
        if self.report_to not in (
            "none",
            "all",
            *(known := get_available_reporting_integrations()),
        ):
            raise ValueError(
                f"report_to={self.report_to!r} needs a package of that name: pip install it. Here "
                f"is {known or 'none'}."
            )
        if self.max_steps == 0:
            raise ValueError(
                "max_steps=0 trains nothing: give a number of steps, or -1 to go by epochs."
            )

    @abstractmethod
    def open_model(
        self, tokenizer: PreTrainedTokenizerBase, device: torch.device
    ) -> PreTrainedModel:
        """Load the model that the run begins with: the one to train, or a drafter's target."""

    @classmethod
    def check_drafter(cls, drafter: Any) -> None:
        """Refuse a drafter that cannot learn while it drafts.

        Raises:
            ValueError: the kind does not learn so, or its trainer does not take the drafter's form.
        """
        return None

    @abstractmethod
    def untrained(self, inputs: RunInputs) -> Any:
        """Make the drafter that is to be trained."""

    @abstractmethod
    def trainer(self, drafter: Any, inputs: RunInputs) -> ResumableTrainer:
        """Make the trainer of a drafter: an untrained one, or one that follows its target."""

    @property
    @abstractmethod
    def models(self) -> dict[str, str | None]:
        """The models that a drafter comes of, by their names in the record.

        Each is a Hub id, or None for a model that is only on this machine.
        """

    def record(self) -> dict[str, Any]:
        """Collect the models and the options that are kept with the drafter."""
        names = (
            name for kind in reversed(type(self).__mro__) for name in vars(kind).get("recorded", ())
        )
        return {**self.models, **{name: getattr(self, name) for name in names}}

    def finish(self, trainer: Any) -> None:
        """Finish a whole training once its steps are made; most kinds do nothing.

        Lessons (`FollowTarget`) go without this.
        """
        return None

    def save(
        self, drafter: Any, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], folder: Path
    ) -> None:
        """Write the drafter, the record of its training, and its tokenizer if it has one."""
        drafter.record_training(record)
        drafter.save_pretrained(folder)
        if drafter.has_tokenizer:
            tokenizer.save_pretrained(folder)

    def measure(self, drafter: Any, inputs: RunInputs) -> dict[str, Any]:
        """Measure a calibration or an acceptance for the record, after the drafter is saved."""
        return {}

    def result(self, drafter: Any) -> Any:
        """Return the result of `train`: the drafter, or an object of the kind's that holds it."""
        return drafter


def options_of(drafter: Any) -> type[TrainingOptions]:
    """Import the options of a kind's run.

    Args:
        drafter: the kind's class, a `SavedDrafter` with `training_options`, or a class derived from
            it.
    """
    owner = next(kind for kind in drafter.__mro__ if "training_options" in vars(kind))
    module = import_module(".training", owner.__module__.rpartition(".")[0])
    return getattr(module, drafter.training_options)


def train(kind: type[TrainingOptions], **options: Any) -> Any:
    """Train a drafter; it and the record of its training are saved in the output folder.

    Args:
        kind: the dataclass of the kind's options.
        options: the values of its fields, and of any of `TrainingArguments`.

    Returns:
        The drafter, in evaluation mode.

    Raises:
        ValueError, OSError: something about the inputs is wrong; nothing has been written then. Or
            the loss is no number any more; then files written before that stay.
    """
    names = {item.name for item in fields(kind)}
    more = {name: options.pop(name) for name in list(options) if name not in names}
    run = kind(**options)
    run.check()
    sources = [getattr(run, item.name) for item in fields(run) if item.metadata["read"]]
    check_output(run.output_dir, run.resume, run.overwrite, *sources)
    passed = {
        item.name: getattr(run, item.name)
        for item in fields(TrainingArguments)
        if item.name in names
    }
    common = {
        "logging_steps": 20,
        "save_total_limit": 2,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    arguments = TrainingArguments(**{**common, **run.defaults, **passed, **more})
    if arguments.save_strategy == "best":  # a trainer does not say where it will write
        raise ValueError("save_strategy is 'best', and has to be steps, epoch or no.")
    tokenizer = open_tokenizer(sources[0])
    train_set = encode_rows(load_rows(run.train_file), tokenizer, run.max_length)
    eval_set = (
        encode_rows(load_rows(run.eval_file), tokenizer, run.max_length) if run.eval_file else None
    )
    model = run.open_model(tokenizer, arguments.device)
    check_context(model.config, run.max_length)
    for rows in (train_set, eval_set):
        check_ids(rows, model)
    settings = _settings(run, model, train_set, arguments)
    torch.manual_seed(run.seed)
    inputs = RunInputs(model, tokenizer, arguments, train_set, eval_set)
    drafter = run.untrained(inputs)
    trainer = run.trainer(drafter, inputs)
    is_writer = trainer.is_world_process_zero()

    def save(record: dict[str, Any]) -> None:
        if is_writer:
            replace_model(run.output_dir, partial(run.save, drafter, tokenizer, record))

    alone = written_alone(run.output_dir, run.output_dir / LOCK)
    with alone if is_writer else nullcontext():
        if is_writer:  # another run may have ended there meanwhile
            check_output(run.output_dir, run.resume, run.overwrite, *sources)
        checkpoint = newest_checkpoint(run.output_dir, settings) if run.resume else None
        trainer.add_callback(checkpoints := Checkpoints(settings, arguments, checkpoint))
        trainer.train(resume_from_checkpoint=checkpoint)
        run.finish(trainer)
        record: dict[str, Any] = {
            "method": run.kind,
            **run.record(),
            "samples": len(train_set),
            "steps": trainer.state.global_step,
            "learning_rate": arguments.learning_rate,
            "seed": run.seed,
            "seconds": round(time.time() - checkpoints.begun, 1),
        }
        drafter.eval()
        save(record)  # before anything is measured, which may fail
        if eval_set is not None:
            record["eval"] = trainer.evaluate()
            drafter.eval()
            record |= run.measure(drafter, inputs)
            save(record)
    return run.result(drafter)


# A resumed run must have these in common with the one that it goes on with, and all options but
# those that are free. How long either is does not matter, nor how files and folders are named,
# for data and weights are compared themselves.
SAME_ARGUMENTS = (
    "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "optim", "world_size",
)  # fmt: skip
FREE = {
    "model", "target", "train_file", "eval_file", "output_dir", "max_steps", "num_train_epochs",
    "save_steps", "resume",
    "report_to", "overwrite", "cache_dir", "cache_gb", "target_id",
}  # fmt: skip


def _settings(
    run: TrainingOptions, model: PreTrainedModel, train_set: Dataset, arguments: TrainingArguments
) -> dict[str, Any]:
    """Collect the settings of a run: its kind, data, model and options.

    A run that resumes this one must have the same settings.
    """
    data = hashlib.sha256()
    for row in train_set:
        data.update(json.dumps([row["input_ids"], row["labels"]]).encode())
    options = {item.name: getattr(run, item.name) for item in fields(run) if item.name not in FREE}
    settings = {
        "kind": run.kind,
        "data": data.hexdigest()[:16],
        # whatever number format this hardware is fast at
        "weights": fingerprint(model, torch.bfloat16),
        **options,
        **{name: getattr(arguments, name) for name in SAME_ARGUMENTS},
    }
    return json.loads(json.dumps(settings, default=str))  # as they are read back
