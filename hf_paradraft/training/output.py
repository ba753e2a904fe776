"""The folder of a training run: no source is an output, only whole checkpoints count, and a model
is replaced at once.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import time
from typing import Any
from zipfile import is_zipfile

from filelock import Timeout
from huggingface_hub.utils import WeakFileLock
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ..files import PUBLISHED, check_whole, other_settings, read_json, share_weights, write_json

logger = logging.get_logger(__name__)
RUN = "run.json"  # in every whole checkpoint, written last: how its run was made
# where a model is written, where the files of the weights before go, and what a run holds meanwhile
NEW, FORMER, LOCK = ".paradraft.new", "former", ".paradraft.lock"
CHECKPOINT = re.compile(rf"checkpoint-(\d+)(\.{FORMER}(-\d+)?)?")  # or one laid aside
MADE_HERE = ".paradraft"  # in every checkpoint, whole or not: the seconds of its run so far
OF_WEIGHTS = ("bench.json.part", "tau.png", "training_args.bin")
NOT_OURS = ("LICENSE", "README.md")  # unless it is a card of ours


def check_output(
    output_dir: Path, resume: bool, overwrite: bool, *sources: str | Path | None
) -> None:
    """Refuse a folder that must not be written to.

    Args:
        output_dir: the output folder; new or empty, unless `resume` or `overwrite`.
        resume: go on from the newest whole checkpoint.
        overwrite: use a folder that has files.
        sources: the models that the run reads, and its cache, as folders or Hub ids; None for none.

    Raises:
        ValueError: it is a file, or has files; it is one of the run's sources, or holds one; or
            `resume` and `overwrite` are both asked for.
    """
    for source in sources:
        if source is not None and (Path(source).exists() or isinstance(source, Path)):
            path = Path(source).resolve()
            if output_dir.resolve() in (path, *path.parents):
                raise ValueError(
                    f"{output_dir} is, or holds, {source}, which this run reads: give the output a "
                    "folder of its own."
                )
    if resume and overwrite:
        raise ValueError("--resume goes on with what --overwrite replaces: pass one of them.")
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file; the output must be a folder.")
    if not (resume or overwrite) and any(file.name != LOCK for file in output_dir.glob("*")):
        raise ValueError(
            f"{output_dir} already has files: pass --resume to go on, --overwrite to replace, or "
            "another folder."
        )
    if resume and not _checkpoints(output_dir) and any(output_dir.glob("*.safetensors")):
        raise ValueError(
            f"{output_dir} has a model and no checkpoint to go on from: pass --overwrite to "
            "replace it, or another."
        )


@contextmanager
def written_alone(output: Path, lock: Path) -> Iterator[None]:
    """Refuse an output that another process is writing.

    Args:
        output: the file or folder.
        lock: the file that is locked meanwhile; its folder is made if need be.

    Raises:
        OSError: another process has locked it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with WeakFileLock(lock, timeout=1):
            yield
    except Timeout:
        raise OSError(
            f"Another process is writing {output}: wait for it, or name another output."
        ) from None


def _checkpoints(output_dir: Path) -> list[Path]:
    """List this library's checkpoints, whole or not and laid aside or not, the newest first."""
    ours = (
        file
        for file in output_dir.glob("checkpoint-*")
        if CHECKPOINT.fullmatch(file.name) and (file / MADE_HERE).exists()
    )
    return sorted(ours, key=lambda file: (-_step(file), file.name))


def _step(checkpoint: Path) -> int:
    """Read the step of a checkpoint from its name."""
    return int(re.split("[-.]", checkpoint.name)[1])


def newest_checkpoint(output_dir: Path, settings: dict[str, Any]) -> str | None:
    """Find this run's whole checkpoint with the most steps; None if there is none.

    A checkpoint is whole if it was written to its end.

    Args:
        output_dir: the run's output folder.
        settings: the run's settings.

    Raises:
        ValueError: all whole ones are of runs that were made otherwise.
    """
    other: dict[str, Any] | None = None
    for checkpoint in _checkpoints(output_dir):
        if not (checkpoint / RUN).exists():
            logger.warning(
                "%s is not whole, for its run was stopped while it was written: it is left aside.",
                checkpoint,
            )
        elif (damaged := _damaged(checkpoint)) is not None:
            logger.warning("%s is damaged, so its checkpoint is left aside.", damaged)
        elif (made := _made(checkpoint)) == settings:
            return str(checkpoint)
        else:
            other = other or made
    if other is not None:
        different = other_settings(other, settings)
        raise ValueError(
            f"The checkpoints in {output_dir} are of a run with other settings ({different}): use "
            "those again to go on, pass --overwrite to begin anew, or name another folder."
        )
    return None


def _made(checkpoint: Path) -> dict[str, Any]:
    """Read how a checkpoint's run was made; empty if that is not there, or damaged."""
    try:
        made = read_json(checkpoint / RUN)
    except OSError:
        return {}
    made.pop("optimiser", None)  # earlier versions named it
    return made


