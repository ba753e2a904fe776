"""How long sentences are: of each page its lines, words of prose, and words a sentence.

`python tests/docs/sentences.py README.md docs/*.md`
"""

import re
import sys
from pathlib import Path


def prose(text: str) -> str:
    """A page without code, tables, headings, pictures and comments."""
    text = re.sub(r"```.*?```|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "#")))


def sentences(text: str) -> list[int]:
    """Words of each sentence; links in a row are none."""
    paragraphs = [part for part in re.split(r"\n\s*\n|\n(?=[*\d] )", prose(text)) if " · " not in part]
    parts = [part for paragraph in paragraphs for part in re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split()))]
    return [count for part in parts if (count := len(re.findall(r"[\w`][\w`'.,-]*", part)))]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = Path(name).read_text()
        counts = sentences(text)
        print(f"{name:28} {len(text.splitlines()):4} lines {sum(counts):5} words {sum(counts) / len(counts):5.1f} a sentence")
