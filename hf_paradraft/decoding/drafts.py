"""From guesses to drafts: which tokens are verified, and how many. Nothing but the engine decides this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy
import torch
from transformers import LogitsProcessorList
from transformers.utils import logging

from ..protocol import Draft, Drafting, Guess, GuessedLogits, GuessedTokens, Prefix, SpeculationConfig
from ..protocol.config import MAX_TREE, TreeSize
from .accept import Rule
from .budget import Budget
from .growing import GrowingDraft, grow
from .lookup import Copy, PromptLookup, with_copied
from .sampling import cut, sequential_choice, to_target, warp, widen
from .trees import best_first_tree, likely_path, part, sampled_tree

logger = logging.get_logger(__name__)


class DraftBuilder:
    """A maker of the drafts of a group's sequences.

    Args:
        config: the drafter's.
        rule: of acceptance.
        budget: of the pair.
        vocab_size: V, of the target.
        author: whose guesses these are, for messages.
        memory: other texts that are copied from (`hf_paradraft.Memory`).
    """

    def __init__(
        self,
        config: SpeculationConfig,
        rule: Rule,
        budget: Budget,
        vocab_size: int,
        author: str = "The drafter",
        memory: Any = None,
    ):
        self.config, self.budget, self.vocab_size, self.author = config, budget, vocab_size, author
        self.sampled = rule.draws_drafts
        # The draws of the other rules would depend on the clock.
        self.adaptive, self.may_rest = config.never_slower and rule.clocked, config.never_slower and rule.rests
        self.generator: torch.Generator | None = None  # of draws; None: torch's own
        copies = not self.sampled and (config.prompt_lookup or memory is not None)
        self.lookup = PromptLookup(0, memory=memory, vocab_size=vocab_size) if copies else None
        self.rules = [rule]  # of all calls that are drafted for
        self.asked = False  # whether the drafter was, for the last drafts

    def __call__(
        self,
        drafting: Drafting,
        prefixes: list[Prefix],
        processors: Sequence[LogitsProcessorList],
        branches: bool,
        spaces: Sequence[int] | None = None,
    ) -> list[Draft]:
        """Make a draft for each sequence: at most `room` deep, copies apart, without a token where there is no guess.

        Args:
            drafting: guesses.
            prefixes: of the sequences.
            processors: of the sequences, the target's.
            branches: whether trees can be verified in this round.
            spaces: how deep what is copied may be in a tree; default: as deep as guesses, behind a text of which some may be
                taken back, or for a drafter that has to be asked every time.

        Raises:
            ValueError: a guess that is none; the message says what is wrong with it.
        """
        begun = perf_counter()
        size = self._size(branches)
        copied = self._copied(prefixes, branches, spaces)
        self.asked = not (size == "auto" and spaces is not None and self._copies_are_enough(copied, prefixes))
        drafts = [Draft.chain(prefixes[0].ids[0, :0])] * len(prefixes)
        if self.asked:
            guesses = self._checked(self._ask(drafting.propose, prefixes), prefixes)
            drafts = self._drafts(guesses, prefixes, processors, branches, size, begun)
        drafts = [self._with_copied(*given, size) for given in zip(drafts, prefixes, copied, strict=True)]
        return self._cut(drafts, size, perf_counter() - begun if not self.asked else None)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Ask the drafter, which may draw (dropout, say) without moving the target's draws."""
        with ExitStack() as kept:
            for rule in self.rules:
                kept.enter_context(rule.undisturbed())
            return question(*args)

    def join(self, other: DraftBuilder, count: int, joining: int) -> None:
        """Make drafts of another one's sequences too, `joining` of them after `count` of its own."""
        if self.lookup is not None and other.lookup is not None:
            self.lookup.hold(count)
            other.lookup.hold(joining)
            self.lookup.texts += other.lookup.texts

    def select(self, rows: list[int]) -> None:
        """Go on with some of the sequences, in this order."""
        if self.lookup is not None:
            self.lookup.hold(1 + max(rows))
            self.lookup.texts = [self.lookup.texts[row] for row in rows]

    def _size(self, branches: bool) -> TreeSize:
        """Choose the tree size of a round: None for chains, a number of nodes, or "auto"."""
        if not branches:
            return None
        if self.config.tree_size == "auto" and self.sampled:
            logger.warning_once("acceptance='rejection' has no trees that choose their size: drafting chains. Give a number.")
            return None
        return self.config.tree_size

    def _is_free(self, size: TreeSize) -> bool:
        """Tell whether a draft's number of nodes is chosen by what is worth its time."""
        return size == "auto" or (size is None and self.adaptive)

    def _copied(self, prefixes: list[Prefix], branches: bool, spaces: Sequence[int] | None) -> list[list[Copy]]:
        """Find what can be copied for each sequence, with its acceptance; nothing if lookup is off."""
        if self.lookup is None:
            return [[] for _ in prefixes]
        self.lookup.hold(len(prefixes))
        deep = branches and self.config.tree_size is not None and spaces is not None
        copied = []
        for index, prefix in enumerate(prefixes):
            self.lookup.read(index, prefix.ids[0], prefix.kept if spaces is None else prefix.ids.shape[1])
            copies = self.lookup.following(index, (spaces[index] if deep else prefix.room) if prefix.room else 0)
            if prefix.race is not None:
                copies = [(tokens, prefix.race.chances(tokens, chances)) for tokens, chances in copies]
            copied.append(copies)
        return copied

    def _copies_are_enough(self, copied: list[list[Copy]], prefixes: list[Prefix]) -> bool:
        """Decide whether the drafter's own forward is not worth its time beside copies.

        Where a sequence's first copied token is wrong, a guess would have brought what drafts bring; else it brings nothing.
        """
        chances = [copies[0][1] if copies else [] for copies, prefix in zip(copied, prefixes, strict=True) if prefix.room]
        budget = self.budget
        if not self.adaptive or not budget.draft or not any(map(len, chances)):
            return False
        guessed = numpy.cumprod(budget.acceptance[1 : 1 + self.config.num_draft_tokens]).sum()
        missed = fmean(1 - (copy[0] if copy else 0.0) for copy in chances) * guessed
        tokens = 1 + fmean(numpy.cumprod(copy).sum() for copy in chances)
        return not budget.worth(missed, budget.draft(), tokens, float(budget.cost(1 + max(map(len, chances)))))

    def _checked(self, guesses: Sequence[Guess], prefixes: list[Prefix]) -> list[Guess]:
        """Check the number, the types and the logits' shapes of the guesses, and return them as a list."""
        if not isinstance(guesses, Sequence) or len(guesses) != len(prefixes):
            raise ValueError(
                f"{self.author} was asked about {len(prefixes)} sequences, and has to give a list of as many guesses."
            )
        for guess in guesses:
            if not isinstance(guess, Guess):
                raise ValueError(
                    f"{self.author} gave a {type(guess).__name__} as a guess; it has to be GuessedLogits or GuessedTokens, of "
                    "which the engine makes the drafts (docs/add-a-drafter.md)."
                )
            if isinstance(guess, GuessedLogits) and guess.logits.ndim != 2:
                raise ValueError(
                    f"{self.author} gave logits of shape {tuple(guess.logits.shape)}: wanted (k, V') for one sequence."
                )
        return list(guesses)

    def _drafts(
        self,
        guesses: list[Guess],
        prefixes: list[Prefix],
        processors: Sequence[LogitsProcessorList],
        branches: bool,
        size: TreeSize,
        begun: float,
    ) -> list[Draft]:
        """Make the drafts of a drafter's guesses."""
        drafts = [Draft.chain(prefix.ids[0, :0]) for prefix in prefixes]
        growing: dict[int, GrowingDraft] = {}
        for index, (guess, prefix, processor) in enumerate(zip(guesses, prefixes, processors, strict=True)):
            if prefix.room == 0:
                continue
            if isinstance(guess, GuessedTokens):
                if branches or guess.prompt_rows is None:  # the forward that reads the prompt takes no prompt rows
                    drafts[index] = self._of_tokens(guess, prefix, size)
            elif not len(guess.logits) or not self._usable(guess):
                continue
            elif guess.bias is None and guess.extend is None:
                drafts[index] = self._independent(guess, prefix, processor, size)
            else:
                nodes = MAX_TREE if size == "auto" else size
                tree = GrowingDraft(guess, prefix, processor, nodes, self.vocab_size, self.sampled, self.generator)
                if self._is_free(size):
                    tree.calibration, tree.least = self.budget.calibration, self.budget.least
                growing[index] = tree
        if growing:
            grow(growing, len(prefixes), self.budget, self.adaptive, begun, self._ask)
        for index, grown in growing.items():
            drafts[index] = grown.draft()
        if size is None and self.adaptive:
            for guess, prefix, draft in zip(guesses, prefixes, drafts, strict=True):
                if isinstance(guess, GuessedLogits) and guess.confidences is not None and len(draft):
                    self._believe(draft, guess, prefix)
        return drafts

    def _usable(self, guess: GuessedLogits) -> bool:
        """Tell whether each row of a guess's logits has a finite maximum, and warn once of logits that have none."""
        if bool(cut(guess.logits, guess.vocabulary, self.vocab_size).amax(-1).isfinite().all()):
            return True
        logger.warning_once("The drafter's logits are not numbers: going on without drafts where they are not.")
        return False

    def _believe(self, draft: Draft, guess: GuessedLogits, prefix: Prefix) -> None:
        """Take the drafter's own word on a chain, corrected by what came true."""
        sure = guess.confidences
        before = torch.cat([prefix.ids[0, -1:], draft.tokens[:-1]])
        chances = (sure(before) if callable(sure) else sure)[: len(draft)]
        draft.acceptance = (numpy.array(chances) * self.budget.calibration[1 : 1 + len(chances)]).tolist()

    def _independent(self, guess: GuessedLogits, prefix: Prefix, processor: LogitsProcessorList, size: TreeSize) -> Draft:
        """Make a draft of guessed logits whose distances do not depend on each other."""
        logits = cut(guess.logits[: prefix.room], guess.vocabulary, self.vocab_size).to(prefix.ids.device)
        if prefix.race is not None:
            logits = prefix.race(logits, None, guess.vocabulary)
        if self.sampled:
            wide = widen(logits, guess.vocabulary, self.vocab_size)
            if isinstance(size, int):
                return sampled_tree(warp(prefix.ids, wide, processor), size, self.generator)
            tokens, scores = sequential_choice(wide, prefix.ids, processor, True, self.generator)
            return Draft.chain(tokens, scores.softmax(-1))
        if isinstance(size, int):
            return best_first_tree(logits, size, None, guess.vocabulary)
        calibration = self.budget.calibration[1 : 1 + len(logits)]
        if size == "auto":
            return best_first_tree(logits, MAX_TREE, calibration, guess.vocabulary, self.budget.least)
        if self.adaptive:
            return best_first_tree(logits, len(logits), calibration, guess.vocabulary, ranks=1)
        return Draft.chain(to_target(logits.max(-1).indices, guess.vocabulary))

    def _of_tokens(self, guess: GuessedTokens, prefix: Prefix, size: TreeSize) -> Draft:
        """Make a draft of guessed tokens; where no tree is wanted, of their most probable path."""
        parents = Draft.chain(guess.tokens).parents if guess.parents is None else list(guess.parents)
        depths = self._checked_depths(guess, parents, prefix, size)
        draft = Draft(guess.tokens.to(prefix.ids.device), parents, None, guess.acceptance, guess.prompt_rows)
        if draft.prompt_rows is not None:
            return draft
        if prefix.race is not None and draft.acceptance is not None:
            draft.acceptance = prefix.race.chances(guess.tokens.tolist(), draft.acceptance, [depth - 1 for depth in depths])
        if size is None and not draft.is_chain:
            path = likely_path(draft)
            draft, depths = part(draft, path), [depths[node] for node in path]
        if self._is_free(size):
            chances = numpy.array(draft.acceptance) if draft.acceptance else self.budget.acceptance[depths]
            draft.acceptance = (chances * self.budget.calibration[depths]).tolist()
        return draft

    def _checked_depths(self, guess: GuessedTokens, parents: list[int], prefix: Prefix, size: TreeSize) -> list[int]:
        """Compute the depths of guessed tokens, from 1, and refuse tokens that are no tree of the target's ids.

        Raises:
            ValueError: what is wrong with them.
        """
        count, acceptance = len(guess.tokens), guess.acceptance
        if len(parents) != count or (acceptance is not None and len(acceptance) != count):
            raise ValueError(
                f"{self.author} guessed {count} tokens with {len(parents)} parents: one each, and one acceptance, if any."
            )
        if guess.tokens.ndim != 1 or guess.tokens.is_floating_point():
            raise ValueError(
                f"{self.author} gave tokens of shape {tuple(guess.tokens.shape)}, {guess.tokens.dtype}: wanted ids (N,)."
            )
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"{self.author} gave node {node} the parent {parent}: parents come first, -1 is the last token.")
            depths.append(1 if parent < 0 else depths[parent] + 1)
        if any(not 0 <= token < self.vocab_size for token in guess.tokens.tolist()):
            raise ValueError(f"{self.author} guessed ids outside of the target's vocabulary of {self.vocab_size}.")
        if max(depths, default=0) > prefix.room:
            raise ValueError(f"{self.author} guessed {max(depths)} tokens in a row, but there is room for {prefix.room}.")
        if size is not None and count > self.config.max_nodes:
            raise ValueError(f"{self.author} guessed {count} tokens, but at most {self.config.max_nodes} are allowed.")
        return depths

    def _with_copied(self, draft: Draft, prefix: Prefix, copies: list[Copy], size: TreeSize) -> Draft:
        """Join a sequence's draft and what can be copied, where that promises more; a tree may become deeper than K by it."""
        if not copies or draft.prompt_rows is not None:  # a sparse tree holds what pays next to its prompts
            return draft
        if size is not None:
            if draft.acceptance is None and len(draft):
                return draft  # tokens of which nobody says how likely they are
            return with_copied(draft, copies, MAX_TREE if size == "auto" else int(size))
        tokens, chances = copies[0]
        guessed = draft.path_probability or numpy.cumprod(self.budget.acceptance[1 : 1 + len(draft)])
        return (
            draft if numpy.cumprod(chances).sum() <= sum(guessed) else Draft.chain(prefix.ids.new_tensor(tokens), None, chances)
        )

    def _cut(self, drafts: list[Draft], size: TreeSize, draft_seconds: float | None) -> list[Draft]:
        """Cut drafts to as many nodes as are worth their time, where their size is free."""
        if not self._is_free(size) or any(draft.prompt_rows is not None for draft in drafts):
            return drafts
        count = self.budget.size([draft.path_probability for draft in drafts if len(draft)], draft_seconds)
        return [draft.first(count) for draft in drafts]
