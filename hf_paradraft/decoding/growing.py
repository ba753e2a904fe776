"""Drafts that grow level by level: each guess depends on the token before, read by a head (DSpark, 3.2) or the drafter."""

from collections.abc import Callable
from math import inf, log
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..protocol import Draft, GuessedLogits, Prefix
from .budget import Budget
from .sampling import cut, to_target, warp, widen
from .trees import ROOT, GrowingTree, draw, possible


def width_on(device: torch.device) -> int:
    """Return how many nodes of a sequence one forward of the drafter reads at most: on a CPU each further row takes its time."""
    return 2 if device.type == "cpu" else 8


class GrowingDraft:
    """One sequence's draft, growing from the last known token.

    Args:
        guess: with a bias, or with `extend`, which wants the logits behind the last token alone.
        prefix: of the sequence.
        processor: the target's.
        size: nodes of the tree; None for a chain.
        vocab_size: V, of the target.
        sampled: whether children are drawn, without replacement, and not the most probable ones.
        generator: of the draws; default: torch's own.

    Attributes:
        calibration: by depth, how much of what is promised comes true; None: all.
        least: chance of a path below which it is not worth following.
    """

    calibration: numpy.ndarray | None = None
    least: float = 0.0

    def __init__(
        self,
        guess: GuessedLogits,
        prefix: Prefix,
        processor: LogitsProcessorList,
        size: int | None,
        vocab_size: int,
        sampled: bool = False,
        generator: torch.Generator | None = None,
    ):
        self.guess, self.prefix, self.processor, self.vocab_size = guess, prefix, processor, vocab_size
        self.sampled, self.generator, self.ranks = sampled, generator, size or 1
        depth = prefix.room if guess.extend is not None else min(prefix.room, len(guess.logits))
        self.tree = GrowingTree(size or depth, depth)
        self.q: dict[int, Tensor] = {}  # what a node's children were drawn from, float32 (V,)
        self.states: dict[int, Any] = {-1: None}  # the bias's; None behind nothing
        self.indices: dict[int, int] = {ROOT: -1}  # of nodes that the drafter has read, in its order

    @property
    def expected_tokens(self) -> float:
        """Expected new tokens of a round that verifies this draft, the target's own included."""
        return 1 + self.tree.expected_tokens(self.tree.chosen)

    def wanted(self) -> list[int]:
        """List the nodes to read next: all for a head, as many as one forward reads for a drafter."""
        least = log(self.least) if self.least > 0 else -inf
        worth = [node for node in self.tree.unread() if self.tree.scores[node] >= least]
        return worth if self.guess.extend is None else worth[: width_on(self.guess.logits.device)]

    def asked(self, nodes: list[int]) -> tuple[LongTensor, list[int]]:
        """Record that the drafter reads `nodes` next, and return their tokens and parents as its `extend` takes them."""
        for node in nodes:
            self.indices[node] = len(self.indices) - 1
        tokens = torch.tensor([self.tree.tokens[node] for node in nodes], dtype=torch.long, device="cpu")
        return tokens, [self.indices[self.tree.parents[node]] for node in nodes]

    def look(self, nodes: list[int]) -> None:
        """Add the children of nodes or of the root, from the guessed logits and the bias of a head that reads their tokens."""
        if not nodes:
            return
        if self.guess.bias is None:
            self.learn(nodes, self.guess.logits[:1])
            return
        depths = torch.tensor([self.tree.depths[node] for node in nodes], device=self.prefix.ids.device)
        at_root = nodes == [ROOT]
        tokens = self.prefix.ids[0, -1:] if at_root else self.prefix.ids.new_tensor([self.tree.tokens[node] for node in nodes])
        before = [self.states[self.tree.parents[node]] for node in nodes]
        bias, states = self.guess.bias(depths, tokens, before)
        self.states |= dict(zip(nodes, states, strict=True))
        logits = self.guess.logits
        self.learn(nodes, logits[depths.to(logits.device)] + bias.to(logits))

    def learn(self, nodes: list[int], logits: Tensor) -> None:
        """Take the drafter's logits `(n, V')` after `nodes` as their children."""
        logits = cut(logits, self.guess.vocabulary, self.vocab_size).to(self.prefix.ids.device)
        if self.prefix.race is not None:
            logits = self.prefix.race(logits, [self.tree.path(node) for node in nodes], self.guess.vocabulary)
        if self.sampled:
            self._draw(nodes, logits)
            return
        top, ids = logits.float().log_softmax(-1).topk(min(self.ranks, logits.shape[1]))
        scores = top.cpu().double().numpy()
        scores = numpy.where(numpy.isfinite(scores[:, :1]), scores, -numpy.inf)  # logits that are not numbers guess nothing
        if self.calibration is not None:
            corrections = numpy.log(self.calibration[[self.tree.depths[node] + 1 for node in nodes]])
            scores = numpy.minimum(scores + corrections[:, None], 0.0)
        self.tree.grow(nodes, scores, to_target(ids, self.guess.vocabulary).cpu().numpy())

    def _draw(self, nodes: list[int], logits: Tensor) -> None:
        """Draw the children of nodes from the drafter's distributions, without replacement."""
        scores = numpy.full((len(nodes), min(self.ranks, self.vocab_size)), -numpy.inf)
        tokens: numpy.ndarray = numpy.zeros(scores.shape, dtype=numpy.int64)
        for index, (node, row) in enumerate(zip(nodes, logits.split(1), strict=True)):
            if not bool(row.amax().isfinite()):
                continue
            text = torch.cat([self.prefix.ids, self.prefix.ids.new_tensor([self.tree.path(node)])], dim=1)
            q = warp(text, widen(row, self.guess.vocabulary, self.vocab_size), self.processor)
            chances = possible(q.log().topk(min(self.ranks, self.vocab_size)).values)[0]
            self.q[node], scores[index, : len(chances)] = q[0], chances
            tokens[index, : len(chances)] = draw(q[0], len(chances), self.generator).cpu().numpy()
        self.tree.grow(nodes, scores, tokens)

    def draft(self) -> Draft:
        """Make a draft of the nodes that are in the tree now."""
        chosen = self.tree.chosen
        index = {ROOT: -1, **{node: number for number, node in enumerate(chosen)}}
        tokens = self.prefix.ids.new_tensor([self.tree.tokens[node] for node in chosen])
        parents = [self.tree.parents[node] for node in chosen]
        q = torch.stack([self.q[parent] for parent in parents]) if self.sampled and parents else None
        return Draft(tokens, [index[parent] for parent in parents], q, self.tree.acceptance())


