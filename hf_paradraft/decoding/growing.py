"""Drafts that grow level by level: each guess depends on the token before, read by a head (DSpark,
3.2) or the drafter.

A path that is not among the N most probable known ones never comes back, since others are only
added.
"""

from collections.abc import Callable
from math import exp, inf
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..protocol import Draft, GuessedLogits, Prefix
from .budget import Budget
from .trees import cut, read, widen

ROOT = 0


class GrowingTree:
    """The best tree over distributions that become known node by node.

    Once every node of it that may have children has been read, no other tree of N nodes has more
    expected tokens. A node has a rank among its parent's children. Where tokens are drawn, its
    score comes from its parent's distribution and its rank, never from its own token; and it can
    only be driven out by nodes with a higher score: by earlier siblings, its own or its ancestors',
    by nodes below those, or by nodes that were drawn independently of it. So the draws have the
    distribution that recursive rejection assumes.

    Args:
        num_nodes: N, the most nodes.
        depth: the most levels.

    Attributes:
        parents, tokens, depths, scores: one entry for the root and every node that was ever in the
            tree, in the order in which it came in; a score is the log-chance of the whole path.
        chosen: the tree's nodes, most probable first, so parents before children.
        read: the nodes whose children are known, by the order in which they were read: the root is
            -1, others count from 0.
    """

    def __init__(self, num_nodes: int, depth: int):
        self.num_nodes, self.depth = num_nodes, depth
        self.parents, self.tokens, self.depths, self.scores = [-1], [-1], [0], [0.0]
        self.chosen: list[int] = []
        self.read: dict[int, int] = {}

    def grow(self, nodes: list[int], scores: ndarray, tokens: ndarray) -> None:
        """Add the children of nodes to the tree, and keep its N most probable nodes.

        Args:
            nodes: the parents: nodes of the tree, or the root.
            scores: `(n, r)`, log-chances of children given their parent, falling from rank to rank;
                -inf for a missing child.
            tokens: int64 `(n, r)`, the children's tokens.
        """
        for node in nodes:
            self.read[node] = len(self.read) - 1
        ranks = scores.shape[1]
        paths = (scores + numpy.array([self.scores[node] for node in nodes])[:, None]).ravel()
        full = len(self.chosen) >= self.num_nodes
        # NaN is not larger than anything, so that such logits guess nothing.
        offered = (paths > (self.scores[self.chosen[-1]] if full else -inf)).nonzero()[0]
        # A stable sort keeps equal scores in their order: parents before children, and siblings by
        # rank.
        merged = numpy.concatenate([[self.scores[node] for node in self.chosen], paths[offered]])
        best = numpy.argsort(-merged, kind="stable")[: self.num_nodes].tolist()
        before, count = self.chosen, len(self.chosen)
        self.chosen = []
        for index in best:
            if index < count:
                self.chosen.append(before[index])
                continue
            entry = int(offered[index - count])
            self.chosen.append(len(self.parents))
            self.parents.append(parent := nodes[entry // ranks])
            self.tokens.append(int(tokens.flat[entry]))
            self.depths.append(self.depths[parent] + 1)
            self.scores.append(float(paths[entry]))

    def unread(self) -> list[int]:
        """List the tree's unread nodes that may have children, most probable first."""
        return [
            node for node in self.chosen if node not in self.read and self.depths[node] < self.depth
        ]

    def expected_tokens(self, nodes: list[int]) -> float:
        """Compute how many tokens of `nodes` are accepted on average."""
        return float(numpy.exp([self.scores[node] for node in nodes]).sum())

    def acceptance(self) -> list[float]:
        """List the chances of the chosen nodes given their parents."""
        return numpy.exp(
            [self.scores[node] - self.scores[self.parents[node]] for node in self.chosen]
        ).tolist()

    def path(self, node: int) -> list[int]:
        """List the tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def width_on(device: torch.device) -> int:
    """Return the most nodes of a sequence that one forward of the drafter reads.

    On a CPU, each further row takes more time.
    """
    return 2 if device.type == "cpu" else 8


class GrowingDraft(GrowingTree):
    """One sequence's draft, growing from the last known token.

    Args:
        guess: logits with a bias, or with `extend`, which needs only those after the last token.
        prefix: the sequence's prefix.
        processor: the target's logits processors.
        size: the number of the tree's nodes; None for a chain.
        vocab_size: V, the number of the target's ids.
        draws: the maker of draws without replacement; None: children are the most probable tokens.

    Attributes:
        calibration: accepted ÷ expected tokens, by depth; None: 1 everywhere.
        least: the path probability below which a path is not worth following.
    """

    calibration: ndarray | None = None
    least: float = 0.0

    def __init__(
        self,
        guess: GuessedLogits,
        prefix: Prefix,
        processor: LogitsProcessorList,
        size: int | None,
        vocab_size: int,
        draws: Any = None,
    ):
        depth = prefix.room if guess.extend is not None else min(prefix.room, len(guess.logits))
        super().__init__(size or depth, depth)
        self.guess, self.prefix, self.processor = guess, prefix, processor
        self.vocab_size, self.draws = vocab_size, draws
        self.ranks = size or 1
        self.q: dict[int, Tensor] = {}  # by node, its children's distribution, float32 (V,)
        self.states: dict[int, Any] = {-1: None}  # of the bias, by node; None before the root

    @property
    def promised(self) -> float:
        """Expected new tokens of a round that verifies this draft, the target's own included."""
        return 1 + self.expected_tokens(self.chosen)

    def wanted(self) -> list[int]:
        """List the nodes to read next, most probable first.

        A head reads all that are worth following, a drafter as many as one forward reads.
        """
        worth = [node for node in self.unread() if exp(self.scores[node]) >= self.least]
        return worth if self.guess.extend is None else worth[: width_on(self.guess.logits.device)]

    def question(self, nodes: list[int]) -> tuple[LongTensor, list[int]]:
        """List the tokens and parents of `nodes`, as the drafter's `extend` takes them."""
        tokens = torch.tensor([self.tokens[node] for node in nodes], dtype=torch.long, device="cpu")
        return tokens, [self.read[self.parents[node]] for node in nodes]

    def expand(self, nodes: list[int]) -> None:
        """Add the children of nodes, or of the root, to the tree.

        They come from the guessed logits and the bias of a head that reads the nodes' tokens.
        """
        if not nodes:
            return
        if self.guess.bias is None:
            self.add_children(nodes, self.guess.logits[:1])
            return
        ids, logits = self.prefix.ids, self.guess.logits
        depths = torch.tensor([self.depths[node] for node in nodes], device=ids.device)
        tokens = (
            ids[0, -1:]
            if nodes == [ROOT]
            else ids.new_tensor([self.tokens[node] for node in nodes])
        )
        bias, states = self.guess.bias(
            depths, tokens, [self.states[self.parents[node]] for node in nodes]
        )
        self.states |= dict(zip(nodes, states, strict=True))
        self.add_children(nodes, logits[depths.to(logits.device)] + bias.to(logits))

    def add_children(self, nodes: list[int], logits: Tensor) -> None:
        """Add the children of `nodes` from the drafter's logits `(n, V')` after each."""
        logits = cut(logits, self.guess.vocabulary, self.vocab_size).to(self.prefix.ids.device)
        if self.prefix.race is not None:
            logits = self.prefix.race(
                logits, [self.path(node) for node in nodes], self.guess.vocabulary
            )
        if self.draws is not None:
            self._draw(nodes, logits)
            return
        top, ids = logits.float().log_softmax(-1).topk(min(self.ranks, logits.shape[1]))
        scores, tokens = read(top, ids, self.guess.vocabulary)
        if self.calibration is not None:
            corrections = numpy.log(self.calibration[[self.depths[node] + 1 for node in nodes]])
            scores = numpy.minimum(scores + corrections[:, None], 0.0)
        self.grow(nodes, scores, tokens)

    def _draw(self, nodes: list[int], logits: Tensor) -> None:
        """Draw the children of nodes from the drafter's distributions."""
        count = min(self.ranks, self.vocab_size)
        scores = numpy.full((len(nodes), count), -numpy.inf)
        tokens: ndarray = numpy.zeros((len(nodes), count), dtype=numpy.int64)
        for index, (node, row) in enumerate(zip(nodes, logits.split(1), strict=True)):
            if not row.amax().isfinite():
                continue
            text = torch.cat(
                [self.prefix.ids, self.prefix.ids.new_tensor([self.path(node)])], dim=1
            )
            wide = widen(row, self.guess.vocabulary, self.vocab_size)
            self.q[node], chances, drawn = self.draws.children(text, wide, count, self.processor)
            scores[index, : len(chances)], tokens[index, : len(chances)] = chances, drawn
        self.grow(nodes, scores, tokens)

    def draft(self) -> Draft:
        """Make a draft of the nodes that are in the tree now."""
        index = {ROOT: -1, **{node: number for number, node in enumerate(self.chosen)}}
        tokens = [self.tokens[node] for node in self.chosen]
        parents = [self.parents[node] for node in self.chosen]
        return Draft.of_ids(
            tokens,
            self.prefix.ids.device,
            [index[parent] for parent in parents],
            torch.stack([self.q[parent] for parent in parents]) if self.q and parents else None,
            self.acceptance(),
        )


def grow(
    drafts: dict[int, GrowingDraft],
    count: int,
    budget: Budget,
    adaptive: bool,
    begun: float,
    ask: Callable[..., Any],
) -> None:
    """Let drafts grow, as long as another level is worth its time.

    If tokens are drawn, path probabilities decide nothing: a tree that stopped by them would depend
    on its draws.

    Args:
        drafts: the drafts, by sequence, one at least; a head reads for all of them, or the drafter.
        count: the number of sequences.
        budget: the judge of further levels, which learns their seconds and their tokens.
        adaptive: whether the budget decides.
        begun: the round's start time.
        ask: the function that calls a function of the drafter with its arguments.
    """
    for draft in drafts.values():
        draft.expand([ROOT])
    levels = max(draft.prefix.room - 1 for draft in drafts.values())
    extend = next(iter(drafts.values())).guess.extend
    promised = fmean(draft.promised for draft in drafts.values())
    verifying = float(budget.cost(1 + budget.size_before))
    for _ in range(levels):
        clock = perf_counter()
        wanted = {sequence: draft.wanted() for sequence, draft in drafts.items()}
        reached = fmean(
            draft.expected_tokens(wanted[sequence]) for sequence, draft in drafts.items()
        )
        if not reached:
            return
        hoped, seconds = reached * fmean(budget.kept_promises), clock - begun + verifying
        if adaptive and budget.step and not budget.worth(hoped, budget.step(), promised, seconds):
            return
        if extend is None:
            for sequence, nodes in wanted.items():
                drafts[sequence].expand(nodes)
        else:
            nothing = torch.zeros(0, dtype=torch.long, device="cpu"), list[int]()
            questions = [nothing] * count
            for sequence, nodes in wanted.items():
                questions[sequence] = drafts[sequence].question(nodes)
            logits = ask(extend, *map(list, zip(*questions, strict=True)))
            for sequence, nodes in wanted.items():
                if nodes:
                    drafts[sequence].add_children(nodes, logits[sequence][: len(nodes)])
        before, promised = promised, fmean(draft.promised for draft in drafts.values())
        budget.step.append(perf_counter() - clock)
        budget.kept_promises.append((promised - before) / reached)
