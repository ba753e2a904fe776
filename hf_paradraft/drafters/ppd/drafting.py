"""One call's drafting with prompt tokens over sparse trees: guesses to verify, and below them
prompts for the next round's guesses (PPD, section 4.3).

A round is in state `k` if `k` prompts hung below the node where the last one ended: then it has
guesses for `k` distances. Each state has a tree of its own; where its round ends decides the next
state, so the states are a Markov chain. The best trees have the best average gain over its
stationary distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any

import numpy
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.latency import row_latency
from ...decoding.trees import best_paths, part
from ...protocol import Draft, Drafting, GuessedTokens, Observation, Prefix, PromptRows

logger = logging.get_logger(__name__)
SIZES = (4, 6, 8, 10, 12, 15, 18, 22, 26, 31, 40, 50, 63)  # rows next to the root that are compared
MAX_RANKS = 16  # guesses of one distance that a tree can hold
# Accuracies of an adapter that was not calibrated: the first, by distance, by rank.
FIRST, ONWARD, NEXT = 0.3, 0.7, 0.4


class PpdDrafting(Drafting):
    """One call's drafting with prompt tokens: a tree of each sequence's last guesses.

    Args:
        target: the model in whose forward the prompts stand.
        drafter: a `PpdDrafter`, with the prompts and the options of their use.
    """

    def __init__(self, target: PreTrainedModel, drafter: Any):
        adapter, size = drafter.config, drafter.speculation_config.tree_size
        self.target, self.prompts, self.rows = target, drafter.prompts, drafter.max_rows
        self.e = adapter.num_ensembles
        self.vocab_size = target.config.get_text_config().vocab_size
        self.automatic = size == "auto"
        accuracy = adapter.accuracy or [
            [FIRST * ONWARD**distance * NEXT**rank for rank in range(MAX_RANKS)]
            for distance in range(adapter.num_prompt_tokens)
        ]
        self.accuracy = tuple(tuple(row if size else row[:1]) for row in accuracy)
        if size == "auto" and adapter.accuracy is None:
            logger.warning_once(
                "tree_size='auto' wants calibrated guesses (paradraft calibrate): taking usual "
                "ones."
            )
        self.trees: list[tuple[Draft, PromptRows]] = []  # by state: candidates, and prompts below
        # of each sequence, logits (k, V) for the tokens after its last one
        self.guesses: list[Tensor] = []

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Guess a tree for each sequence, with prompts below some of its nodes.

        The round is likely to end at these nodes.
        """
        if not self.trees:
            for tree in self._trees(len(prefixes)):
                nodes, parents, which = tree.prompt_rows(self.e)
                rows = PromptRows(nodes, parents, self.prompts[which])
                self.trees.append((tree.paths, rows))
        guesses = self.guesses or [self.prompts.new_zeros((0, 1))] * len(prefixes)
        return [self._tree(guess, prefix) for guess, prefix in zip(guesses, prefixes, strict=True)]

    def _trees(self, batch_size: int) -> list[SparseTree]:
        """Build the trees by state, with `rows` rows or the fastest number of them."""
        if self.automatic:
            return fastest_trees(self.accuracy, self.e, row_latency(self.target), batch_size)
        return build_trees(self.accuracy, self.rows, self.e)[1]

    def _tree(self, guess: Tensor, prefix: Prefix) -> GuessedTokens:
        logits = guess[: prefix.room, : self.vocab_size].float().to(prefix.ids.device)
        logits = logits if prefix.race is None else prefix.race(logits)
        ids = logits.topk(min(max(map(len, self.accuracy)), logits.shape[1]), dim=-1).indices
        paths, rows = self.trees[len(logits)]
        distances = [depth - 1 for depth in paths.depths]
        tokens = ids[distances, paths.token_ids]
        return GuessedTokens(tokens, paths.parents, paths.acceptance, rows)

    def observe(self, observations: list[Observation | None]) -> None:
        """Take the guesses of the prompts below the node where each sequence's round ended."""
        nothing = self.prompts.new_zeros((0, 1))
        logits = [None if seen is None else seen.prompt_logits for seen in observations]
        # The E embeddings of a prompt stand together.
        self.guesses = [
            nothing if tensor is None else tensor.unflatten(0, (-1, self.e)).mean(1)
            for tensor in logits
        ]


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
        budget: rows of a round next to the root, candidates and prompts (each E rows) together;
            more than m·E.
        num_ensembles: E.
    """
    scores = [[log(max(chance, 1e-9)) for chance in row] for row in accuracy]
    widest = [best_paths(scores[:state], budget) for state in range(len(scores) + 1)]
    splits = []
    for num_nodes in range(1, budget - num_ensembles + 1):
        states = [part(paths, range(len(paths))[:num_nodes]) for paths in widest]
        values = [sum(paths.path_probability) for paths in states]
        trees = []
        for paths in states:
            room = (budget - len(paths)) // num_ensembles
            trees.append(SparseTree(paths, attach_prompts(ends(paths), values, room)))
        splits.append(trees)
    best = max(splits, key=amortised_gain)
    return amortised_gain(best), best


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
    prompts = len(accuracy) * num_ensembles
    sizes = [rows for rows in SIZES if rows > prompts] or [prompts + 1]
    built = {rows: build_trees(accuracy, rows, num_ensembles) for rows in sizes}

    def speed(rows: int) -> float:
        return (1 + built[rows][0]) / latency(batch_size * (1 + rows))

    return built[max(sizes, key=speed)][1]
