"""A little service dialogue: a request with details, and a reply that must repeat every one of
them.
"""

from random import Random

from .calendar import WEEKDAYS
from .task import NAMES, Task

GREETINGS = ("Hello", "Hi", "Good morning", "Good evening", "Good day")
DISHES = "soup salad pasta pizza curry fish rice bread cheese cake pie stew".split()
DRINKS = "tea coffee water juice milk cocoa".split()
SEATS = (
    "by the window",
    "in the garden",
    "near the door",
    "on the terrace",
    "in a quiet corner",
    "at the bar",
)


def make_dialogue(rng: Random) -> Task:
    """A booking, an order or a reminder; right when every detail comes back."""
    name, greeting, day = rng.choice(NAMES), rng.choice(GREETINGS), rng.choice(WEEKDAYS)
    hour = rng.randint(5, 11)
    kind = rng.choice(["booking", "order", "reminder"])
    if kind == "booking":
        guests, seat, dish = rng.randint(2, 9), rng.choice(SEATS), rng.choice(DISHES)
        details = [name, str(guests), day, str(hour), seat, dish]
        prompt = (
            f"{greeting}, I am {name}. May I book a table for {guests} on {day} at {hour} o'clock, "
            f"{seat}? We would love the {dish}."
        )
        answer = (
            f"{greeting}, {name}! Your table for {guests} is booked.\nYou will sit {seat} on {day} "
            f"at {hour} o'clock.\nThe kitchen will have the {dish} ready for all {guests} of you. "
            f"See you on {day}, {name}!"
        )
    elif kind == "order":
        (first, second), drink = rng.sample(DISHES, 2), rng.choice(DRINKS)
        m, n = rng.randint(2, 9), rng.randint(2, 9)
        details = [name, f"{m} {first}", f"{n} {second}", drink, day, f"{m} + {n} = {m + n}"]
        prompt = (
            f"{greeting}! {name} here. Please bring {m} {first}, {n} {second} and some {drink} on "
            f"{day}."
        )
        answer = (
            f"{greeting}, {name}! Thank you for the order.\nI have noted {m} {first} and {n} "
            f"{second}, so {m} + {n} = {m + n} dishes, with some {drink}.\nEverything will arrive "
            f"on {day}. Enjoy the {first}, the {second} and the {drink}!"
        )
    else:
        friend, dish = rng.choice([other for other in NAMES if other != name]), rng.choice(DISHES)
        details = [name, friend, day, str(hour), dish]
        prompt = (
            f"{greeting}, this is {name}. Remind me to call {friend} on {day} at {hour} o'clock "
            f"about the {dish}."
        )
        answer = (
            f"{greeting}, {name}! I will remind you.\nOn {day} at {hour} o'clock you will hear: "
            f"call {friend} about the {dish}.\nIf {friend} does not answer, I will tell you again "
            f"at {hour + 1} o'clock. Good luck with the {dish}!"
        )
    return Task("dialogue", prompt, answer, lambda out: all(detail in out for detail in details))
