"""One call's drafting with prompt tokens: a sparse tree over what the last prompts guessed, and prompts for the next round's."""

from __future__ import annotations

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.latency import row_latency
from ...decoding.trees import Paths, best_paths
from ...protocol import Draft, Drafting, GuessedTokens, Observation, Prefix, PromptRows, SpeculationConfig
from .config import PpdConfig
from .sparse import SIZES, SparseTree, attach_prompts, build_trees, ends, sizes, static_trees

logger = logging.get_logger(__name__)
MAX_RANKS = 16  # guesses of one distance that a tree can hold
DECAY = 0.98  # of a round's weight with each later one


def default_rows(adapter: PpdConfig) -> int:
    """Rows of a round without calibration."""
    return max(15, 3 * adapter.num_ids)


def tree_rows(adapter: PpdConfig, options: SpeculationConfig) -> int:
    """How many rows beside the last token's a sparse tree may have: the tree size, or what a chain or an automatic size comes to.

    Args:
        adapter: its numbers of prompts, and whether it is calibrated.
        options: of the drafter.

    Raises:
        ValueError: too few for the prompts.
    """
    size = options.tree_size
    if size is None:  # one guess at each distance
        return adapter.num_prompt_tokens + adapter.num_ids * (adapter.num_prompt_tokens + 1)
    if size == "auto":
        return default_rows(adapter) if adapter.accuracy is None else max(SIZES[-1], adapter.num_ids + 1)
    if size <= adapter.num_ids:
        raise ValueError(f"tree_size={size}: for prompt tokens it is a number of rows, here {adapter.num_ids + 1} at least.")
    return size


class PpdDrafting(Drafting):
    """What each sequence's last prompts guessed, as trees.

    Args:
        target: in whose forward the prompts stand.
        prompts: `(m·E, hidden)`; row `i·E + e` is prompt `i` of ensemble `e`.
        adapter: its config. Without an accuracy guesses are taken at their own word, corrected by what came true.
        options: `tree_size` is the number of a round's rows beside the last token's, guesses and prompts together.
        everywhere: all prompts below every node (static trees, for comparison).
    """

    def __init__(
        self, target: PreTrainedModel, prompts: Tensor, adapter: PpdConfig, options: SpeculationConfig, everywhere: bool = False
    ):
        self.target, self.prompts, self.everywhere = target, prompts, everywhere
        self.m, self.e, self.accuracy = adapter.num_prompt_tokens, adapter.num_ensembles, adapter.accuracy
        self.vocab_size = target.config.get_text_config().vocab_size
        self.rows = tree_rows(adapter, options)
        self.automatic = options.tree_size == "auto" and adapter.num_ids < SIZES[-1]
        if options.tree_size is None:
            self.accuracy = self.accuracy and [row[:1] for row in self.accuracy]
        elif options.tree_size == "auto" and self.accuracy is None:
            logger.warning_once(f"tree_size='auto' wants calibrated guesses (paradraft calibrate): taking {self.rows} rows.")
        self.ranks = 1 if options.tree_size is None else MAX_RANKS if self.accuracy is None else max(map(len, self.accuracy))
        self.trees: list[tuple[SparseTree, PromptRows]] = []  # by state
        self.guesses: list[Tensor] = []  # of each sequence, logits (k, V) for the tokens behind its last one
        self.proposed: list[GuessedTokens] = []
        self.tried, self.accepted = numpy.zeros(self.m + 1), numpy.zeros(self.m + 1)  # decayed, by depth from 1
        self.expected = numpy.zeros(self.m + 1)  # likewise, how many the guesses' own probabilities promised to be accepted

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """A tree for each sequence, with prompts below the nodes where the round is likely to end."""
        if self.accuracy is not None and not self.trees:
            self.trees = [(tree, self._hang(tree)) for tree in self._calibrated(len(prefixes))]
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
            tree, rows = self.trees[len(logits)]
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
        calibration = torch.from_numpy(self.calibration[1 : 1 + len(scores)]).to(scores)
        num_nodes = max(1, (self.rows - self.m * self.e) // 2)  # the root's own prompts are counted
        paths = best_paths((scores + calibration[:, None].log()).tolist(), num_nodes) if len(scores) else Paths()
        values = [0.0, *((self.accepted + 1) / (self.tried + 2))[1:].cumprod().cumsum()]
        room = (self.rows - len(paths.parents)) // self.e
        return SparseTree(paths, attach_prompts(ends(paths), values, room))

    def observe(self, observations: list[Observation | None]) -> None:
        """Take the guesses of the prompts below the node where each sequence's round ended."""
        if self.accuracy is None and self.proposed:
            self._judge(observations)
        nothing = self.prompts.new_zeros((0, 1))
        logits = [None if seen is None else seen.prompt_logits for seen in observations]
        # The E embeddings of a prompt stand together.
        self.guesses = [nothing if tensor is None else tensor.unflatten(0, (-1, self.e)).mean(1) for tensor in logits]

    @property
    def calibration(self) -> numpy.ndarray:
        """By depth, how many of the guesses' promises come true."""
        return (self.accepted + 2) / (self.expected + 2)

    def _judge(self, observations: list[Observation | None]) -> None:
        """Learn which of the proposed tokens were right, and how many were expected to be."""
        before = self.calibration
        for counts in (self.tried, self.accepted, self.expected):
            counts *= DECAY
        for guess, seen in zip(self.proposed, observations, strict=True):
            draft, node = Draft(guess.tokens, guess.parents or [], acceptance=guess.acceptance), -1
            for depth, token in enumerate([] if seen is None else seen.tokens.tolist(), 1):
                children = draft.children(node)
                if not children:
                    break
                self.tried[depth] += 1
                self.expected[depth] += sum(guess.acceptance[child] for child in children) / max(1e-6, float(before[depth]))
                right = [child for child in children if draft.token_ids[child] == token]
                if not right:
                    break
                self.accepted[depth] += 1
                node = right[0]
        self.proposed = []