def _damaged(checkpoint: Path) -> Path | None:
    """Find a file of a checkpoint that is cut off or overwritten; None: there is none."""
    for file in (checkpoint / RUN, *checkpoint.glob("*.safetensors")):
        try:
            check_whole(file)
        except OSError:
            return file
    return next((file for file in checkpoint.glob("*.pt") if not is_zipfile(file)), None)


class Checkpoints(TrainerCallback):
    """A callback that marks this run's checkpoints and removes only those that they replace.

    A mark says that a checkpoint is ours, and, once all is written, that it is whole. The trainer's
    own rotation goes by numbers, and would take a new run's first checkpoints for the oldest.

    Args:
        settings: the run's settings.
        arguments: the trainer's arguments; their `save_total_limit` is obeyed here.
        resumed: the checkpoint that the run goes on from; None: it begins anew.

    Attributes:
        begun: the time when the run began, or would have begun without a break.
    """

    def __init__(
        self, settings: dict[str, Any], arguments: TrainingArguments, resumed: str | None = None
    ):
        self.settings, limit = settings, arguments.save_total_limit or 0
        self.limit = limit if limit > 0 else None
        self.begun = time()
        if resumed is not None:
            self.begun -= float((Path(resumed) / MADE_HERE).read_text() or 0)
        arguments.save_total_limit = None

    def on_step_end(self, args, state, control, **kwargs):
        if not control.should_save or not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if os.path.lexists(checkpoint):  # a trainer writes into what is there
            aside = checkpoint.rename(_free(checkpoint.with_name(f"{checkpoint.name}.{FORMER}")))
            if not (aside / MADE_HERE).exists():
                logger.warning(
                    "%s is of no run of this library: it is called %s now.", checkpoint, aside.name
                )
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / MADE_HERE).write_text(str(time() - self.begun))

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        written = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_json(written / RUN, self.settings)
        ours = [file for file in _checkpoints(written.parent) if not file.is_symlink()]
        before = [
            file
            for file in ours
            if _made(file) == self.settings and _step(file) < state.global_step
        ]
        kept = {*[written, *before][: self.limit], Path(state.best_model_checkpoint or "")}
        for old in {*ours} - kept:
            (old / RUN).unlink(missing_ok=True)  # first: half of it is left if this is stopped
            shutil.rmtree(old)


def replace_model(output_dir: Path, save: Callable[[Path], None]) -> None:
    """Put a new model into its folder, all of it or nothing.

    Files about the weights before go to `former/`. Measurements, plots, and a card that this
    library wrote, speak of the former weights; so do files of another kind of model. All else in
    the folder stays. The former weights leave first, so that whenever this is stopped, no config
    lies next to weights of another model; they are removed once the new ones are there.

    Args:
        output_dir: the model's folder, made if need be.
        save: a function that writes the model into the folder that it is given.

    Raises:
        OSError: it cannot be written; then the folder is as it was.
    """
    made, is_new = output_dir / NEW, not output_dir.exists()
    former = _free(output_dir / FORMER)
    shutil.rmtree(made, ignore_errors=True)  # of a run that was stopped here
    made.mkdir(parents=True)
    try:
        save(made)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # unless something else lies there by now
                output_dir.rmdir()
        raise
    share_weights(made)
    new = {file.name for file in made.iterdir()}
    stale = [file for pattern in (*PUBLISHED, *OF_WEIGHTS) for file in output_dir.glob(pattern)]
    weights = {file for file in stale if file.suffix == ".safetensors"}
    if weights and all(
        file.name in new and filecmp.cmp(file, made / file.name, shallow=False) for file in weights
    ):
        stale, weights = [], set()  # files about them stay true
    for file in sorted(stale, key=lambda file: file not in weights):
        is_left = file.name not in new and (file.name not in NOT_OURS or _is_our_card(file))
        if file in weights or is_left:
            former.mkdir(exist_ok=True)
            file.replace(former / file.name)
    move_into(made, output_dir)
    shutil.rmtree(made)
    for file in weights:
        if file.name in new:
            (former / file.name).unlink()
    with suppress(OSError):  # unless something is left there
        former.rmdir()


def _free(folder: Path) -> Path:
    """Find a name for a folder that is not there yet: this one, or with a number after it."""
    names = (folder.name if number == 0 else f"{folder.name}-{number}" for number in count())
    return next(path for path in map(folder.with_name, names) if not os.path.lexists(path))


def _is_our_card(file: Path) -> bool:
    """Tell whether a file is a model card that this library rendered."""
    return file.name == "README.md" and "\n- paradraft\n" in file.read_text(
        encoding="utf-8", errors="replace"
    )


def move_into(made: Path, output_dir: Path) -> None:
    """Move all files of a new model to where it belongs, its weights last.

    Other files that are there stay.

    Args:
        made: the new model's folder, on the same disk; left empty of files.
        output_dir: the folder to move to, made if need be.
    """
    files = [file for file in made.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda path: (path.suffix == ".safetensors", path)):
        destination = output_dir / file.relative_to(made)
        destination.parent.mkdir(parents=True, exist_ok=True)
        file.replace(destination)
