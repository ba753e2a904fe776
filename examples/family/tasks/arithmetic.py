"""Word problems with the working shown: a count that people add to, take from and share out."""

from random import Random

from .task import NAMES, Task, last_line, pick

GOODS = (
    "apples books coins pens stamps shells cards cups eggs keys lamps nuts rings roses bricks "
    "buttons"
)
CONTAINERS = "box bag shop drawer basket garden shed jar"
GAINS = (
    "buys {n} more {goods}",
    "finds {n} {goods}",
    "gets {n} {goods} from {friend}",
    "puts {n} more {goods} in the {container}",
    "wins {n} {goods} in a game",
)
LOSSES = (
    "gives {n} {goods} to {friend}",
    "loses {n} {goods}",
    "sells {n} {goods} at the market",
    "breaks {n} {goods}",
    "lends {n} {goods} to {friend}",
)


def make_word_problem(rng: Random) -> Task:
    """A start, three to five events, and a running count that stays within 0 … 99."""
    person, friend = rng.sample(NAMES, 2)
    goods, container = pick(rng, GOODS), pick(rng, CONTAINERS)
    if rng.random() < 0.5:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        total = a * b
        story = [f"{person} has {a} rows of {b} {goods} in a {container}."]
        working = [f"{person} starts with {a} * {b} = {total} {goods}."]
    else:
        total = rng.randint(5, 60)
        story = [f"{person} has {total} {goods} in a {container}."]
        working = [f"{person} starts with {total} {goods}."]
    pronoun = rng.choice(["Then", "Later", "Next"])
    for _ in range(rng.randint(3, 5)):
        n = rng.randint(1, 9)
        gain = total < 10 or (total < 90 and rng.random() < 0.5)
        phrase = rng.choice(GAINS if gain else LOSSES)
        before, total = total, total + n if gain else total - n
        event = phrase.format(n=n, goods=goods, friend=friend, container=container)
        story.append(f"{pronoun} {person} {event}.")
        working.append(f"{person} {event}: {before} {'+' if gain else '-'} {n} = {total}.")
    question = rng.choice(
        [
            f"How many {goods} are left?",
            f"How many {goods} does {person} have now?",
            f"Count the {goods}.",
        ]
    )
    working.append(f"Answer: {total} {goods}")
    answer = "\n".join(working)
    return Task(
        "word problems",
        " ".join([*story, question]),
        answer,
        lambda out: last_line(out) == working[-1],
    )
