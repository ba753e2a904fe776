"""Prompt lookup: copy the tokens after earlier matches of a text's end (RASD; Graft;
SuffixDecoding).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from statistics import fmean
from sys import maxsize
from typing import Any

import numpy
from torch import LongTensor

from ..decoding.budget import Budget
from ..decoding.trees import part
from ..protocol import Draft, Prefix
from ..protocol.config import MAX_TREE, TreeSize
from .memory import MAX_MATCH, HashChains

Copy = tuple[list[int], list[float]]  # tokens, and the chance of each if those before it are right
# the most copied tokens: 10, or twice as many as match if that is more; and the most in all
COPIED, GROWTH, DEEPEST = 10, 2, 48
REALIGNED = 0  # match length recorded for a copy that goes on after a rejected token
# How often a copied token was right after a match of 1, 2, 3, and 4 or more tokens: the first one,
# and one after a right one. Measured in a chat model's answers to 400 prompts
# (SmolLM2-135M-Instruct); from here each call learns its own.
FIRST, ONWARD = (0.3, 0.5, 0.5, 0.7), (0.5, 0.6, 0.65, 0.8)
# matches up to each of these lengths share their acceptance
CLASSES = (REALIGNED, 1, 2, 3, 4, 8, 16, MAX_MATCH)


@dataclass
class Copied:
    """Copied tokens, kept until it is known how many of them were right."""

    source: Any  # HashChains, or a `Memory`
    place: int  # of the first token in the source
    tokens: list[int]
    length: int  # of the match
    # how often its first token followed such a match, relative to the one that did most often
    share: float = 1.0

    @property
    def kind(self) -> int:
        """The class of its match."""
        return next(most for most in CLASSES if self.length <= most)


class PromptLookup:
    """A finder of tokens to copy for one sequence.

    It learns how often its copies are right.

    Args:
        longest, shortest: the most and the fewest tokens of a match in the text itself.
        memory: a memory of other texts to copy from (`hf_paradraft.Memory`).
        vocab_size: V; ids outside of it, such as those for images, are not copied.

    Attributes:
        first, onward: how often a copy's first token and later ones were right: hits and tries, by
            class of match, shared by the sequences of a call.
        chains: the sequence's tokens.
        copies: the last copies.
        broken: copies of which the last compared token was wrong, from the token after it on.
    """

    deepest = DEEPEST

    def __init__(
        self,
        longest: int = MAX_MATCH,
        shortest: int = 1,
        memory: Any = None,
        vocab_size: int = maxsize,
    ):
        self.longest, self.shortest, self.memory = longest, shortest, memory
        self.vocab_size = vocab_size
        believed = [(kind, min(max(1, kind), len(FIRST)) - 1) for kind in CLASSES]
        self.first = {kind: [2.0 * FIRST[index], 2.0] for kind, index in believed}
        self.onward = {kind: [4.0 * ONWARD[index], 4.0] for kind, index in believed}
        self._forget()

    def _forget(self) -> None:
        self.chains, self.copies, self.broken = HashChains(1), list[Copied](), list[Copied]()

    def for_sequence(self) -> PromptLookup:
        """Make the lookup of a sequence of this call, which shares what it learns."""
        other = copy.copy(self)
        other._forget()
        return other

    def begin(self, vocab_size: int) -> None:
        """Begin a call of a target with V = `vocab_size`.

        Raises:
            ValueError: the memory holds ids of another vocabulary.
        """
        if self.memory is not None and self.memory.largest >= vocab_size:
            raise ValueError(
                f"The drafter's memory holds the id {self.memory.largest}, and the target's "
                f"vocabulary ends at {vocab_size}: its texts have to be in the target's own "
                "tokens."
            )
        self.vocab_size = vocab_size

    def remember(self, text: LongTensor) -> None:
        """Add a text that has ended to the memory, if that remembers texts.

        A text with ids outside of the vocabulary, such as those for images, is left out.
        """
        if (
            self.memory is not None
            and self.memory.remember
            and 0 <= int(text.min()) <= int(text.max()) < self.vocab_size
        ):
            self.memory.add(text)

    def find(self, prefix: Prefix, space: int | None, deep: bool) -> list[Copy]:
        """Find copies after a prefix, the one with the most expected tokens first.

        Args:
            prefix: the sequence's prefix.
            space: the number of tokens that may be verified; None: the text's end may be taken
                back.
            deep: whether copies may be longer than guesses, where `space` allows it.
        """
        self.read(prefix.ids[0], prefix.kept if space is None else prefix.ids.shape[1])
        copies = self.following(
            space if deep and space is not None and prefix.room else prefix.room
        )
        if prefix.race is None:
            return copies
        return [(tokens, prefix.race.chances(tokens, chances)) for tokens, chances in copies]

    def are_enough(
        self,
        copied: list[list[Copy]],
        prefixes: list[Prefix],
        budget: Budget,
        num_draft_tokens: int,
    ) -> bool:
        """Tell whether the drafter's own forward, in addition to copies, is not worth its time.

        If a sequence's first copied token is wrong, a guess is assumed to bring as many tokens as
        drafts usually do; otherwise none.
        """
        chances = [
            copies[0][1] if copies else []
            for copies, prefix in zip(copied, prefixes, strict=True)
            if prefix.room
        ]
        if not budget.draft or not any(map(len, chances)):
            return False
        guessed = numpy.cumprod(budget.acceptance[1 : 1 + num_draft_tokens]).sum()
        missed = fmean(1 - (copy[0] if copy else 0.0) for copy in chances) * guessed
        tokens = 1 + fmean(numpy.cumprod(copy).sum() for copy in chances)
        return not budget.worth(
            missed, budget.draft(), tokens, float(budget.cost(1 + max(map(len, chances))))
        )

    def join_to(self, draft: Draft, copies: list[Copy], size: TreeSize, budget: Budget) -> Draft:
        """Add a sequence's copies to a tree, or replace a weaker chain by the best copy.

        This may make a tree deeper than K. A draft with prompt rows, or a tree whose chances are
        not known, stays as it is.
        """
        # a sparse tree has no room for further nodes next to its prompts
        if not copies or draft.prompt_rows is not None:
            return draft
        if size is not None:
            if draft.acceptance is None and len(draft):
                return draft  # tokens whose chances are not known
            return with_copied(draft, copies, MAX_TREE if size == "auto" else int(size))
        tokens, chances = copies[0]
        guessed = draft.path_probability or numpy.cumprod(budget.acceptance[1 : 1 + len(draft)])
        return (
            draft
            if numpy.cumprod(chances).sum() <= sum(guessed)
            else Draft.chain(draft.tokens.new_tensor(tokens), None, chances)
        )

    def read(self, ids: LongTensor, unchanged: int) -> None:
        """Index the sequence's new tokens, and learn which of the last copies were right.

        Args:
            ids: the whole text, int64 `(n,)`.
            unchanged: the number of its first tokens that have not changed.
        """
        begin = self.chains.end
        while self.chains.end > unchanged:  # something was taken back
            self.chains.pop()
        new = ids[self.chains.end :].tolist()
        for token in new:
            self.chains.append(token)
        came = new[max(0, begin - unchanged) :]  # the tokens that the last copies guessed
        if not came:
            return
        copies, self.copies, self.broken = self.copies, [], []
        for copied in copies:
            hits = [guess == token for guess, token in zip(copied.tokens, came, strict=False)]
            right = [*hits, False].index(False)
            for index in range(min(right + 1, len(hits)) if copied.share == 1 else 0):
                counts = (self.onward if index else self.first)[copied.kind]
                counts[0] += index < right
                counts[1] += 1
            if right == len(came) - 1 < len(copied.tokens):
                self.broken.append(
                    replace(copied, place=copied.place + len(came), length=REALIGNED, share=1.0)
                )

    def following(self, room: int) -> list[Copy]:
        """Find copies of at most `room` tokens, the one with the most expected tokens first.

        One follows the longest match in the text itself, one or two the longest in the memory. A
        copy with a wrong token also goes on after it, since most edits change one token.
        """
        self.copies = self._copies(min(room, DEEPEST)) if room else []
        copies = map(self._with_chances, self.copies)
        return sorted(copies, key=lambda copy: -numpy.cumprod(copy[1]).sum())

    def _copies(self, room: int) -> list[Copied]:
        """Find the copies, no two from one place."""
        tail, found = self.chains.last(MAX_MATCH), []
        length, places = self.chains.longest(tail, self.longest)
        if length >= self.shortest:
            found.append(Copied(self.chains, places[0], self.chains.read(places[0], room), length))
        if self.memory is not None:
            length, follows = self.memory.following(tail, room)
            found += [
                Copied(self.memory, place, tokens, length, count / follows[0][2])
                for place, tokens, count in follows
            ]
        for copied in self.broken:
            if not any(
                other.source is copied.source and other.place == copied.place for other in found
            ):
                found.append(replace(copied, tokens=copied.source.read(copied.place, room)))
        for copied in found:
            known = takewhile(lambda token: 0 <= token < self.vocab_size, copied.tokens)
            copied.tokens = [*islice(known, max(COPIED, GROWTH * copied.length))]
        return [copied for copied in found if copied.tokens]

    def _with_chances(self, copied: Copied) -> Copy:
        """Add each token's chance to a copy, from how often such copies were right."""
        (hits, tries), (further, judged) = self.first[copied.kind], self.onward[copied.kind]
        first = hits / tries
        first = first if copied.share == 1 else min(first * copied.share, 1 - first)
        return copied.tokens, [first] + [further / judged] * (len(copied.tokens) - 1)


def with_copied(draft: Draft, copies: list[Copy], size: int) -> Draft:
    """Add copied chains to a tree, and keep its `size` most probable nodes.

    Nodes that several chains share count once.

    Args:
        draft: a draft with `acceptance`, not drawn; or an empty one.
        copies: the chains, each from the last known token on.
        size: the most nodes.
    """
    ids, parents = list(draft.token_ids), list(draft.parents)
    acceptance = list(draft.acceptance or [])
    for tokens, chances in copies:
        end = -1
        for token, chance in zip(tokens, chances, strict=True):
            same = (
                node for node, other in enumerate(ids) if parents[node] == end and other == token
            )
            if (node := next(same, None)) is None:
                node = len(ids)
                ids.append(token)
                parents.append(end)
                acceptance.append(chance)
            else:
                acceptance[node] = max(acceptance[node], chance)
            end = node
    joined = Draft.of_ids(ids, draft.tokens.device, parents, None, acceptance)
    chances = joined.path_probability
    # Where chances are equal the order stays: parents before children.
    return part(joined, sorted(range(len(ids)), key=lambda node: -chances[node])[:size])
