"""The embedded family's questions: held out, and without a run of 13 words in common with any task
that it was trained on.

`python -m examples.family.held_out` writes them anew, in Spec-Bench's format.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from statistics import quantiles

from examples.family.tasks import CATEGORIES, tasks
from hf_paradraft.demo import QUESTIONS

# words; what GPT-3's authors took for a sign of contamination (Brown et al. 2020, appendix C)
RUN = 13
PER_CATEGORY, CANDIDATES = 16, 6000
SEED = 0  # of the family
# The shares of a draw that a category gets at most, of some 500 texts: `build.STAGES` draws JSON
# and CSV more often than others.
MEGABATCHES, MOST_TEXTS = 480, {"CSV": 260, "JSON": 220}


def lessons() -> Iterator[str]:
    """What the drafter and the prompt tokens learned from, and what they were calibrated on
    (`build.build`).
    """
    for name in CATEGORIES:
        for seed, count in ((SEED + 1, 400), (SEED + 2, 5000), (SEED + 3, 40)):
            for task in islice(tasks(name, seed, False), count):
                yield from (task.prompt, task.answer)


def pretraining(every: int = 1) -> Iterator[str]:
    """All tasks that the target and its parent may have read (`corpus.Corpus`), of every so many
    megabatches.
    """
    for index in range(0, MEGABATCHES, every):
        rng = Random(f"{SEED}/{index}")
        for name in CATEGORIES:
            for task in islice(tasks(name, rng.getrandbits(48), False), MOST_TEXTS.get(name, 120)):
                yield from (task.prompt, task.answer)


def runs(text: str) -> set[int]:
    """Hashes of all runs of `RUN` words."""
    words = text.split()
    return {hash(tuple(words[i : i + RUN])) for i in range(len(words) - RUN + 1)}


def write_questions(file: Path = QUESTIONS) -> None:
    """Held-out prompts that share no run with any text of the training, with answers as long as
    held-out answers are.

    Short prompts have fewer runs to share, so the first that have none would be too easy a set.
    """
    seen: set[int] = set()
    for text in (*lessons(), *pretraining()):
        seen |= runs(text)
    with file.open("w") as lines:
        for name in CATEGORIES:
            held_out = list(islice(tasks(name, SEED, True), CANDIDATES))
            fresh = [task for task in held_out if not runs(task.prompt) & seen]
            lengths = quantiles((len(task.answer) for task in held_out), n=PER_CATEGORY + 1)
            Random(SEED).shuffle(lengths)  # so that a few questions are short and long too
            for number, length in enumerate(lengths, 1):
                chosen = min(fresh, key=lambda task: abs(len(task.answer) - length))
                fresh.remove(chosen)
                lines.write(
                    json.dumps(
                        {
                            "question_id": f"{name} {number}",
                            "category": name,
                            "turns": [chosen.prompt],
                        }
                    )
                    + "\n"
                )


if __name__ == "__main__":
    write_questions()
