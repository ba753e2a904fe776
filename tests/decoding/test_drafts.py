"""The tree against brute force: no other N-node tree expects more."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paradraft.decoding.trees import best_first_tree
from hf_paradraft.rules.rejection import sampled_tree


def paths_of(draft):
    paths = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents, strict=True):
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return paths


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 30), st.integers(0, 10_000))
def test_the_most_probable_paths(depth, vocabulary, num_nodes, seed):
    logits = torch.randn(depth, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    q = logits.double().softmax(-1)
    draft = best_first_tree(logits, num_nodes)
    every = [
        path for d in range(1, depth + 1) for path in itertools.product(range(vocabulary), repeat=d)
    ]

    def probability(path):
        return math.prod(q[d, token].item() for d, token in enumerate(path))

    best = sorted((probability(path) for path in every), reverse=True)[:num_nodes]
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths) == len(best)
    assert [probability(path) for path in paths] == pytest.approx(best, rel=1e-4)
    assert all(parent < node for node, parent in enumerate(draft.parents))


def test_one_node_per_depth_where_the_drafter_is_sure():
    logits = torch.full((5, 9), -20.0)
    logits[range(5), [3, 1, 4, 1, 5]] = 20.0
    draft = best_first_tree(logits, 5)
    assert draft.parents == [*range(-1, len(draft) - 1)]
    assert draft.tokens.tolist() == [3, 1, 4, 1, 5]


def test_a_sampled_tree_has_the_best_first_shape_and_different_siblings():
    q = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).softmax(-1)
    shape = best_first_tree(q.log(), 15)
    for seed in range(5):
        torch.manual_seed(seed)
        tree = sampled_tree(q, 15)
        assert tree.parents == shape.parents
        for node in range(-1, 15):
            tokens = [tree.token_ids[child] for child in tree.children(node)]
            assert len(set(tokens)) == len(tokens)


def test_a_sampled_tree_holds_possible_tokens_alone():
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    tree = sampled_tree(q, 12)
    assert len(tree) == 4
    assert set(tree.token_ids) == {0, 1}
