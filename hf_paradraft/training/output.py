"""The folder of a training run: new, resumed or written over, but never mixed up."""

import shutil
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

from ..files import PUBLISHED

MADE_OF_THEM = ("tau.png", "training_args.bin")


def check_output(output_dir: Path, resume: bool, overwrite: bool) -> str | None:
    """Refuse a folder that must not be written to.

    Args:
        output_dir: new or empty, unless `resume` or `overwrite`.
        resume: go on from the last checkpoint.
        overwrite: use a folder that has files.

    Returns:
        The checkpoint to resume, if there is one.

    Raises:
        ValueError: it is a file, or has files; or `resume` and `overwrite` are both asked for.
    """
    if resume and overwrite:
        raise ValueError("--resume goes on with what --overwrite replaces: pass one of them.")
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file; the output must be a folder.")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (resume or overwrite):
        raise ValueError(f"{output_dir} already has files: pass --resume to go on, --overwrite to replace, or another folder.")
    return get_last_checkpoint(str(output_dir)) if resume and output_dir.is_dir() else None


def left_from_before(output_dir: Path) -> list[Path]:
    """What a former run left that would be loaded or published with the new one's weights, to be given to `drop`."""
    return [file for pattern in (*PUBLISHED, *MADE_OF_THEM) for file in output_dir.glob(pattern)]


def drop(left: list[Path], written_since: float) -> None:
    """Remove what a former run left and the new one, all of whose files are there by now, did not write itself.

    Args:
        left: from `left_from_before`.
        written_since: when the new files began to be written, as `time.time` has it.
    """
    for file in left:
        if file.exists() and file.stat().st_mtime < written_since:
            file.unlink()


def drop_old_checkpoints(output_dir: Path) -> None:
    """Remove a former run's checkpoints, once nothing can fail any more, so that no later resume takes one of them."""
    for old in output_dir.glob("checkpoint-*"):
        shutil.rmtree(old)


def move_into(made: Path, output_dir: Path) -> None:
    """Move all files of a new model to where it belongs, its weights last; what else is there stays.

    Args:
        made: on the same disk; left empty of files.
        output_dir: made if need be.
    """
    files = [file for file in made.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda one: (one.suffix == ".safetensors", one)):
        place = output_dir / file.relative_to(made)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)
