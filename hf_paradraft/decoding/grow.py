"""One row's tree over guesses that depend on the token before: read by a head (DSpark, section 3.2) or by the drafter itself."""

from math import inf, log
from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..protocol import Draft, GuessedLogits, Prefix
from ..trees.growing import ROOT, GrowingTree
from ..trees.sampled import draw, possible
from .vocabulary import cut, to_target, widen
from .warp import warp

WIDTH = 8  # nodes of a row that one forward of the drafter reads


class Growing:
    """A tree that grows from the last known token.

    Args:
        guess: with a bias, or with `extend`, which wants the logits behind the last token alone.
        prefix: of the row.
        processor: the target's.
        size: nodes of the tree; None for a chain.
        vocab_size: V, of the target.
        sampled: whether children are drawn, without replacement, and not the most probable ones.
        factors: by depth, how much of what is promised comes true; None: all.
        generator: of the draws; default: torch's own.
    """

    def __init__(
        self,
        guess: GuessedLogits,
        prefix: Prefix,
        processor: LogitsProcessorList,
        size: int | None,
        vocab_size: int,
        sampled: bool,
        factors: numpy.ndarray | None,
        generator: torch.Generator | None = None,
    ):
        self.generator = generator
        self.guess, self.prefix, self.processor, self.vocab_size = guess, prefix, processor, vocab_size
        self.sampled, self.factors, self.ranks = sampled, factors, size or 1
        depth = prefix.room if guess.extend is not None else min(prefix.room, len(guess.logits))
        self.tree = GrowingTree(size or depth, depth)
        self.children: dict[int, list[int]] = {}  # tokens of the children by rank, of each node that was read
        self.q: dict[int, Tensor] = {}  # what they were drawn from, float32 (V,)
        self.states: dict[int, Any] = {ROOT: None}  # the bias's
        self.places: dict[int, int] = {ROOT: ROOT}  # of nodes that the drafter has read, in its order

    def token(self, node: int) -> int:
        """Of a node that was in the tree."""
        return self.children[self.tree.parents[node]][self.tree.ranks[node]]

    def look(self) -> None:
        """Read the root; and, with a bias alone, whatever the tree comes to hold."""
        nodes = [ROOT]
        while nodes:
            if self.guess.bias is None:
                self._know([ROOT], self.guess.logits[:1])
            else:
                self._bias(nodes)
            self.tree.choose()
            nodes = self.tree.unread() if self.guess.extend is None else []

    def wanted(self) -> list[int]:
        """What the drafter should read next."""
        return self.tree.unread()[:WIDTH]

    def asked(self, nodes: list[int]) -> tuple[LongTensor, list[int]]:
        """`nodes` as the drafter's `extend` takes them."""
        for node in nodes:
            self.places[node] = len(self.places) - 1
        tokens = torch.tensor([self.token(node) for node in nodes], dtype=torch.long)
        return tokens, [self.places[self.tree.parents[node]] for node in nodes]

    def learn(self, nodes: list[int], logits: Tensor) -> None:
        """What the drafter guesses behind `nodes`, `(n, V')`."""
        if nodes:
            self._know(nodes, logits[: len(nodes)])
        self.tree.choose()

    def _bias(self, nodes: list[int]) -> None:
        """Children of nodes by the head that looks at their tokens."""
        depths = [0 if node == ROOT else self.tree.depths[node] for node in nodes]
        last = self.prefix.ids[0, -1:]
        tokens = torch.cat([last if node == ROOT else last.new_tensor([self.token(node)]) for node in nodes])
        before = [self.states[ROOT if node == ROOT else self.tree.parents[node]] for node in nodes]
        where = torch.tensor(depths, device=tokens.device)
        bias, states = self.guess.bias(where, tokens, before)
        self.states |= dict(zip(nodes, states, strict=True))
        own = self.guess.logits
        self._know(nodes, own[where.to(own.device)] + bias.to(own))

    def _know(self, nodes: list[int], logits: Tensor) -> None:
        """Nodes' children from their logits `(n, V')`."""
        logits = cut(logits, self.guess.vocabulary, self.vocab_size).to(self.prefix.ids.device)
        finite = logits.amax(-1).isfinite().tolist()
        if self.sampled:
            for node, row, usable in zip(nodes, logits.split(1), finite, strict=True):
                self.tree.read(node, self._drawn(node, row) if usable else [])
            return
        top, ids = logits.float().log_softmax(-1).topk(min(self.ranks, logits.shape[1]))
        tokens = to_target(ids, self.guess.vocabulary).tolist()
        for node, row, own, usable in zip(nodes, top.tolist(), tokens, finite, strict=True):
            promised = 1.0 if self.factors is None else float(self.factors[1 if node == ROOT else self.tree.depths[node] + 1])
            self.children[node] = own
            self.tree.read(node, [score + log(promised) for score in row if score > -inf] if usable else [])

    def _drawn(self, node: int, logits: Tensor) -> list[float]:
        """A node's children, drawn, and their scores."""
        path = self.prefix.ids.new_tensor([[self.token(slot) for slot in self.tree.path(node)]])
        q = warp(torch.cat([self.prefix.ids, path], dim=1), widen(logits, self.guess.vocabulary, self.vocab_size), self.processor)
        scores = possible(q, self.ranks)[0]
        self.q[node], self.children[node] = q[0], draw(q[0], len(scores), self.generator).tolist()
        return scores

    def draft(self) -> Draft:
        """The tree as it is."""
        place = {ROOT: ROOT, **{node: index for index, node in enumerate(self.tree.chosen)}}
        tokens = self.prefix.ids.new_tensor([self.token(node) for node in self.tree.chosen])
        parents = [self.tree.parents[node] for node in self.tree.chosen]
        q = torch.stack([self.q[parent] for parent in parents]) if self.sampled and parents else None
        return Draft(tokens, [place[parent] for parent in parents], q, self.tree.beliefs)
