"""How long sentences are: of each page its lines, words of prose, and words a sentence.

`python tests/sentences.py README.md docs/*.md`
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple


def prose(text: str) -> str:
    """A page without code, tables, headings, pictures and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#")))


def sentences(text: str) -> list[int]:
    """Words of each sentence; links in a row are none."""
    paragraphs = [
        part for part in re.split(r"\n\s*\n|\n(?=[*\d] )", prose(text)) if " · " not in part
    ]
    parts = [
        part
        for paragraph in paragraphs
        for part in re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split()))
    ]
    return [count for part in parts if (count := len(re.findall(r"[\w`][\w`'.,-]*", part)))]


class Counted(NamedTuple):
    """Lines of a page, words of its prose, and words a sentence."""

    lines: int
    words: int
    words_a_sentence: float


def count_words(text: str) -> Counted:
    """Of a page."""
    counts = sentences(text)
    return Counted(len(text.splitlines()), sum(counts), sum(counts) / max(1, len(counts)))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        counted = count_words(Path(name).read_text())
        print(
            f"{name:40} {counted.lines:4} lines {counted.words:5} words "
            f"{counted.words_a_sentence:5.1f} a sentence"
        )
