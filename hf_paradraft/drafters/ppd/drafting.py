"""One call's drafting with prompt tokens: a sparse tree over what the last prompts guessed, and prompts for the next round's."""

from __future__ import annotations

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.latency import row_latency
from ...decoding.lookup import COPIED
from ...decoding.trees import Paths, best_paths
from ...protocol import Drafting, GuessedTokens, Observation, Prefix, PromptRows, SpeculationConfig
from .sparse import SIZES, SparseTree, attach_prompts, build_trees, ends, sizes, static_trees

logger = logging.get_logger(__name__)
MAX_RANKS = 16  # guesses of one distance that a tree can hold
DECAY = 0.98  # of a round's weight with each later one


def most_rows(config: SpeculationConfig, count: int, num_ensembles: int) -> int:
    """How many rows beside the last token's a round may have: the tree size, or what a chain or an automatic size comes to.

    Args:
        config: of the drafter.
        count: m·E prompts.
        num_ensembles: E.

    Raises:
        ValueError: too few for the prompts.
    """
    return tree_rows(config, count, num_ensembles) + (COPIED + count if config.prompt_lookup else 0)


def tree_rows(config: SpeculationConfig, count: int, num_ensembles: int) -> int:
    """The rows of the sparse tree alone; arguments as for `most_rows`."""
    m, size = count // num_ensembles, config.tree_size
    if size is None:  # one guess at each distance
        return m + count * (m + 1)
    if size == "auto":
        return max(SIZES[-1], count + 1, default_rows(count))
    if size <= count:
        raise ValueError(f"tree_size={size}: for prompt tokens it is a number of rows, here {count + 1} at least.")
    return size


def default_rows(count: int) -> int:
    """Rows of a round without calibration."""
    return max(15, 3 * count)


