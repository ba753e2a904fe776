"""From guesses to drafts: only the engine decides which tokens are verified, and how many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy
import torch
from transformers import LogitsProcessorList
from transformers.utils import logging

from ..protocol import (
    Draft,
    Drafting,
    Guess,
    GuessedLogits,
    GuessedTokens,
    Prefix,
    SpeculationConfig,
)
from ..protocol.config import MAX_TREE, TreeSize
from .accept import Rule
from .budget import Budget
from .growing import GrowingDraft, grow
from .trees import best_first_tree, cut, likely_path, part, widen

logger = logging.get_logger(__name__)


class DraftBuilder:
    """A maker of the drafts of a group's sequences.

    Args:
        config: the drafter's options.
        rule: the acceptance rule.
        budget: the pair's budget.
        vocab_size: V, the number of the target's ids.
        author: the drafter's name, for messages.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        rule: Rule,
        budget: Budget,
        vocab_size: int,
        author: str = "The drafter",
    ):
        self.config, self.budget, self.vocab_size, self.author = config, budget, vocab_size, author
        self.draws = rule.draws
        # The random draws of the other rules would depend on the clock.
        self.adaptive = config.never_slower and rule.same_text
        self.may_rest = config.never_slower and rule.rests
        self.rules = [rule]  # the rules of all calls that are drafted for
        self.asked = False  # whether the last drafts needed the drafter's own guesses

    def __call__(
        self,
        drafting: Drafting,
        prefixes: list[Prefix],
        processors: Sequence[LogitsProcessorList],
        branches: bool,
        spaces: list[int] | None = None,
        lookups: Sequence[Any] = (),
    ) -> list[Draft]:
        """Make a draft for each sequence, at most `room` deep apart from copies.

        Without a guess, a draft is empty.

        Args:
            drafting: the drafter's side of the call, which guesses.
            prefixes: the sequences' prefixes.
            processors: the target's logits processors, by sequence.
            branches: whether trees can be verified in this round.
            spaces: the depth that copies may have in a tree, by sequence; default: as deep as
                guesses, for texts whose ends may be taken back, or a drafter that has to be asked
                in every round.
            lookups: the finder of tokens to copy of each sequence (`hf_paradraft.copies`), if any.

        Raises:
            ValueError: a guess is invalid; the message says what is wrong with it.
        """
        begun = perf_counter()
        size, copied, enough = self._size(branches), [], False
        if lookups:
            deep = branches and self.config.tree_size is not None
            copied = [
                lookup.find(prefix, space, deep)
                for lookup, prefix, space in zip(
                    lookups, prefixes, spaces or [None] * len(prefixes), strict=True
                )
            ]
            may_spare = self.adaptive and size == "auto" and spaces is not None
            enough = may_spare and lookups[0].are_enough(
                copied, prefixes, self.budget, self.config.num_draft_tokens
            )
        self.asked = not enough
        drafts = [Draft.chain(prefix.ids[0, :0]) for prefix in prefixes]
        if self.asked:
            guesses = self._ask(drafting.propose, prefixes)
            self._check(guesses, prefixes)
            drafts = self._drafts(drafts, guesses, prefixes, processors, branches, size, begun)
        if copied:
            drafts = [
                lookup.join_to(*given, size, self.budget)
                for lookup, *given in zip(lookups, drafts, copied, strict=True)
            ]
        return self._cut(drafts, size, None if self.asked else perf_counter() - begun)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Ask the drafter, which may draw (dropout, say) without moving the target's draws."""
        with ExitStack() as kept:
            for rule in self.rules:
                kept.enter_context(rule.undisturbed())
            return question(*args)

    def _size(self, branches: bool) -> TreeSize:
        """Choose the tree size of a round: None for chains, a number of nodes, or "auto"."""
        if not branches:
            return None
        if self.config.tree_size == "auto" and self.draws is not None:
            logger.warning_once(
                "acceptance='rejection' has no trees that choose their size: drafting chains. Give "
                "a number."
            )
            return None
        return self.config.tree_size

    def is_free(self, size: TreeSize) -> bool:
        """Tell whether the budget chooses a draft's number of nodes."""
        return size == "auto" or (size is None and self.adaptive)

    def _check(self, guesses: Sequence[Guess], prefixes: list[Prefix]) -> None:
        """Check the number, the types and the logits' shapes of the guesses."""
        if not isinstance(guesses, Sequence) or len(guesses) != len(prefixes):
            raise ValueError(
                f"{self.author} was asked about {len(prefixes)} sequences, and has to give a list "
                "of as many guesses."
            )
        for guess in guesses:
            if not isinstance(guess, Guess):
                raise ValueError(
                    f"{self.author} gave a {type(guess).__name__} as a guess; it has to be "
                    "GuessedLogits or GuessedTokens, of which the engine makes the drafts "
                    "(docs/add-a-drafter.md)."
                )
            if isinstance(guess, GuessedLogits) and guess.logits.ndim != 2:
                raise ValueError(
                    f"{self.author} gave logits of shape {tuple(guess.logits.shape)}: wanted (k, "
                    "V') for one sequence."
                )

    def _drafts(
        self,
        drafts: list[Draft],
        guesses: Sequence[Guess],
        prefixes: list[Prefix],
        processors: Sequence[LogitsProcessorList],
        branches: bool,
        size: TreeSize,
        begun: float,
    ) -> list[Draft]:
        """Make drafts of a drafter's guesses; without a guess, a sequence keeps its empty draft."""
        growing: dict[int, GrowingDraft] = {}
        for index, (guess, prefix, processor) in enumerate(
            zip(guesses, prefixes, processors, strict=True)
        ):
            if prefix.room == 0:
                continue
            if isinstance(guess, GuessedTokens):
                # the forward that reads the prompt takes no prompt rows
                if branches or guess.prompt_rows is None:
                    drafts[index] = self._of_tokens(guess, prefix, size)
            elif not len(guess.logits):
                continue
            elif guess.bias is None and guess.extend is None:
                drafts[index] = self._independent(guess, prefix, processor, size)
            else:
                nodes = MAX_TREE if size == "auto" else size
                tree = growing[index] = GrowingDraft(
                    guess, prefix, processor, nodes, self.vocab_size, self.draws
                )
                if self.is_free(size):
                    tree.calibration, tree.least = self.budget.calibration, self.budget.least
        if growing:
            grow(growing, len(prefixes), self.budget, self.adaptive, begun, self._ask)
        for index, grown in growing.items():
            drafts[index] = grown.draft()
        for guess, prefix, draft in zip(guesses, prefixes, drafts, strict=True):
            if not isinstance(guess, GuessedLogits) or not len(guess.logits) or not prefix.room:
                continue
            if not len(draft):
                logger.warning_once(
                    "The drafter's logits are not numbers: going on without drafts where they are "
                    "not."
                )
            elif size is None and self.adaptive and guess.confidences is not None:
                self._believe(draft, guess, prefix)
        return drafts

    def _believe(self, draft: Draft, guess: GuessedLogits, prefix: Prefix) -> None:
        """Set a chain's acceptance to the drafter's own confidences, times the calibration."""
        sure = guess.confidences
        before = torch.cat([prefix.ids[0, -1:], draft.tokens[:-1]])
        chances = (sure(before) if callable(sure) else sure)[: len(draft)]
        draft.acceptance = (
            numpy.array(chances) * self.budget.calibration[1 : 1 + len(chances)]
        ).tolist()

    def _independent(
        self, guess: GuessedLogits, prefix: Prefix, processor: LogitsProcessorList, size: TreeSize
    ) -> Draft:
        """Make a draft of guessed logits whose distances do not depend on each other."""
        logits = cut(guess.logits[: prefix.room], guess.vocabulary, self.vocab_size).to(
            prefix.ids.device
        )
        if self.draws is not None:
            return self.draws.draft(
                prefix.ids, widen(logits, guess.vocabulary, self.vocab_size), size, processor
            )
        if prefix.race is not None:
            logits = prefix.race(logits, None, guess.vocabulary)
        if isinstance(size, int):
            return best_first_tree(logits, size, None, guess.vocabulary)
        calibration = self.budget.calibration[1 : 1 + len(logits)]
        if size == "auto":
            return best_first_tree(
                logits, MAX_TREE, calibration, guess.vocabulary, self.budget.least
            )
        return best_first_tree(logits, len(logits), calibration, guess.vocabulary, ranks=1)

    def _of_tokens(self, guess: GuessedTokens, prefix: Prefix, size: TreeSize) -> Draft:
        """Make a draft of guessed tokens, or of their most probable path if no tree is wanted."""
        parents = (
            Draft.chain(guess.tokens).parents if guess.parents is None else list(guess.parents)
        )
        draft = Draft(
            guess.tokens.to(prefix.ids.device), parents, None, guess.acceptance, guess.prompt_rows
        )
        self._check_tokens(draft, prefix, size)
        if draft.prompt_rows is not None:
            return draft
        if prefix.race is not None and draft.acceptance is not None:
            draft.acceptance = prefix.race.chances(
                draft.token_ids, draft.acceptance, [depth - 1 for depth in draft.depths]
            )
        if size is None:
            draft = part(draft, likely_path(draft))
        if self.is_free(size):
            depths = draft.depths
            chances = (
                numpy.array(draft.acceptance)
                if draft.acceptance
                else self.budget.acceptance[depths]
            )
            draft.acceptance = (chances * self.budget.calibration[depths]).tolist()
        return draft

    def _check_tokens(self, draft: Draft, prefix: Prefix, size: TreeSize) -> None:
        """Refuse guessed tokens that are no tree of the target's ids.

        Raises:
            ValueError: they are not; the message says what is wrong with them.
        """
        tokens, parents, acceptance = draft.tokens, draft.parents, draft.acceptance
        most = self.config.max_nodes
        counts = {len(tokens), len(parents), len(parents if acceptance is None else acceptance)}
        if tokens.ndim != 1 or tokens.is_floating_point() or len(counts) > 1:
            raise ValueError(
                f"{self.author} gave tokens of shape {tuple(tokens.shape)}, {tokens.dtype}, with "
                f"{len(parents)} parents: wanted ids (N,), and of each one parent and one "
                "acceptance, if any."
            )
        if (
            wrong := next(
                (node for node, parent in enumerate(parents) if not -1 <= parent < node), None
            )
        ) is not None:
            raise ValueError(
                f"{self.author} gave node {wrong} the parent {parents[wrong]}: parents come first, "
                "-1 is the last token."
            )
        if any(not 0 <= token < self.vocab_size for token in draft.token_ids):
            raise ValueError(
                f"{self.author} guessed ids outside of the target's vocabulary of "
                f"{self.vocab_size}."
            )
        if draft.depth > prefix.room or (size is not None and len(tokens) > most):
            raise ValueError(
                f"{self.author} guessed {len(tokens)} tokens, {draft.depth} in a row, but there is "
                f"room for {prefix.room} in a row, and at most {most} are allowed."
            )

    def _cut(self, drafts: list[Draft], size: TreeSize, draft_seconds: float | None) -> list[Draft]:
        """Cut drafts to as many nodes as are worth their time, where their size is free."""
        if not self.is_free(size) or any(draft.prompt_rows is not None for draft in drafts):
            return drafts
        count = self.budget.size(
            [draft.path_probability for draft in drafts if len(draft)], draft_seconds
        )
        return [part(draft, range(len(draft))[:count]) for draft in drafts]
