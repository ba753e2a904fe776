"""The folder of a training run: new, resumed or written over, but never mixed up."""

import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..files import PUBLISHED, read_json

logger = logging.get_logger(__name__)
MADE_OF_THEM = ("tau.png", "training_args.bin")


def check_output(output_dir: Path, resume: bool, overwrite: bool, *sources: str | Path | None) -> str | None:
    """Refuse a folder that must not be written to.

    Args:
        output_dir: new or empty, unless `resume` or `overwrite`.
        resume: go on from the newest whole checkpoint.
        overwrite: use a folder that has files.
        sources: models that the run reads, and its cache, as folders or Hub ids; None for none.

    Returns:
        The checkpoint to resume, if there is one.

    Raises:
        ValueError: it is a file, or has files; it is one of the run's sources, or holds one; or `resume` and `overwrite` are both
            asked for.
    """
    for source in sources:
        if source is not None and Path(source).exists():
            path = Path(source).resolve()
            if output_dir.resolve() in (path, *path.parents):
                raise ValueError(
                    f"{output_dir} is, or holds, {source}, which this run reads: give the output a folder of its own."
                )
    if resume and overwrite:
        raise ValueError("--resume goes on with what --overwrite replaces: pass one of them.")
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file; the output must be a folder.")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (resume or overwrite):
        raise ValueError(f"{output_dir} already has files: pass --resume to go on, --overwrite to replace, or another folder.")
    return _newest_whole(output_dir) if resume else None


def _newest_whole(output_dir: Path) -> str | None:
    """The checkpoint with the most steps that was written to its end; a run may have been killed in the middle of one."""
    numbers = [(file.name.removeprefix("checkpoint-"), file) for file in output_dir.glob("checkpoint-*")]
    for _, checkpoint in sorted(((int(n), file) for n, file in numbers if n.isdigit()), reverse=True):
        if _is_whole(checkpoint):
            return str(checkpoint)
        logger.warning("%s is not whole, for its run was stopped while it was written: it is left aside.", checkpoint)
    return None


def _is_whole(checkpoint: Path) -> bool:
    """Whether the trainer's state is there, which is written last, and all weights can be read."""
    try:
        read_json(checkpoint / "trainer_state.json")
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(file, framework="pt"):
                pass
    except (OSError, SafetensorError):
        return False
    return True


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
