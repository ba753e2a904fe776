"""Files that are written whole or not at all: a stop in between leaves what was there."""

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a text file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
