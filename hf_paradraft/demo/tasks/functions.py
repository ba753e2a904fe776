"""Small Python functions from a specification, judged by their syntax trees."""

import ast
from random import Random

from .task import Task, pick

ARGUMENTS = "values numbers scores prices ages sizes weights counts levels marks points rates"
VERBS = {
    "count": "count tally number",
    "sum": "sum total add",
    "list": "select keep pick",
    "first": "find first get",
    "any": "has any contains",
    "all": "all only every",
    "max": "largest top best",
    "min": "smallest lowest least",
}


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
        [("", "{x}"), ("", "{x}"), (f", times {n}", f"{{x}} * {n}"), (f", plus {n}", f"{{x}} + {n}"), (", squared", "{x} ** 2")]
    )


def _body(kind: str, loop: bool, x: str, xs: str, test: str, value: str) -> list[str]:
    if not loop:
        expression = {
            "count": f"sum(1 for {x} in {xs} if {test})",
            "sum": f"sum({value} for {x} in {xs} if {test})",
            "list": f"[{value} for {x} in {xs} if {test}]",
            "first": f"next(({value} for {x} in {xs} if {test}), None)",
            "any": f"any({test} for {x} in {xs})",
            "all": f"all({test} for {x} in {xs})",
            "max": f"max([{value} for {x} in {xs} if {test}], default=None)",
            "min": f"min([{value} for {x} in {xs} if {test}], default=None)",
        }[kind]
        return [f"return {expression}"]
    head = [f"for {x} in {xs}:", f"    if {test}:"]
    match kind:
        case "count":
            return ["count = 0", *head, "        count += 1", "return count"]
        case "sum":
            return ["total = 0", *head, f"        total += {value}", "return total"]
        case "list":
            return ["kept = []", *head, f"        kept.append({value})", "return kept"]
        case "first":
            return [*head, f"        return {value}", "return None"]
        case "any":
            return [*head, "        return True", "return False"]
        case "all":
            return [f"for {x} in {xs}:", f"    if not {test}:", "        return False", "return True"]
        case _:
            sign = ">" if kind == "max" else "<"
            candidate = [f"        if best is None or {value} {sign} best:", f"            best = {value}"]
            return ["best = None", *head, *candidate, "return best"]


def _function(rng: Random) -> tuple[str, str]:
    """(one sentence of specification, the function's source)."""
    kind, loop = rng.choice(list(VERBS)), rng.random() < 0.6
    words, test, tag = _predicate(rng)
    more, value = _transform(rng) if kind in {"sum", "list", "first", "max", "min"} else ("", "{x}")
    xs = pick(rng, ARGUMENTS)
    x = xs[:-1]
    name = f"{pick(rng, VERBS[kind])}_{tag}"
    sentence = {
        "count": f"Return how many {xs} are {words}",
        "sum": f"Return the sum of the {xs} that are {words}{more}",
        "list": f"Return a list of the {xs} that are {words}{more}",
        "first": f"Return the first of the {xs} that is {words}{more}, or None",
        "any": f"Return whether any of the {xs} are {words}",
        "all": f"Return whether all of the {xs} are {words}",
        "max": f"Return the largest of the {xs} that are {words}{more}, or None",
        "min": f"Return the smallest of the {xs} that are {words}{more}, or None",
    }[kind]
    body = _body(kind, loop, x, xs, test.format(x=x), value.format(x=x))
    source = "\n".join([f"def {name}({xs}):", f'    """{sentence}."""', *(f"    {line}" for line in body)])
    return f"{name}({xs}): {sentence}, with {'a loop' if loop else 'one expression'}.", source


def _meaning(source: str) -> str:
    """The syntax tree without its docstrings, as text; raises `SyntaxError` or `ValueError` when there is none."""
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
