"""Rows that a run writes one after the other, and goes on with after it was stopped."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from ..files import other_settings, read_json, rows_of, whole, write_json
from .output import written_alone

# after a journal's name: how its rows are made, and rows of a finished run that are overwritten
RUN, FORMER = ".run", ".former"
SETTINGS = {"target", "temperature"}  # in every `.run`, for others write files of that name


class Journal:
    """Rows in a file of JSON lines, which grows by one at a time.

    FILE.run says how the rows are made. Where a file is overwritten, it is called FILE.former until
    the new one is finished.
    """

    def __init__(self, file: Path, settings: dict[str, Any], overwrite: bool = False):
        self.file, self.former = file, file.with_name(f"{file.name}{FORMER}")
        run = file.with_name(f"{file.name}{RUN}")
        if not file.exists() or overwrite:
            # first: old rows must not be found next to new settings
            if file.exists() and not self.former.exists():  # else that is the finished one
                file.replace(self.former)
            file.unlink(missing_ok=True)
            write_json(run, settings)
            file.touch()
        elif not run.exists():
            raise ValueError(
                f"{file} exists, and no {run.name} says how it was made: pass --overwrite, or name "
                "another output."
            )
        elif other := other_settings(read_json(run), settings):
            raise ValueError(
                f"{file} was made with other settings ({other}): use those again to go on, pass "
                "--overwrite to begin anew, or name another output."
            )
        else:
            rows, _, _ = file.read_bytes().rpartition(b"\n")  # a killed run may leave half a line
            os.truncate(file, len(rows) + 1 if rows else 0)

    @classmethod
    @contextmanager
    def open(cls, file: Path, settings: dict[str, Any], overwrite: bool = False) -> Iterator[Self]:
        """Open a run's journal; the run is finished where the block ends.

        Args:
            file: the file of the rows.
            settings: the settings that decide the rows.
            overwrite: begin anew, even where the file has rows of another run.

        Raises:
            ValueError: the file's rows were made otherwise, or it is not known how.
            OSError: another process is writing it.
        """
        with written_alone(file, file.with_name(f".{file.name}.lock")):
            journal = cls(file, settings, overwrite)
            yield journal
            journal.former.unlink(missing_ok=True)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the rows so far."""
        return rows_of(self.file, "train")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, all of it or nothing."""
        size = self.file.stat().st_size
        try:
            with self.file.open("ab") as opened:
                opened.write(_as_line(row))
        except BaseException:
            os.truncate(self.file, size)
            raise

    def put_in_order(self, name: str) -> None:
        """Sort the rows by the number that each has under a name, and leave that out.

        A file whose rows have none is in order already. Rows are read one at a time.
        """
        places: list[tuple[int, int]] = []  # number and offset of each row
        numbered = False
        with self.file.open("rb") as lines:
            while line := lines.readline():
                row = json.loads(line)
                numbered |= name in row
                places.append((row.get(name, len(places)), lines.tell() - len(line)))
            if not numbered:
                return
            file = self.file.resolve()  # a link stays one
            with whole(file) as temporary, temporary.open("wb") as ordered:
                shutil.copymode(file, temporary)
                for _, offset in sorted(places):
                    lines.seek(offset)
                    row = json.loads(lines.readline())
                    row.pop(name, None)
                    ordered.write(_as_line(row))


def _as_line(row: dict[str, Any]) -> bytes:
    """Write a row as a line of JSON."""
    return (json.dumps(row, ensure_ascii=False, default=str) + "\n").encode()


def check_output_file(output: Path, *sources: str | Path | None) -> None:
    """Refuse an output that is no file, or that would overwrite a source or foreign files.

    Foreign files are those that others have left next to it under names that are needed.

    Args:
        output: the file of a journal.
        sources: prompts, and rows to avoid: files or Hub datasets; None for none.

    Raises:
        ValueError: it would.
    """
    if output.is_dir() or not output.name:
        raise ValueError(f"The output {str(output)!r} is a folder: name a file.")
    needed = [output.with_name(f"{output.name}{end}") for end in (RUN, FORMER)]
    written = {file.resolve() for file in (output, *needed)}
    for source in sources:
        if source is not None and Path(source).resolve() in written:
            raise ValueError(
                f"{source} would be written to: name another one for the answers than {output}."
            )
    try:
        ours = read_json(needed[0]).keys() >= SETTINGS
    except OSError:
        ours = False
    if foreign := [file for file in needed if (file.is_dir() if ours else file.exists())]:
        raise ValueError(
            f"{foreign[0]} is none of this command's, which needs the name: move it, or name "
            "another output."
        )
