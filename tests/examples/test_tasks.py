"""The generators: right by their own check, split without overlap, and hard to please by
accident.
"""

from itertools import islice, pairwise

import pytest

from examples.family.tasks import CATEGORIES, is_held_out, tasks


@pytest.mark.parametrize("category", CATEGORIES)
def test_reference_answers_are_right_and_others_are_not(category):
    made = list(islice(tasks(category, 5, False), 200))
    assert all(task.is_right(task.answer) for task in made)
    assert not any(
        task.is_right("") or task.is_right(task.answer[: len(task.answer) // 2]) for task in made
    )
    wrong = sum(task.is_right(other.answer) for task, other in pairwise(made))
    assert wrong < 10


@pytest.mark.parametrize("category", CATEGORIES)
def test_sides_are_disjoint_and_repeatable(category):
    trained = {task.prompt for task in islice(tasks(category, 0, False), 2000)}
    held_out = [task.prompt for task in islice(tasks(category, 0, True), 50)]
    assert not trained & set(held_out)
    assert all(map(is_held_out, held_out))
    assert held_out == [task.prompt for task in islice(tasks(category, 0, True), 50)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_answers_are_varied(category):
    """Eight reference answers together: at least 60 % of the word 4-grams are different."""
    words = [task.answer.split() for task in islice(tasks(category, 0, True), 8)]
    grams = [tuple(w[i : i + 4]) for w in words for i in range(len(w) - 3)]
    assert len(set(grams)) >= 0.6 * len(grams)


def test_functions_are_judged_by_meaning():
    task = next(tasks("functions", 1, False))
    assert task.is_right(task.answer.replace('    """', '    """Another docstring. '))
    assert not task.is_right(task.answer.replace("return", "return not"))
    assert not task.is_right("import os")
    assert not task.is_right("def broken(:")
