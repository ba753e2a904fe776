"""Prompt lookup: what followed where the text, or a memory, went like its end is copied (RASD; Graft; SuffixDecoding)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from sys import maxsize
from typing import Any

import numpy
from torch import LongTensor

from ..protocol import Draft
from .chains import LONGEST, HashChains
from .trees import part

Copy = tuple[list[int], list[float]]  # tokens, and the chance of each if those before it are right
COPIED, GROWTH, DEEPEST = 10, 2, 48  # tokens that are copied at most: 10, twice as many as match, and in all
REALIGNED = 0  # instead of a match's length: the copy goes on behind a token that was another one
# How often a copied token was right behind a match of 1, 2, 3, and 4 or more tokens: the first one, and one behind a right one.
# Measured in a chat model's answers to 400 prompts (SmolLM2-135M-Instruct); where each call begins to learn its own.
FIRST, ONWARD = (0.3, 0.5, 0.5, 0.7), (0.5, 0.6, 0.65, 0.8)
CLASSES = (REALIGNED, 1, 2, 3, 4, 8, 16, LONGEST)  # matches up to each of these lengths are believed alike


@dataclass
class Copied:
    """Tokens that were copied, until it is known how many of them came true."""

    source: Any  # HashChains, or a `Memory`
    place: int  # of the first token in the source
    tokens: list[int]
    length: int  # of the match
    share: float = 1.0  # how often its first token followed such a match, beside the one that did most often

    @property
    def kind(self) -> int:
        """The class of its match."""
        return next(most for most in CLASSES if self.length <= most)


Counts = dict[int, list[float]]  # hits and tries, by class of match


@dataclass
class Text:
    """One sequence's tokens, and what was copied for it last.

    Attributes:
        first, onward: how often copies were right, which the sequences of a call share: a copy's first token, and later ones.
    """

    first: Counts
    onward: Counts
    chains: HashChains = field(default_factory=lambda: HashChains(1))
    copies: list[Copied] = field(default_factory=list)
    broken: list[Copied] = field(default_factory=list)  # those whose last token was another one, from the next token on


class PromptLookup:
    """A finder of tokens to copy for the sequences of one call, which learns how often its copies were right.

    Args:
        count: how many sequences there are.
        longest, shortest: tokens of a match in the text itself.
        memory: other texts that are copied from (`hf_paradraft.Memory`).
        vocab_size: V; ids that stand for images, say, are not copied.
    """

    def __init__(
        self,
        count: int,
        longest: int = LONGEST,
        shortest: int = 1,
        memory: Any = None,
        vocab_size: int = maxsize,
    ):
        self.longest, self.shortest, self.memory, self.vocab_size = longest, shortest, memory, vocab_size
        believed = [(kind, min(max(1, kind), len(FIRST)) - 1) for kind in CLASSES]
        self.first = {kind: [2.0 * FIRST[index], 2.0] for kind, index in believed}
        self.onward = {kind: [4.0 * ONWARD[index], 4.0] for kind, index in believed}
        self.texts = list[Text]()
        self.hold(count)

    def hold(self, count: int) -> None:
        """Make room for so many sequences in all."""
        self.texts += [Text(self.first, self.onward) for _ in range(count - len(self.texts))]

    def read(self, sequence: int, ids: LongTensor, unchanged: int) -> None:
        """Read what is new of a text, and learn which of its last copies came true.

        Args:
            sequence: whose text it is.
            ids: the whole text, int64 `(n,)`.
            unchanged: how many of its first tokens are as they were.
        """
        text = self.texts[sequence]
        begin = text.chains.end
        while text.chains.end > unchanged:  # something was taken back
            text.chains.pop()
        new = ids[text.chains.end :].tolist()
        for token in new:
            text.chains.append(token)
        came = new[max(0, begin - unchanged) :]  # what stands where the last copies were made for
        if not came:
            return
        copies, text.copies, text.broken = text.copies, [], []
        for copy in copies:
            pairs = list(zip(copy.tokens, came, strict=False))
            right = next((index for index, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
            for index in range(min(right + 1, len(pairs)) if copy.share == 1 else 0):
                counts = (text.onward if index else text.first)[copy.kind]
                counts[0] += index < right
                counts[1] += 1
            if right == len(came) - 1 < len(copy.tokens):
                text.broken.append(replace(copy, place=copy.place + len(came), length=REALIGNED, share=1.0))

    def following(self, sequence: int, room: int) -> list[Copy]:
        """Find what can be copied for a sequence: the copy that promises most first.

        One follows the longest match in the text itself, one or two the longest in the memory; where a token was not the copied
        one, the copy goes on behind it too, for most edits change a token.

        Args:
            sequence: whose text it is.
            room: tokens of a copy at most.
        """
        text = self.texts[sequence]
        text.copies = self._copies(text, min(room, DEEPEST)) if room else []
        copies = (self._believed(text, copy) for copy in text.copies)
        return sorted(copies, key=lambda copy: -numpy.cumprod(copy[1]).sum())

    def _copies(self, text: Text, room: int) -> list[Copied]:
        """Find the copies, no two of the same place."""
        tail, found = text.chains.last(LONGEST), []
        length, places = text.chains.longest(tail, self.longest)
        if length >= self.shortest:
            found.append(Copied(text.chains, places[0], text.chains.read(places[0], room), length))
        if self.memory is not None:
            length, follows = self.memory.following(tail, room)
            found += [Copied(self.memory, place, tokens, length, count / follows[0][2]) for place, tokens, count in follows]
        for copy in text.broken:
            if not any(other.source is copy.source and other.place == copy.place for other in found):
                found.append(replace(copy, tokens=copy.source.read(copy.place, room)))
        for copy in found:
            known = takewhile(lambda token: 0 <= token < self.vocab_size, copy.tokens)
            copy.tokens = [*islice(known, max(COPIED, GROWTH * copy.length))]
        return [copy for copy in found if copy.tokens]

    def _believed(self, text: Text, copy: Copied) -> Copy:
        """Say how likely a copy's tokens are."""
        (hits, tries), (further, judged) = text.first[copy.kind], text.onward[copy.kind]
        first = hits / tries
        first = first if copy.share == 1 else min(first * copy.share, 1 - first)
        return copy.tokens, [first] + [further / judged] * (len(copy.tokens) - 1)


def with_copied(draft: Draft, copies: list[Copy], size: int) -> Draft:
    """Join copied chains to a tree: nodes that several have count once, and the `size` most probable ones stay.

    Args:
        draft: with `acceptance`, not drawn.
        copies: the chains, each from the last known token on.
        size: nodes at most.
    """
    ids, parents, acceptance = list(draft.token_ids), list(draft.parents), list(draft.acceptance or [0.5] * len(draft))
    for tokens, chances in copies:
        end = -1
        for token, chance in zip(tokens, chances, strict=True):
            same = (node for node, other in enumerate(ids) if parents[node] == end and other == token)
            if (node := next(same, None)) is None:
                node = len(ids)
                ids.append(token)
                parents.append(end)
                acceptance.append(chance)
            else:
                acceptance[node] = max(acceptance[node], chance)
            end = node
    joined = Draft(draft.tokens.new_tensor(ids), parents, None, acceptance)
    chances = joined.path_probability
    # Where chances are equal the order stays: parents before children.
    return part(joined, sorted(range(len(ids)), key=lambda node: -chances[node])[:size])
