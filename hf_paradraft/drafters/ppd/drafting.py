"""One call's drafting with prompt tokens: a sparse tree over what the last prompts guessed, and
prompts for the next round's.
"""

from __future__ import annotations

from torch import LongTensor, Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.latency import row_latency
from ...protocol import Drafting, GuessedTokens, Observation, Prefix, PromptRows, SpeculationConfig
from .config import PpdConfig
from .sparse import SIZES, SparseTree, build_trees, sizes

logger = logging.get_logger(__name__)
MAX_RANKS = 16  # guesses of one distance that a tree can hold
# accuracies of an adapter that was not calibrated: the first, by distance, by rank
FIRST, ONWARD, NEXT = (
    0.3,
    0.7,
    0.4,
)


def default_rows(adapter: PpdConfig) -> int:
    """Choose the number of rows of a round without calibration."""
    return max(15, 3 * adapter.num_ids)


def tree_rows(adapter: PpdConfig, options: SpeculationConfig) -> int:
    """Count the rows that a sparse tree may have without the last token's.

    That is the tree size, or the number that a chain or `auto` comes to.

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
        return max(SIZES[-1], adapter.num_ids + 1)
    if size <= adapter.num_ids:
        raise ValueError(
            f"tree_size={size}: for prompt tokens it is a number of rows, here "
            f"{adapter.num_ids + 1} at least."
        )
    return size


class PpdDrafting(Drafting):
    """One call's drafting with prompt tokens: a tree of each sequence's last guesses.

    Args:
        target: in whose forward the prompts stand.
        prompts: `(m·E, hidden)`; row `i·E + e` is prompt `i` of ensemble `e`.
        adapter: its config; without an accuracy a usual one is taken.
        options: `tree_size` is the number of a round's rows without the last token's, guesses and
            prompts together.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Tensor,
        adapter: PpdConfig,
        options: SpeculationConfig,
    ):
        self.target, self.prompts = target, prompts
        self.m, self.e = adapter.num_prompt_tokens, adapter.num_ensembles
        self.vocab_size = target.config.get_text_config().vocab_size
        self.rows = tree_rows(adapter, options)
        self.automatic = options.tree_size == "auto" and adapter.num_ids < SIZES[-1]
        self.accuracy = adapter.accuracy or [
            [FIRST * ONWARD**distance * NEXT**rank for rank in range(MAX_RANKS)]
            for distance in range(self.m)
        ]
        if options.tree_size is None:
            self.accuracy = [row[:1] for row in self.accuracy]
        elif options.tree_size == "auto" and adapter.accuracy is None:
            logger.warning_once(
                "tree_size='auto' wants calibrated guesses (paradraft calibrate): taking usual "
                "ones."
            )
        self.trees: list[tuple[SparseTree, PromptRows]] = []  # by state
        self.guesses: list[
            Tensor
        ] = []  # of each sequence, logits (k, V) for the tokens after its last one

    def propose(self, prefixes: list[Prefix]) -> list[GuessedTokens]:
        """Guess a tree for each sequence, with prompts below some of its nodes.

        The round is likely to end at these nodes.
        """
        if not self.trees:
            self.trees = [(tree, self._hang(tree)) for tree in self._trees(len(prefixes))]
        guesses = self.guesses or [self.prompts.new_zeros((0, 1))] * len(prefixes)
        return [self._tree(guess, prefix) for guess, prefix in zip(guesses, prefixes, strict=True)]

    def _trees(self, batch_size: int) -> list[SparseTree]:
        """Build the trees by state, of `rows` rows or of the best size (PPD, section 4.5).

        The best size brings most tokens per second.
        """
        if not self.automatic:
            return build_trees(self.accuracy, self.rows, self.e)
        choices = sizes(self.accuracy, self.e, row_latency(self.target), batch_size)
        return max(choices, key=lambda size: size.tau / size.seconds).trees

    def _tree(self, guess: Tensor, prefix: Prefix) -> GuessedTokens:
        logits = guess[: prefix.room, : self.vocab_size].float().to(prefix.ids.device)
        logits = logits if prefix.race is None else prefix.race(logits)
        ids = logits.topk(min(max(map(len, self.accuracy)), logits.shape[1]), dim=-1).indices
        tree, rows = self.trees[len(logits)]
        paths = tree.paths
        tokens: LongTensor = (
            ids[[depth - 1 for depth in paths.depths], paths.token_ids]
            if len(paths)
            else prefix.ids.new_zeros(0)
        )
        return GuessedTokens(tokens, paths.parents, paths.acceptance, rows)

    def _hang(self, tree: SparseTree) -> PromptRows:
        nodes, parents, which = tree.prompt_rows(self.e)
        return PromptRows(nodes, parents, self.prompts[which])

    def observe(self, observations: list[Observation | None]) -> None:
        """Take the guesses of the prompts below the node where each sequence's round ended."""
        nothing = self.prompts.new_zeros((0, 1))
        logits = [None if seen is None else seen.prompt_logits for seen in observations]
        # The E embeddings of a prompt stand together.
        self.guesses = [
            nothing if tensor is None else tensor.unflatten(0, (-1, self.e)).mean(1)
            for tensor in logits
        ]
