"""How much a reader has to hold: files and tokens of code (no comments, no docstrings), of folders,
the loop and the package.

`python tests/package/size.py` prints the table; `--check` fails where a limit is passed.
"""

import argparse
import ast
import io
import sys
import tokenize
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hf_paradraft"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# A hover shows a docstring's first line alone: a function's begins with a verb, and a class's with
# a noun.
ODD_BEGINNINGS = {"What", "Of", "As", "That", "Where", "Who"}
NO_VERBS = {
    "The", "A", "An", "One", "Whether", "Which", "How", "Its", "It", "By", "In", "All", "Every",
    "Any", "Those", "None",
    "Nothing", "Itself", "Logits", "Tokens", "Ids", "States", "Embeddings", "Inputs", "Rows",
    "Masks", "Prompts", "Nodes",
    "Texts", "New", "Expected", "For", "Arguments", "Features", "Temperatures", "Weights",
    "Numbers", "Bytes", "Records",
    "Drafts", "Keys", "Positions", "Zeros", "Losses", "Guesses", "Chances", "Seconds", "Names",
    "Layers", "Indices", "Copies",
    "Batches", "Both",
}  # fmt: skip
# Tokens of each folder, and of all: what is allowed, which only falls, and what is wanted. Whoever
# adds takes it from elsewhere in the same folder; a limit rises by nothing but what moved there
# from another folder, whose limit falls by as much.
LIMITS = {
    "protocol": (2_404, 2_000),
    "decoding": (25_405, 22_000),
    "copies": (3_604, 3_500),
    "rules": (4_757, 4_500),
    "drafters": (51_792, 48_000),
    "pearl": (5_253, 5_500),
    "training": (21_340, 17_000),
    "integration": (6_357, 5_000),
    "hub": (2_099, 2_000),
    "serve": (11_269, 9_500),
    "bench": (5_909, 6_500),
    "report": (2_554, 3_500),
    "cli": (6_430, 5_500),
    "demo": (1_964, 3_000),
    "elsewhere": (8_367, 7_000),
    "loop files": (23, 26),
    "loop tokens": (23_926, 25_000),
    "package files": (160, 160),
    "package tokens": (159_504, 140_000),
}


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where the docstrings of a file begin: line and column."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body)
    return {
        (first.lineno, first.col_offset)
        for first in firsts
        if isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    }


def count(file: Path) -> int:
    """Tokens of code, however its lines are broken: no comma before a closing bracket counts, and
    the parts of one string are one.
    """
    text = file.read_text()
    skipped = docstrings(ast.parse(text))
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    tokens = [token for token in read if token.type not in LAYOUT and token.start not in skipped]
    broken = sum(
        (token.string == "," and after.string in ")]}")
        or token.type == after.type == tokenize.STRING
        for token, after in pairwise(tokens)
    )
    return len(tokens) - broken


def module(parts: tuple[str, ...]) -> list[Path]:
    """The files that importing a dotted name runs, as far as they are the package's and hold
    code.
    """
    path = PACKAGE.joinpath(*parts)
    if path.with_suffix(".py").is_file():
        return [path.with_suffix(".py")]
    return [path / "__init__.py"] if (path / "__init__.py").is_file() else []


def imports(file: Path) -> set[Path]:
    """The package's files that a file imports, anywhere in it."""
    here = file.relative_to(PACKAGE).parent.parts
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (
            *here[: len(here) - node.level + 1],
            *(node.module.split(".") if node.module else ()),
        )
        found.update(module(base))
        for alias in node.names:
            found.update(module((*base, alias.name)))
    return found


def reached(start: Path) -> set[Path]:
    """A file and all that it imports, directly or not."""
    found, open_ = {start}, [start]
    while open_:
        new = imports(open_.pop()) - found
        found |= new
        open_ += new
    return {file for file in found if count(file)}


def odd_docstrings(file: Path) -> list[str]:
    """List the docstrings of a file whose first line does not begin with a verb; of classes and
    properties, with no noun.
    """
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, kinds) and (first := (ast.get_docstring(node) or "").split()[:1]):
            decorators = {getattr(part, "id", "") for part in getattr(node, "decorator_list", ())}
            is_function = isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ) and not decorators & {
                "property",
                "cached_property",
            }
            if first[0].strip("`.,:") in ODD_BEGINNINGS | (NO_VERBS if is_function else set()):
                found.append(f"{file.relative_to(PACKAGE.parent)}, {getattr(node, 'name', 'top')}")
    return found


def main() -> None:
    """Print the figures; with `--check`, fail where one passes its limit, or where a docstring
    begins oddly.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--files", action="store_true", help="list the files that the loop imports")
    options = parser.parse_args()
    loop, package = reached(PACKAGE / "decoding" / "loop.py"), list(PACKAGE.rglob("*.py"))
    sizes = {file: count(file) for file in {*loop, *package}}
    figures = dict.fromkeys(LIMITS, 0)
    for file in package:
        folder = file.relative_to(PACKAGE).parts[0]
        figures[folder if folder in figures else "elsewhere"] += sizes[file]
    figures |= {"loop files": len(loop), "loop tokens": sum(sizes[file] for file in loop)}
    figures |= {
        "package files": len(package),
        "package tokens": sum(sizes[file] for file in package),
    }
    if options.files:
        for file in sorted(loop, key=sizes.__getitem__):
            print(f"{sizes[file]:7,}  {file.relative_to(PACKAGE)}")
    for name, figure in figures.items():
        print(f"{name:15} {figure:8,}  at most {LIMITS[name][0]:,}, wanted {LIMITS[name][1]:,}")
    if options.check and (
        odd := [place for file in sorted(package) for place in odd_docstrings(file)]
    ):
        sys.exit(f"Docstrings that do not begin with a verb, or a class's noun: {'; '.join(odd)}.")
    if options.check and (
        passed := [name for name, figure in figures.items() if figure > LIMITS[name][0]]
    ):
        sys.exit(f"Larger than allowed: {', '.join(passed)}.")


if __name__ == "__main__":
    main()
