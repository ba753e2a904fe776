"""PPD's trees against brute force, and their promise against a simulated chain of rounds."""

import itertools
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paradraft.decoding.budget import RowLatency
from hf_paradraft.decoding.trees import best_paths
from hf_paradraft.drafters.ppd.drafting import (
    SparseTree,
    amortised_gain,
    attach_prompts,
    build_trees,
    ends,
    fastest_trees,
    stationary,
    transitions,
)


def accuracies(m, ranks, seed):
    """Chances that fall with the rank, and with the distance."""
    rng = numpy.random.default_rng(seed)
    rows = numpy.sort(rng.dirichlet(numpy.full(ranks + 1, 0.4), m)[:, :-1])[:, ::-1]
    falling = rows * numpy.linspace(1, rng.uniform(0.3, 1), m)[:, None]
    return tuple(map(tuple, falling.tolist()))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 20), st.integers(0, 10_000))
def test_no_tree_of_as_many_nodes_promises_more(m, ranks, num_nodes, seed):
    accuracy = accuracies(m, ranks, seed)
    paths = best_paths([[math.log(max(a, 1e-9)) for a in row] for row in accuracy], num_nodes)
    every = [
        path for depth in range(1, m + 1) for path in itertools.product(range(ranks), repeat=depth)
    ]
    chances = sorted(
        (math.prod(accuracy[d][r] for d, r in enumerate(path)) for path in every), reverse=True
    )
    assert sum(paths.path_probability) == pytest.approx(sum(chances[:num_nodes]), abs=1e-6)
    assert all(parent < node for node, parent in enumerate(paths.parents))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 12), st.integers(0, 10_000))
def test_prompts_are_where_they_are_worth_most(m, num_nodes, budget, seed):
    accuracy = accuracies(m, 4, seed)
    scores = [[math.log(max(a, 1e-9)) for a in row] for row in accuracy]
    chances = ends(best_paths(scores, num_nodes))
    values = [
        sum(best_paths(scores[:k], num_nodes).path_probability) if k else 0.0 for k in range(m + 1)
    ]
    counts = attach_prompts(chances, values, budget)
    budget = min(budget, m * len(chances))
    assert sum(counts) == budget
    worth = [
        sum(chance * values[count] for chance, count in zip(chances, choice, strict=True))
        for choice in itertools.product(range(m + 1), repeat=len(chances))
        if sum(choice) == budget
    ]
    chosen = sum(chance * values[count] for chance, count in zip(chances, counts, strict=True))
    assert chosen >= 0.99 * max(worth)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.integers(0, 10_000))
def test_the_promise_is_what_a_simulation_brings(m, e, more, seed):
    budget = m * e + 1 + more
    _, trees = build_trees(accuracies(m, 5, seed), budget, e)
    assert len(trees) == m + 1
    for state, tree in enumerate(trees):
        assert len(tree.paths.parents) + e * sum(tree.prompts) <= budget
        assert max(tree.paths.depths, default=0) <= state
        assert len(tree.prompt_rows(e)[0]) == e * sum(tree.prompts)
    rng, state, accepted, rounds = numpy.random.default_rng(seed), 0, 0, 20_000
    likely = [numpy.array(ends(tree.paths)) / sum(ends(tree.paths)) for tree in trees]
    draws = rng.random(rounds)
    depths = [[0, *tree.paths.depths] for tree in trees]
    cumulative = [chances.cumsum() for chances in likely]
    for draw in draws:
        node = min(int(numpy.searchsorted(cumulative[state], draw)), len(depths[state]) - 1)
        accepted += depths[state][node]
        state = trees[state].prompts[node]
    assert accepted / rounds == pytest.approx(amortised_gain(trees), abs=0.05)


def test_shares_of_a_chain_known_by_hand():
    assert stationary(numpy.array([[0.0, 1.0], [1.0, 0.0]])) == pytest.approx([0.5, 0.5])
    assert stationary(numpy.array([[0.9, 0.1], [0.3, 0.7]])) == pytest.approx([0.75, 0.25])
    # From state 0 nothing leads to state 2, which would keep itself.
    assert stationary(
        numpy.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    ) == pytest.approx([0.0, 1.0, 0.0])


def test_more_rows_promise_more_and_cost_decides():
    accuracy = accuracies(3, 16, 1)
    gains = [build_trees(accuracy, rows)[0] for rows in (4, 8, 16, 32, 63)]
    assert gains == sorted(gains)
    free = fastest_trees(accuracy, 1, RowLatency([1, 64], [1.0, 1.0]))
    dear = fastest_trees(accuracy, 1, RowLatency([1, 64], [1.0, 64.0]))
    assert max(len(tree.paths) + sum(tree.prompts) for tree in free) == 63
    assert max(len(tree.paths) + sum(tree.prompts) for tree in dear) == 4
    assert transitions(free).sum(1) == pytest.approx(1)


def test_prompt_rows_of_a_worked_example():
    """Two prompts below the root, one below its only candidate, two embeddings each: rows 1a 1b 2a
    2b, then 1a 1b.
    """
    tree = SparseTree(build_trees(((0.5,), (0.4,)), 7, 2)[1][1].paths, [2, 1])
    nodes, parents, which = tree.prompt_rows(2)
    assert nodes == [-1, -1, -1, -1, 0, 0]
    assert parents == [-1, -1, 1, 2, 0, 0]  # one candidate: rider r is 1 + r
    assert which == [0, 1, 2, 3, 0, 1]
