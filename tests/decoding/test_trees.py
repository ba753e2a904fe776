"""A tree that grows over what becomes known holds the most probable paths of all, whoever is read
first.
"""

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paradraft.decoding.growing import ROOT, GrowingTree


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 12),
    depth=st.integers(1, 3),
    at_once=st.integers(1, 4),
    sure=st.booleans(),
)
def test_no_other_tree_promises_more(seed, size, depth, at_once, sure: bool):
    """Chances that depend on the token before; ties and certainties among them."""
    rng = numpy.random.default_rng(seed)
    chances = rng.dirichlet([0.3] * 3, size=4).round(1 if sure else 6)
    chances = numpy.clip(chances, 1e-3, 1.0)
    order = numpy.argsort(-chances, axis=1, kind="stable")
    tree = GrowingTree(size, depth)
    nodes = [ROOT]
    while nodes:
        last = [3 if node == ROOT else tree.tokens[node] for node in nodes]
        tree.grow(nodes, numpy.log(numpy.take_along_axis(chances, order, 1)[last]), order[last])
        nodes = tree.unread()[:at_once]

    def chance(path):
        return numpy.prod(
            [chances[before, token] for before, token in zip((3, *path), path, strict=False)]
        )

    every = [path for length in range(1, depth + 1) for path in product(range(3), repeat=length)]
    best = sorted(map(chance, every), reverse=True)[:size]
    paths = [tuple(tree.path(node)) for node in tree.chosen]
    assert len(set(paths)) == len(paths) == min(size, len(every))
    assert [chance(path) for path in paths] == pytest.approx(best)
    assert tree.expected_tokens(tree.chosen) == pytest.approx(sum(best))
    for index, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:index]
    numpy.testing.assert_allclose(
        tree.acceptance(), [chances[(3, *path)[-2], path[-1]] for path in paths]
    )


def test_impossible_tokens_are_never_children():
    tree = GrowingTree(4, 2)
    tree.grow([ROOT], numpy.log([[0.9, 0.1]]), numpy.array([[7, 8]]))
    tree.grow(
        [1, 2],
        numpy.array([[-0.1, -numpy.inf], [-numpy.inf, -numpy.inf]]),
        numpy.array([[5, 6], [5, 6]]),
    )
    assert [tree.path(node) for node in tree.chosen] == [[7], [7, 5], [8]]
    assert tree.unread() == []
