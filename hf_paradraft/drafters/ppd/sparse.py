"""PPD's dynamic sparse trees: guesses to verify, and prompts below them for the next round's
guesses (PPD, section 4.3).

A round is in state `k` if `k` prompts hung below the node where the last one ended: then it has
guesses for `k` distances. Each state has a tree of its own; where its round ends decides the next
state, so the states are a Markov chain. The best trees have the best average gain over its
stationary distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from operator import itemgetter
from typing import Any

import numpy

from ...decoding.trees import best_paths, part
from ...protocol import Draft

SIZES = (4, 6, 8, 10, 12, 15, 18, 22, 26, 31, 40, 50, 63)  # rows next to the root that are compared


@dataclass
class SparseTree:
    """The rows of a round that begins in one state.

    Attributes:
        paths: the candidates; a node's token is its rank.
        prompts: how many prompts hang below the root, then below each node.
    """

    paths: Draft
    prompts: list[int]

    @property
    def gain(self) -> float:
        """f: how many candidates are accepted on average."""
        return sum(self.paths.path_probability)

    def prompt_rows(self, num_ensembles: int) -> tuple[list[int], list[int], list[int]]:
        """Lay out the prompts as rows of a draft of N nodes.

        Three lists give each row's node, the node or row that it sees (`N + r` is row `r`), and its
        prompt embedding. The E embeddings of one prompt stand together; each sees the one before it
        of its own ensemble.
        """
        nodes: list[int] = []
        parents: list[int] = []
        which: list[int] = []
        for node, count in enumerate(self.prompts, -1):
            for prompt in range(count * num_ensembles):
                before = len(self.paths) + len(nodes) - num_ensembles
                parents.append(node if prompt < num_ensembles else before)
                nodes.append(node)
                which.append(prompt)
        return nodes, parents, which


def ends(paths: Draft) -> list[float]:
    """Compute the chance that a round ends at the root, then at each node."""
    chances = [1.0, *paths.path_probability]
    for parent, chance in zip(paths.parents, paths.path_probability, strict=True):
        chances[parent + 1] -= chance
    return [max(chance, 0.0) for chance in chances]


def attach_prompts(chances: Sequence[float], values: Sequence[float], budget: int) -> list[int]:
    """Choose the number of prompts of each node, so that the most useful ones are there.

    These are `budget` of all that there may be, m below each node.

    Args:
        chances: the chances that the round ends at each node, from `ends`.
        values: the gains of a next round that begins with 0 … m prompts; the `i`-th prompt of a
            node brings its chance times `values[i] - values[i - 1]`, and less than the one before.
        budget: the most prompts in all.
    """
    worth = numpy.outer(chances, numpy.diff(values))
    best = (-worth).argsort(axis=None, kind="stable")[:budget]
    return numpy.bincount(best // worth.shape[1], minlength=len(chances)).tolist()


def transitions(trees: list[SparseTree]) -> numpy.ndarray:
    """Compute the transition matrix `(m + 1, m + 1)` between the states of the trees.

    A row has the chances of each next state.
    """
    table = numpy.zeros((len(trees), len(trees)))
    for state, tree in enumerate(trees):
        for chance, count in zip(ends(tree.paths), tree.prompts, strict=True):
            table[state, count] += chance
    return table / table.sum(1, keepdims=True)


def stationary(table: numpy.ndarray) -> numpy.ndarray:
    """Compute the share of rounds in each state in the long run.

    It starts from state 0, as a text does.
    """
    lazy = (table + numpy.eye(len(table))) / 2  # the same shares, and no periods
    return numpy.linalg.matrix_power(lazy, 2**20)[0]


def amortised_gain(trees: list[SparseTree]) -> float:
    """Compute R, the candidates accepted per round in the long run; τ is one more."""
    return float(stationary(transitions(trees)) @ [tree.gain for tree in trees])


@lru_cache(256)  # every call of generate asks for the same ones
def build_trees(
    accuracy: tuple[tuple[float, ...], ...], budget: int, num_ensembles: int = 1
) -> tuple[float, list[SparseTree]]:
    """Build the trees of states 0 … m with the best amortised gain, and tell that gain.

    All splits of the rows between candidates and prompts are tried.

    Args:
        accuracy: `a[d][r]`, the chance that the guess of rank `r` at distance `d` is right if all
            before it were; falls with `r`.
        budget: rows of a round next to the root, candidates and prompts (each E rows) together; at
            least m·E.
        num_ensembles: E.
    """
    scores = [[log(max(chance, 1e-9)) for chance in row] for row in accuracy]
    widest = [best_paths(scores[:state], budget) for state in range(len(scores) + 1)]
    best: tuple[float, list[SparseTree]] = (-1.0, [])
    for num_nodes in range(1, budget - num_ensembles + 1):
        states = [part(paths, range(len(paths))[:num_nodes]) for paths in widest]
        values = [sum(paths.path_probability) for paths in states]
        trees = []
        for paths in states:
            room = (budget - len(paths)) // num_ensembles
            trees.append(SparseTree(paths, attach_prompts(ends(paths), values, room)))
        best = max(best, (amortised_gain(trees), trees), key=itemgetter(0))
    return best


def fastest_trees(
    accuracy: tuple[tuple[float, ...], ...],
    num_ensembles: int,
    latency: Callable[[int], Any],
    batch_size: int = 1,
) -> list[SparseTree]:
    """Build the trees of the size in `SIZES` with most tokens per second (PPD, section 4.5).

    Args:
        accuracy, num_ensembles: as for `build_trees`.
        latency: gives the seconds of the target's forward with that many rows.
        batch_size: a forward has this many times a round's rows.
    """
    best: tuple[float, list[SparseTree]] = (-1.0, [])
    for rows in SIZES:
        if rows > len(accuracy) * num_ensembles:
            gain, trees = build_trees(accuracy, rows, num_ensembles)
            speed = (1 + gain) / latency(batch_size * (1 + rows))
            best = max(best, (speed, trees), key=itemgetter(0))
    return best[1]