class PpdDrafting(Drafting):
    """What each sequence's last prompts guessed, as trees.

    Args:
        target: in whose forward the prompts stand.
        prompts: `(m·E, hidden)`; row `i·E + e` is prompt `i` of ensemble `e`.
        num_ensembles: E.
        accuracy: `accuracy[d][r]`, the counted chance that the guess of rank `r` at distance `d + 1` is right if those before it
            are; None: guesses are taken at their own word, corrected by what came true.
        config: `tree_size` is the number of a round's rows beside the last token's, guesses and prompts together.
        everywhere: all prompts below every node (static trees, for comparison).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Tensor,
        num_ensembles: int,
        accuracy: list[list[float]] | None,
        config: SpeculationConfig,
        everywhere: bool = False,
    ):
        self.target, self.prompts, self.e, self.accuracy, self.everywhere = target, prompts, num_ensembles, accuracy, everywhere
        self.m = len(prompts) // num_ensembles
        self.vocab_size = target.config.get_text_config().vocab_size
        self.rows = tree_rows(config, len(prompts), num_ensembles)
        self.automatic = config.tree_size == "auto" and accuracy is not None
        if config.tree_size is None:
            self.accuracy = accuracy and [row[:1] for row in accuracy]
        elif config.tree_size == "auto" and not self.automatic:
            self.rows = default_rows(len(prompts))
            logger.warning_once(f"tree_size='auto' wants calibrated guesses (paradraft calibrate): taking {self.rows} rows.")
        elif self.automatic and len(prompts) >= SIZES[-1]:
            self.automatic, self.rows = False, len(prompts) + 1
        self.ranks = 1 if config.tree_size is None else MAX_RANKS if self.accuracy is None else max(map(len, self.accuracy))
        self.trees: list[SparseTree] = []  # by state
        self.hung: dict[int, PromptRows] = {}  # the prompts of each state's tree
        self.guesses: list[Tensor] = []  # of each sequence, logits (k, V) for the tokens behind its last one
        self.proposed: list[GuessedTokens] = []
        self.tried, self.accepted = numpy.zeros(self.m + 1), numpy.zeros(self.m + 1)  # decayed, by depth from 1
        self.promised, self.came_true = numpy.full(self.m + 1, 2.0), numpy.full(self.m + 1, 2.0)

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """A tree for each sequence, with prompts below the nodes where the round is likely to end."""
        if self.accuracy is not None and not self.trees:
            self.trees = self._calibrated(len(prefixes))
        guesses = self.guesses or [self.prompts.new_zeros((0, 1))] * len(prefixes)
        self.proposed = [self._tree(guess, prefix) for guess, prefix in zip(guesses, prefixes, strict=True)]
        return self.proposed

    def _calibrated(self, batch_size: int) -> list[SparseTree]:
        """The trees by state: of `rows` rows, or of the size that brings most tokens per second (PPD, section 4.5)."""
        if self.everywhere:
            return static_trees(self.accuracy, self.rows, self.e)
        if not self.automatic:
            return build_trees(self.accuracy, self.rows, self.e)
        choices = sizes(self.accuracy, self.e, row_latency(self.target), batch_size)
        return max(choices, key=lambda size: size.tau / size.seconds).trees

    def _tree(self, guess: Tensor, prefix: Prefix) -> GuessedTokens:
        logits = guess[: prefix.room, : self.vocab_size].float().to(prefix.ids.device)
        logits = logits if prefix.race is None else prefix.race(logits)
        top, ids = logits.topk(min(self.ranks, logits.shape[1]), dim=-1)
        if self.trees:
            tree = self.trees[len(logits)]
            rows = self.hung[len(logits)] = self.hung.get(len(logits)) or self._hang(tree)
        else:
            tree = self._uncalibrated(top - logits.logsumexp(-1, keepdim=True))
            rows = self._hang(tree)
        paths = tree.paths
        tokens: LongTensor = ids[paths.depths, paths.ranks] if paths.parents else prefix.ids.new_zeros(0)
        return GuessedTokens(tokens, paths.parents, paths.acceptance, rows)

    def _hang(self, tree: SparseTree) -> PromptRows:
        nodes, parents, which = tree.prompt_rows(self.e)
        return PromptRows(nodes, parents, self.prompts[which], self.prompts, self.e)

    def _uncalibrated(self, scores: Tensor) -> SparseTree:
        """From the guesses' own probabilities, corrected by what came true in this call."""
        calibration = torch.from_numpy((self.came_true / self.promised)[1 : 1 + len(scores)]).to(scores)
        num_nodes = max(1, (self.rows - self.m * self.e) // 2)  # the root's own prompts are counted
        paths = best_paths((scores + calibration[:, None].log()).tolist(), num_nodes) if len(scores) else Paths()
        values = [0.0, *((self.accepted + 1) / (self.tried + 2))[1:].cumprod().cumsum()]
        chances = ends(paths)
        room = min((self.rows - len(paths.parents)) // self.e, self.m * len(chances))
        return SparseTree(paths, attach_prompts(chances, values, room))

    def observe(self, observations: list[Observation | None]) -> None:
        """Take the guesses of the prompts below the node where each sequence's round ended."""
        if self.accuracy is None and self.proposed:
            self._judge(observations)
        nothing = self.prompts.new_zeros((0, 1))
        logits = [None if seen is None else seen.prompt_logits for seen in observations]
        # The E embeddings of a prompt stand together.
        self.guesses = [nothing if tensor is None else tensor.unflatten(0, (-1, self.e)).mean(1) for tensor in logits]

    def _judge(self, observations: list[Observation | None]) -> None:
        """Learn which of the proposed tokens were right, and what had been promised."""
        before = self.came_true / self.promised
        for counts, rest in ((self.tried, 0.0), (self.accepted, 0.0), (self.promised, 2.0), (self.came_true, 2.0)):
            counts += (1 - DECAY) * (rest - counts)
        for guess, seen in zip(self.proposed, observations, strict=True):
            node, ids = -1, guess.tokens.tolist()
            for depth, token in enumerate([] if seen is None else seen.tokens.tolist(), 1):
                children = [child for child, parent in enumerate(guess.parents) if parent == node]
                if not children:
                    break
                self.tried[depth] += 1
                self.promised[depth] += sum(guess.acceptance[child] for child in children) / max(1e-6, before[depth])
                node = next((child for child in children if ids[child] == token), len(ids))
                if node == len(ids):
                    break
                self.accepted[depth] += 1
                self.came_true[depth] += 1
        self.proposed = []
