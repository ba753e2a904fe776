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
        least: chance of a path below which it is not worth following.
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
        least: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        self.generator = generator
        self.guess, self.prefix, self.processor, self.vocab_size = guess, prefix, processor, vocab_size
        self.sampled, self.factors, self.ranks = sampled, factors, size or 1
        self.least = log(least) if least > 0 else -inf
        depth = prefix.room if guess.extend is not None else min(prefix.room, len(guess.logits))
        self.tree = GrowingTree(size or depth, depth)
        self.q: dict[int, Tensor] = {}  # what a node's children were drawn from, float32 (V,)
        self.states: dict[int, Any] = {ROOT: None}  # the bias's
        self.places: dict[int, int] = {ROOT: ROOT}  # of nodes that the drafter has read, in its order

    def wanted(self) -> list[int]:
        """What should be read next: by a head all, by the drafter as many as one of its forwards reads."""
        worth = [node for node in self.tree.unread() if self.tree.scores[node] >= self.least]
        return worth if self.guess.extend is None else worth[:WIDTH]

    def asked(self, nodes: list[int]) -> tuple[LongTensor, list[int]]:
        """`nodes` as the drafter's `extend` takes them."""
        for node in nodes:
            self.places[node] = len(self.places) - 1
        tokens = torch.tensor([self.tree.tokens[node] for node in nodes], dtype=torch.long)
        return tokens, [self.places[self.tree.parents[node]] for node in nodes]

    def look(self, nodes: list[int]) -> None:
        """Children of nodes, which may be the root, from the guesses at hand and the head that looks at their tokens."""
        if not nodes:
            return
        if self.guess.bias is None:
            self.learn(nodes, self.guess.logits[:1])
            return
        where = torch.tensor([self.tree.below(node) - 1 for node in nodes], device=self.prefix.ids.device)
        known = nodes == [ROOT]
        tokens = self.prefix.ids[0, -1:] if known else self.prefix.ids.new_tensor([self.tree.tokens[node] for node in nodes])
        before = [self.states[ROOT if node == ROOT else self.tree.parents[node]] for node in nodes]
        bias, states = self.guess.bias(where, tokens, before)
        self.states |= dict(zip(nodes, states, strict=True))
        own = self.guess.logits
        self.learn(nodes, own[where.to(own.device)] + bias.to(own))

    def learn(self, nodes: list[int], logits: Tensor) -> None:
        """What the drafter guesses behind `nodes`, `(n, V')`."""
        if not nodes:
            return
        logits = cut(logits, self.guess.vocabulary, self.vocab_size).to(self.prefix.ids.device)
        if self.sampled:
            self._draw(nodes, logits)
            return
        top, ids = logits.float().log_softmax(-1).topk(min(self.ranks, logits.shape[1]))
        scores = top.cpu().double().numpy()
        scores = numpy.where(numpy.isfinite(scores[:, :1]), scores, -numpy.inf)  # logits that are not numbers guess nothing
        if self.factors is not None:
            promised = numpy.log([float(self.factors[self.tree.below(node)]) for node in nodes])
            scores = numpy.minimum(scores + promised[:, None], 0.0)
        self.tree.grow(nodes, scores, to_target(ids, self.guess.vocabulary).cpu().numpy())

    def _draw(self, nodes: list[int], logits: Tensor) -> None:
        """Nodes' children, drawn."""
        scores = numpy.full((len(nodes), min(self.ranks, self.vocab_size)), -numpy.inf)
        tokens: numpy.ndarray = numpy.zeros(scores.shape, dtype=numpy.int64)
        for place, (node, row) in enumerate(zip(nodes, logits.split(1), strict=True)):
            if not bool(row.amax().isfinite()):
                continue
            text = torch.cat([self.prefix.ids, self.prefix.ids.new_tensor([self.tree.path(node)])], dim=1)
            q = warp(text, widen(row, self.guess.vocabulary, self.vocab_size), self.processor)
            own = possible(q, self.ranks)[0]
            self.q[node], scores[place, : len(own)] = q[0], own
            tokens[place, : len(own)] = draw(q[0], len(own), self.generator).cpu().numpy()
        self.tree.grow(nodes, scores, tokens)

    def draft(self) -> Draft:
        """The tree as it is."""
        chosen = self.tree.chosen
        place = {ROOT: ROOT, **{node: index for index, node in enumerate(chosen)}}
        tokens = self.prefix.ids.new_tensor([self.tree.tokens[node] for node in chosen])
        parents = [self.tree.parents[node] for node in chosen]
        q = torch.stack([self.q[parent] for parent in parents]) if self.sampled and parents else None
        return Draft(tokens, [place[parent] for parent in parents], q, self.tree.beliefs())
