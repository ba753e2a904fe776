"""Dates and units: days after a date, weekdays, lengths, weights and times, each with the working
shown.
"""

from random import Random

from .task import Task, exact_lines

MONTHS = (
    ("January", 31), ("February", 28), ("March", 31), ("April", 30), ("May", 31), ("June", 30),
    ("July", 31), ("August", 31), ("September", 30), ("October", 31), ("November", 30), ("December",
    31),
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = (
    ("m", "cm", 100),
    ("km", "m", 1000),
    ("kg", "g", 1000),
    ("euros", "cents", 100),
    ("cm", "mm", 10),
)
EVENTS = "exam party trip match wedding concert meeting delivery".split()


def _date(rng: Random) -> tuple[str, str]:
    month = rng.randrange(12)
    (name, length), following = MONTHS[month], MONTHS[(month + 1) % 12][0]
    day, later, event = rng.randint(2, length), rng.randint(2, 9), rng.choice(EVENTS)
    total = day + later
    question = f"The {event} is {later} days after {day} {name}. Which date is the {event}?"
    work = f"The {event}: {day} + {later} = {total}. {name} has {length} days. "
    if total <= length:
        return question, work + f"The {event} is on {total} {name}."
    return (
        question,
        work
        + f"{total} - {length} = {total - length}. The {event} is on {total - length} {following}.",
    )


def _weekday(rng: Random) -> tuple[str, str]:
    start, later, event = rng.randrange(7), rng.randint(2, 6), rng.choice(EVENTS)
    days = [WEEKDAYS[(start + step) % 7] for step in range(later + 1)]
    question = f"Today is {days[0]} and the {event} is in {later} days. On which weekday is it?"
    return (
        question,
        f"Counting {later} days from {days[0]}: {', '.join(days[1:])}. The {event} is on "
        f"{days[-1]}.",
    )


def _unit(rng: Random) -> tuple[str, str]:
    big, small, factor = rng.choice(UNITS)
    whole = rng.randint(2, 9)
    rest = rng.randint(1, factor - 1) if factor <= 100 else rng.randint(100, 999)
    question = f"Write {whole} {big} and {rest} {small} in {small}."
    work = f"{whole} {big} = {whole} * {factor} = {whole * factor} {small}."
    return question, f"{work} {whole * factor} + {rest} = {whole * factor + rest} {small}."


def _clock(rng: Random) -> tuple[str, str]:
    hour, minute, later = rng.randint(1, 20), 5 * rng.randint(0, 11), 10 * rng.randint(1, 5)
    event, total = rng.choice(EVENTS), minute + later
    question = (
        f"The {event} starts at {hour}:{minute:02d} and takes {later} minutes. When does it end?"
    )
    work = f"{minute} + {later} = {total} minutes. "
    if total < 60:
        return question, work + f"The {event} ends at {hour}:{total:02d}."
    return (
        question,
        work + f"{total} - 60 = {total - 60}. The {event} ends at {hour + 1}:{total - 60:02d}.",
    )


def make_calendar_question(rng: Random) -> Task:
    """Two or three numbered questions, each answered on its own numbered line."""
    pairs = [rng.choice([_date, _weekday, _unit, _clock])(rng) for _ in range(rng.randint(2, 3))]
    prompt = "\n".join(f"{i}. {question}" for i, (question, _) in enumerate(pairs, 1))
    answer = "\n".join(f"{i}. {work}" for i, (_, work) in enumerate(pairs, 1))
    return Task("dates and units", prompt, answer, exact_lines(answer))
