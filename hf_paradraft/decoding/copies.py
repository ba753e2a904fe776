"""Copied drafts: what followed the last time that the text ended like it ends now (prompt lookup; RASD; Graft)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import LongTensor

from ..protocol import Draft, Riders

Copied = tuple[list[int], list[float]]  # tokens, and the chance of each if those before it are right
COPIED = 10  # tokens that are copied for a round, at most; a drafter's own guesses may end sooner
# What a copy is believed at first, behind a match of 1, 2, 3, or more tokens: its first token, and each one behind a right one.
# So it was in a chat model's answers to 400 prompts (SmolLM2-135M-Instruct).
HELD, ONWARD = (0.3, 0.5, 0.5, 0.7), (0.5, 0.6, 0.65, 0.8)


@dataclass
class Copy:
    """What was copied last.

    Attributes:
        length: of the match.
        tokens: that followed it.
        begin: where they would stand in the text.
    """

    length: int
    tokens: list[int]
    begin: int


class Copies:
    """Where each run of tokens stood last in every row's text, and how often what followed came again.

    Args:
        num_rows: of the call.
        longest, shortest: tokens of a match.
    """

    def __init__(self, num_rows: int, longest: int = 4, shortest: int = 1):
        self.longest, self.shortest = longest, shortest
        self.texts: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in range(num_rows)]  # where what followed a run begins
        self.last: list[Copy | None] = [None] * num_rows
        lengths = range(shortest, longest + 1)  # hits and tries, by match: of a copy's first token, and of later ones
        self.held = {length: [2.0 * HELD[min(length, len(HELD)) - 1], 2.0] for length in lengths}
        self.onward = {length: [4.0 * ONWARD[min(length, len(ONWARD)) - 1], 4.0] for length in lengths}

    def read(self, row: int, ids: LongTensor, kept: int) -> None:
        """Read what is new of a row's text, int64 `(n,)`, the first `kept` of it as they were; learn how the last copy did."""
        text, places = self.texts[row], self.places[row]
        if kept < len(text):  # something was taken back
            text.clear()
            places.clear()
        for token in ids[len(text) :].tolist():
            for length in range(self.shortest, min(self.longest, len(text)) + 1):
                places[tuple(text[-length:])] = len(text)
            text.append(token)
        if (last := self.last[row]) is not None and len(text) > last.begin:
            self._judge(last, text[last.begin :])
            self.last[row] = None

    def following(self, row: int, room: int) -> Copied:
        """What followed the longest earlier occurrence of a row's last tokens, at most `room` tokens, and the chances of each."""
        text, places = self.texts[row], self.places[row]
        for length in range(min(self.longest, len(text)), self.shortest - 1, -1):
            begin = places.get(tuple(text[-length:]))
            if begin is not None and room:
                copied = text[begin : begin + room]
                self.last[row] = Copy(length, copied, len(text))
                (hits, tries), (further, judged) = self.held[length], self.onward[length]
                return copied, [hits / tries] + [further / judged] * (len(copied) - 1)
        self.last[row] = None
        return [], []

    def _judge(self, copy: Copy, tokens: Sequence[int]) -> None:
        """Learn from what came where a copy was made for."""
        for place, (guess, token) in enumerate(zip(copy.tokens, tokens, strict=False)):
            counts = (self.onward if place else self.held)[copy.length]
            counts[0] += guess == token
            counts[1] += 1
            if guess != token:
                break


def _join(draft: Draft, tokens: Sequence[int], beliefs: Sequence[float]) -> tuple[list[int], list[int], list[float], int]:
    """Ids, parents and beliefs of a tree with a chain in it, new nodes last; and the chain's end."""
    ids, parents, chances = list(draft.token_ids), list(draft.parents), list(draft.beliefs or [0.5] * len(draft))
    node = -1
    for token, belief in zip(tokens, beliefs, strict=True):
        same = (i for i, (own, parent) in enumerate(zip(ids, parents, strict=True)) if parent == node and own == token)
        if (found := next(same, None)) is None:
            ids.append(token)
            parents.append(node)
            chances.append(belief)
            found = len(ids) - 1
        else:
            chances[found] = max(chances[found], belief)
        node = found
    return ids, parents, chances, node


def grafted(draft: Draft, tokens: Sequence[int], beliefs: Sequence[float], size: int) -> Draft:
    """A tree with a copied chain in it: nodes that both have count once, and the `size` most probable ones stay.

    Args:
        draft: with `beliefs`, not drawn.
        tokens: the copied chain, from the last known token on.
        beliefs: the chance of each, if those before it are accepted.
        size: nodes at most.
    """
    ids, parents, chances, _ = _join(draft, tokens, beliefs)
    reach: list[float] = []
    depths: list[int] = []
    for parent, chance in zip(parents, chances, strict=True):
        reach.append(min(1.0, chance) * (reach[parent] if parent >= 0 else 1.0))  # corrected beliefs may be above 1
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    order = sorted(range(len(ids)), key=lambda i: (-reach[i], depths[i], i))[:size]
    place = {-1: -1, **{old: new for new, old in enumerate(order)}}
    kept = draft.tokens.new_tensor([ids[i] for i in order])
    return Draft(kept, [place[parents[i]] for i in order], beliefs=[chances[i] for i in order])


def grafted_beside_riders(draft: Draft, tokens: Sequence[int], beliefs: Sequence[float], riders: Riders) -> Draft:
    """A sparse tree with a copied chain behind it, and all riders below the chain's end, so that guesses go on from there.

    Args:
        draft: its nodes and riders stay as they are.
        tokens, beliefs: the copied chain, as for `grafted`.
        riders: the drafter's.
    """
    ids, parents, chances, end = _join(draft, tokens, beliefs)
    if not (added := len(ids) - len(draft)):
        return draft
    above = [parent if parent < len(draft) else parent + added for parent in draft.rider_parents]
    count, first = len(riders.embeddings), len(ids) + len(above)
    above += [end if rider < riders.num_ensembles else first + rider - riders.num_ensembles for rider in range(count)]
    known = draft.rider_embeddings
    rows = riders.embeddings if known is None or not len(known) else torch.cat([known, riders.embeddings.to(known)])
    nodes = [*draft.rider_nodes, *[end] * count]
    return Draft(draft.tokens.new_tensor(ids), parents, None, chances, nodes, above, rows)
