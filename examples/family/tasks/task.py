"""What a task is: a prompt, the one right answer, and how to check another."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

NAMES = (
    "Mia Tom Ana Ben Eva Leo Zoe Max Ida Sam Lea Jon Amy Kai Nora Paul Rosa Otto Vera Hugo Lily "
    "Emil Clara Oscar Alice Bruno Diana Felix Greta Henry Irene Jonas"
).split()


@dataclass(frozen=True)
class Task:
    """One prompt with its reference answer.

    Attributes:
        category: the family of tasks it belongs to, a key of `examples.family.tasks.CATEGORIES`.
        prompt: what the user asks.
        answer: the reference answer, without the end-of-text token.
        is_right: judges an output; True when it is a correct answer to `prompt`.
    """

    category: str
    prompt: str
    answer: str
    is_right: Callable[[str], bool]


def last_line(text: str) -> str:
    """The last line that is not blank, stripped; empty for blank text."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def exact_lines(answer: str) -> Callable[[str], bool]:
    """A check that wants every line of `answer`, trailing blanks aside."""
    return lambda output: (
        [line.rstrip() for line in output.strip().splitlines()] == answer.strip().splitlines()
    )


def pick(rng: Random, words: str) -> str:
    """One of the space-separated `words`."""
    return rng.choice(words.split())
