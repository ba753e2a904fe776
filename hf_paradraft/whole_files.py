"""Files that are written whole or not at all: a stop in between leaves what was there."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(file: Path, text: str) -> None:
    """Write a text file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file."""
    write_whole(file, json.dumps(value, indent=2) + "\n")
