"""Prompt lookup: what followed the last time that the text ended like it ends now joins a draft (RASD; Graft)."""

from __future__ import annotations

from torch import LongTensor

from ..protocol import Draft
from .trees import part

Copied = tuple[list[int], list[float]]  # tokens, and the chance of each if those before it are right
COPIED = 10  # tokens that are copied for a round, at most; a drafter's own guesses may end sooner
# What a copy is believed at first, behind a match of 1, 2, 3, or more tokens: its first token, and each one behind a right one.
# So it was in a chat model's answers to 400 prompts (SmolLM2-135M-Instruct).
FIRST, ONWARD = (0.3, 0.5, 0.5, 0.7), (0.5, 0.6, 0.65, 0.8)


class Text:
    """One sequence's tokens, and where each short run of them was followed by something last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], int] = {}  # where what followed a run begins
        self.changes: list[list[tuple[tuple[int, ...], int | None]]] = []  # by token: runs, and where they pointed before it
        self.copied: list[int] = []  # what may come next
        self.length = 0  # of the match that it was copied from


class PromptLookup:
    """Copies for the sequences of one call, and how often they came true.

    Args:
        count: of the sequences.
        longest, shortest: tokens of a match.
    """

    def __init__(self, count: int, longest: int = 4, shortest: int = 1):
        self.longest, self.shortest = longest, shortest
        self.texts = [Text() for _ in range(count)]
        lengths = range(shortest, longest + 1)  # hits and tries, by match: of a copy's first token, and of later ones
        self.first = {length: [2.0 * FIRST[min(length, len(FIRST)) - 1], 2.0] for length in lengths}
        self.onward = {length: [4.0 * ONWARD[min(length, len(ONWARD)) - 1], 4.0] for length in lengths}

    def read(self, sequence: int, ids: LongTensor, unchanged: int) -> None:
        """Read what is new of a text, int64 `(n,)`, the first `unchanged` of it as they were; learn how the last copy did."""
        text = self.texts[sequence]
        begin = len(text.tokens)
        while len(text.tokens) > unchanged:  # something was taken back
            text.tokens.pop()
            for run, before in reversed(text.changes.pop()):
                if before is None:
                    del text.followers[run]
                else:
                    text.followers[run] = before
        for token in ids[len(text.tokens) :].tolist():
            changes = []
            for length in range(self.shortest, min(self.longest, len(text.tokens)) + 1):
                run = tuple(text.tokens[-length:])
                changes.append((run, text.followers.get(run)))
                text.followers[run] = len(text.tokens)
            text.changes.append(changes)
            text.tokens.append(token)
        # What came where the last copy was made for.
        for index, (guess, token) in enumerate(zip(text.copied, text.tokens[begin:], strict=False)):
            counts = (self.onward if index else self.first)[text.length]
            counts[0] += guess == token
            counts[1] += 1
            if guess != token:
                break
        if len(text.tokens) > begin:
            text.copied = []

    def following(self, sequence: int, room: int) -> Copied:
        """Find the tokens after the longest earlier occurrence of a text's last tokens, `room` at most, and their chances."""
        text = self.texts[sequence]
        text.copied = []
        for length in range(min(self.longest, len(text.tokens)), self.shortest - 1, -1):
            begin = text.followers.get(tuple(text.tokens[-length:]))
            if begin is not None and room:
                text.copied, text.length = text.tokens[begin : begin + room], length
                (hits, tries), (further, judged) = self.first[length], self.onward[length]
                return text.copied, [hits / tries] + [further / judged] * (len(text.copied) - 1)
        return [], []


def with_copied(draft: Draft, copied: Copied, size: int) -> Draft:
    """A tree with a copied chain in it: nodes that both have count once, and the `size` most probable ones stay.

    Args:
        draft: with `acceptance`, not drawn.
        copied: the chain, from the last known token on.
        size: nodes at most.
    """
    ids, parents, acceptance = list(draft.token_ids), list(draft.parents), list(draft.acceptance or [0.5] * len(draft))
    end = -1
    for token, chance in zip(*copied, strict=True):
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