def grow(
    drafts: dict[int, GrowingDraft], count: int, budget: Budget, adaptive: bool, begun: float, ask: Callable[..., Any]
) -> None:
    """Let drafts grow, as long as another level is worth its time.

    Where tokens are drawn nothing is decided by what a path promises: a tree that stopped for that would depend on its draws.

    Args:
        drafts: by sequence.
        count: of the sequences.
        budget: tells what is worth its time, and learns what levels cost and bring.
        adaptive: whether it is asked.
        begun: when the round did.
        ask: calls a function of the drafter with its arguments.
    """
    for draft in drafts.values():
        draft.look([ROOT])
    levels = max((draft.prefix.room - 1 for draft in drafts.values()), default=0)
    extend = next((draft.guess.extend for draft in drafts.values() if draft.guess.extend is not None), None)
    promised = fmean(draft.expected_tokens for draft in drafts.values())
    verifying = float(budget.cost(1 + budget.size_before))
    for _ in range(levels):
        clock = perf_counter()
        wanted = {sequence: draft.wanted() for sequence, draft in drafts.items()}
        reached = fmean(draft.tree.expected_tokens(wanted[sequence]) for sequence, draft in drafts.items())
        if not reached:
            return
        hoped, seconds = reached * fmean(budget.kept_promises), clock - begun + verifying
        if adaptive and budget.step and not budget.worth(hoped, budget.step(), promised, seconds):
            return
        asked = [(torch.zeros(0, dtype=torch.long, device="cpu"), list[int]())] * count
        for sequence, draft in drafts.items():
            if draft.guess.extend is None:
                draft.look(wanted[sequence])
            else:
                asked[sequence] = draft.asked(wanted[sequence])
        if extend is not None:
            read = ask(extend, *map(list, zip(*asked, strict=True)))
            for sequence, (tokens, _) in enumerate(asked):
                if len(tokens):
                    drafts[sequence].learn(wanted[sequence], read[sequence][: len(tokens)])
        before, promised = promised, fmean(draft.expected_tokens for draft in drafts.values())
        budget.step.append(perf_counter() - clock)
        budget.kept_promises.append((promised - before) / reached)
