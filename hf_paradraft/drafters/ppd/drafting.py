"""One call's drafting with prompt tokens: a sparse tree over the last prompts' guesses, and prompts
for the next round's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...decoding.latency import row_latency
from ...protocol import Draft, Drafting, GuessedTokens, Observation, Prefix, PromptRows
from .sparse import SIZES, SparseTree, build_trees, fastest_trees

logger = logging.get_logger(__name__)
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
        self.automatic = size == "auto" and adapter.num_ids < SIZES[-1]
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
