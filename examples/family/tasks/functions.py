"""Small Python functions from a specification, judged by their syntax trees."""

import ast
from random import Random
from textwrap import indent
from typing import NamedTuple

from .task import Task, pick

ARGUMENTS = "values numbers scores prices ages sizes weights counts levels marks points rates"


class Kind(NamedTuple):
    """What a function does with the `{xs}` that fit a `{test}`, and perhaps with a `{value}` of
    each; braces are filled in.
    """

    verbs: str
    sentence: str
    expression: str
    loop: str


LOOP = "for {x} in {xs}:\n    if {test}:\n        "
BEST = (
    "best = None\n"
    + LOOP
    + "if best is None or {value} SIGN best:\n            best = {value}\nreturn best"
)
KINDS = (
    Kind(
        "count tally number",
        "Return how many {xs} are {words}",
        "sum(1 for {x} in {xs} if {test})",
        "count = 0\n" + LOOP + "count += 1\nreturn count",
    ),
    Kind(
        "sum total add",
        "Return the sum of the {xs} that are {words}{more}",
        "sum({value} for {x} in {xs} if {test})",
        "total = 0\n" + LOOP + "total += {value}\nreturn total",
    ),
    Kind(
        "select keep pick",
        "Return a list of the {xs} that are {words}{more}",
        "[{value} for {x} in {xs} if {test}]",
        "kept = []\n" + LOOP + "kept.append({value})\nreturn kept",
    ),
    Kind(
        "find first get",
        "Return the first of the {xs} that is {words}{more}, or None",
        "next(({value} for {x} in {xs} if {test}), None)",
        LOOP + "return {value}\nreturn None",
    ),
    Kind(
        "has any contains",
        "Return whether any of the {xs} are {words}",
        "any({test} for {x} in {xs})",
        LOOP + "return True\nreturn False",
    ),
    Kind(
        "all only every",
        "Return whether all of the {xs} are {words}",
        "all({test} for {x} in {xs})",
        "for {x} in {xs}:\n    if not {test}:\n        return False\nreturn True",
    ),
    Kind(
        "largest top best",
        "Return the largest of the {xs} that are {words}{more}, or None",
        "max([{value} for {x} in {xs} if {test}], default=None)",
        BEST.replace("SIGN", ">"),
    ),
    Kind(
        "smallest lowest least",
        "Return the smallest of the {xs} that are {words}{more}, or None",
        "min([{value} for {x} in {xs} if {test}], default=None)",
        BEST.replace("SIGN", "<"),
    ),
)


def _predicate(rng: Random) -> tuple[str, str, str]:
    """(words, expression over `{x}`, part of a function name)."""
    n = rng.randint(2, 9)
    limit = rng.randint(1, 60)
    return rng.choice(
        [
            ("even", "{x} % 2 == 0", "even"),
            ("odd", "{x} % 2 == 1", "odd"),
            ("positive", "{x} > 0", "positive"),
            ("negative", "{x} < 0", "negative"),
            (f"greater than {limit}", f"{{x}} > {limit}", f"over_{limit}"),
            (f"less than {limit}", f"{{x}} < {limit}", f"under_{limit}"),
            (f"divisible by {n}", f"{{x}} % {n} == 0", f"by_{n}"),
        ]
    )


def _transform(rng: Random) -> tuple[str, str]:
    """(words, expression over `{x}`)."""
    n = rng.randint(2, 9)
    return rng.choice(
        [
            ("", "{x}"),
            ("", "{x}"),
            (f", times {n}", f"{{x}} * {n}"),
            (f", plus {n}", f"{{x}} + {n}"),
            (", squared", "{x} ** 2"),
        ]
    )


def _function(rng: Random) -> tuple[str, str]:
    """(one sentence of specification, the function's source)."""
    kind, loop = rng.choice(KINDS), rng.random() < 0.6
    words, test, tag = _predicate(rng)
    more, value = _transform(rng) if "{more}" in kind.sentence else ("", "{x}")
    xs = pick(rng, ARGUMENTS)
    x = xs[:-1]
    name = f"{pick(rng, kind.verbs)}_{tag}"
    sentence = kind.sentence.format(xs=xs, words=words, more=more)
    template = kind.loop if loop else f"return {kind.expression}"
    body = template.format(x=x, xs=xs, test=test.format(x=x), value=value.format(x=x))
    source = f'def {name}({xs}):\n    """{sentence}."""\n{indent(body, "    ")}'
    return f"{name}({xs}): {sentence}, with {'a loop' if loop else 'one expression'}.", source


def _meaning(source: str) -> str:
    """The syntax tree without its docstrings, as text; raises `SyntaxError` or `ValueError` when
    there is none.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def make_functions(rng: Random) -> Task:
    """One or two functions, each with its name, argument, meaning and style given."""
    pairs = [_function(rng) for _ in range(rng.randint(1, 2))]
    prompt = "Write in Python:\n" + "\n".join(spec for spec, _ in pairs)
    answer = "\n\n".join(source for _, source in pairs)

    def is_right(output: str) -> bool:
        try:
            return _meaning(output) == _meaning(answer)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False

    return Task("functions", prompt, answer, is_right)
