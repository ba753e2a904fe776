"""Guesses with riders: which are verified, and below which nodes the riders hang that bring the next round's (PPD, section 4)."""

import torch
from torch import Tensor
from transformers.utils import logging

from ..protocol import Draft, GuessedLogits, Prefix, Riders, SpeculationConfig
from ..trees.best_first import Paths, best_paths
from ..trees.sparse import SIZES, SparseTree, attach_prompts, build_trees, ends, sizes, static_trees
from .copies import COPIED
from .pace import Pace
from .vocabulary import cut, to_target

logger = logging.get_logger(__name__)
MAX_RANKS = 16  # guesses of one distance that a tree can hold


def round_rows(config: SpeculationConfig, riders: Riders) -> int:
    """How many rows beside the root's a round may have: the tree size, or what a chain or an automatic size comes to at most.

    Raises:
        ValueError: too few for the riders.
    """
    return _own_rows(config, riders) + (COPIED + len(riders.embeddings) if config.graft else 0)


def _own_rows(config: SpeculationConfig, riders: Riders) -> int:
    """Those of its sparse tree."""
    riding = len(riders.embeddings)
    m, size = riding // riders.num_ensembles, config.tree_size
    if size is None:  # one guess at each distance
        return m + riding * (m + 1)
    if size == "auto":
        return max(SIZES[-1], riding + 1, _usual(riding))
    if size <= riding:
        raise ValueError(f"tree_size={size}: for prompt tokens it is a number of rows, here {riding + 1} at least.")
    return size


def _usual(riding: int) -> int:
    """Rows of a round without calibration."""
    return max(15, 3 * riding)


class SparseShape:
    """One call's trees for a drafter with riders; its tree size is the number of a round's rows beside the root's.

    Args:
        config: the drafter's.
        pace: of the call.
        guess: the first one; all have its riders and its accuracy.
    """

    def __init__(self, config: SpeculationConfig, pace: Pace, guess: GuessedLogits):
        self.pace, self.riders, self.accuracy = pace, guess.riders, guess.accuracy
        self.e = guess.riders.num_ensembles
        self.m = len(guess.riders.embeddings) // self.e
        riding = self.m * self.e
        automatic = config.tree_size == "auto" and self.accuracy is not None
        self.budget = _own_rows(config, guess.riders)
        if config.tree_size is None:
            self.accuracy = self.accuracy and [row[:1] for row in self.accuracy]
        elif config.tree_size == "auto" and not automatic:
            self.budget = _usual(riding)
            logger.warning_once(f"tree_size='auto' wants calibrated guesses (paradraft calibrate): taking {self.budget} rows.")
        elif automatic and riding >= SIZES[-1]:
            automatic, self.budget = False, riding + 1
        self.ranks = 1 if config.tree_size is None else MAX_RANKS if self.accuracy is None else max(map(len, self.accuracy))
        self.trees: list[SparseTree] | None = None if self.accuracy is None else self._calibrated(automatic)
        self.hung: dict[int, tuple[list[int], list[int], Tensor]] = {}  # the riders of each state's tree

    def _calibrated(self, automatic: bool) -> list[SparseTree]:
        """The trees by state: of `budget` rows, or of the size that brings most tokens per second."""
        if self.riders.everywhere:
            return static_trees(self.accuracy, self.budget, self.e)
        if not automatic:
            return build_trees(self.accuracy, self.budget, self.e)
        cost = self.pace.cost
        return max(sizes(self.accuracy, self.e, cost.latency, cost.batch_size), key=lambda size: size.tau / size.seconds).trees

    def draft(self, guess: GuessedLogits, prefix: Prefix, vocab_size: int) -> Draft:
        """The tree over a row's guesses, with riders below the nodes where the round is likely to end."""
        logits = cut(guess.logits[: prefix.room], guess.vocabulary, vocab_size).float().to(prefix.ids.device)
        top, ids = logits.topk(min(self.ranks, logits.shape[1]), dim=-1)
        if self.trees is None:
            tree = self._by_belief(top - logits.logsumexp(-1, keepdim=True))
            riders = self._hang(tree)
        else:
            tree = self.trees[len(logits)]
            riders = self.hung[len(logits)] = self.hung.get(len(logits)) or self._hang(tree)
        paths = tree.paths
        tokens = to_target(ids[paths.depths, paths.ranks], guess.vocabulary) if paths.parents else ids.new_zeros(0).flatten()
        return Draft(tokens, paths.parents, None, paths.beliefs, *riders)

    def _hang(self, tree: SparseTree) -> tuple[list[int], list[int], Tensor]:
        nodes, parents, which = tree.riders(self.e)
        return nodes, parents, self.riders.embeddings[which]

    def _by_belief(self, scores: Tensor) -> SparseTree:
        """Without calibration: the guesses' own probabilities, corrected by what came true in this call."""
        factors = torch.from_numpy(self.pace.factors[1 : 1 + len(scores)]).to(scores)
        num_nodes = max(1, (self.budget - self.m * self.e) // 2)  # the root's own riders are counted
        paths = best_paths((scores + factors[:, None].log()).tolist(), num_nodes) if len(scores) else Paths()
        accepted = (self.pace.held + 1) / (self.pace.tried + 2)
        values = [0.0, *accepted[1 : self.m + 1].cumprod().cumsum()]
        chances = ends(paths)
        room = min((self.budget - len(paths.parents)) // self.e, self.m * len(chances))
        return SparseTree(paths, attach_prompts(chances, values, room))
