"""Records reshaped: key-value lines to JSON, and CSV rows to tables, lists and sentences.

No record has two fields of one kind: a small model finds a value by its looks long before it learns
to count columns.
"""

import json
from random import Random

from .task import NAMES, Task, exact_lines, pick

CITIES = (
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Quito Berlin Madrid Dublin Vienna Prague Lisbon Athens "
    "Bergen"
).split()
COLOURS = "red blue green black white yellow orange purple pink grey brown gold".split()
JOBS = "baker nurse pilot farmer teacher singer doctor painter writer lawyer driver cook".split()
PETS = "cat dog bird fish horse rabbit mouse snake goat duck sheep pony".split()


def _value(rng: Random, field: str) -> str | int | bool:
    match field:
        case "name" | "owner" | "friend":
            return rng.choice(NAMES)
        case "city" | "home":
            return rng.choice(CITIES)
        case "colour":
            return rng.choice(COLOURS)
        case "job":
            return rng.choice(JOBS)
        case "pet":
            return rng.choice(PETS)
        case "active" | "paid" | "open":
            return rng.random() < 0.5
        case "age" | "size" | "level":
            return rng.randint(1, 99)
        case _:
            return rng.randint(100, 999)


PEOPLE, TRUTHS = "name owner friend", "active paid open"
KINDS = (PEOPLE, "city home", "colour", "job", "pet", TRUTHS, "age size level", "price score")


def _fields(rng: Random, kinds: tuple[str, ...], count: int) -> list[str]:
    return [pick(rng, kind) for kind in rng.sample(kinds, count)]


def make_json(rng: Random) -> Task:
    """Key-value lines of one to three records, written as JSON with one record on a line."""
    count = rng.randint(1, 3)
    fields = _fields(rng, KINDS, {1: 7, 2: 5, 3: 4}[count] + rng.randint(0, 1))
    records = [{field: _value(rng, field) for field in fields} for _ in range(count)]
    separator = rng.choice([": ", " = ", " is "])

    def plain(value: str | int | bool) -> str:
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)

    blocks = [
        "\n".join(f"{key}{separator}{plain(value)}" for key, value in record.items())
        for record in records
    ]
    answer = (
        json.dumps(records[0]) if count == 1 else "[" + ",\n ".join(map(json.dumps, records)) + "]"
    )

    def is_right(output: str) -> bool:
        try:
            return json.loads(output) == json.loads(answer)
        except json.JSONDecodeError:
            return False

    return Task("JSON", "Write as JSON:\n" + "\n\n".join(blocks), answer, is_right)


def make_csv(rng: Random) -> Task:
    """Four to six CSV rows, rewritten as a Markdown table, as sentences or as grouped lines."""
    fields = [
        "name",
        *_fields(rng, tuple(kind for kind in KINDS if kind not in {PEOPLE, TRUTHS}), 3),
    ]
    people = rng.sample(NAMES, rng.randint(4, 6))
    rows = [[person, *(str(_value(rng, field)) for field in fields[1:])] for person in people]
    source = "\n".join([",".join(fields), *(",".join(row) for row in rows)])
    style = rng.choice(["table", "sentences", "lines"])
    if style == "table":
        order = "Turn this CSV into a Markdown table:"
        answer = "\n".join(
            "| " + " | ".join(row) + " |" for row in [fields, ["---"] * len(fields), *rows]
        )
    elif style == "sentences":
        order = "Turn this CSV into sentences:"
        answer = "\n".join(
            f"{row[0]} has the {fields[1]} {row[1]}, the {fields[2]} {row[2]} and the {fields[3]} "
            f"{row[3]}."
            for row in rows
        )
    else:
        order = f"List this CSV by person, {fields[3]} first:"
        answer = "\n".join(
            f"{row[0]}: {fields[3]} {row[3]}; {fields[1]} {row[1]}; {fields[2]} {row[2]}"
            for row in rows
        )
    return Task("CSV", f"{order}\n{source}", answer, exact_lines(answer))
