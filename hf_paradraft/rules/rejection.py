"""Rejection sampling: drafts are drawn from the drafter's distributions, and the output is
distributed as the target's (Leviathan et al., 2023; ParallelSpec, Algorithm 1).
"""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..decoding.accept import Rule, drawn
from ..decoding.trees import best_paths, possible
from ..protocol import Draft

STATELESS = (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warp(ids: LongTensor, logits: Tensor, logits_processor: LogitsProcessorList) -> Tensor:
    """Compute the distributions that a draft is drawn from, float32 `(K, V)`.

    They are made of logits `(K, V)`, all after ids `(1, n)`, by the processors without a memory. A
    draft may come from any distribution, but a processor that remembers its calls must see only
    those of plain decoding.
    """
    rows = logits.float().split(1)  # one by one: a processor may know how many texts there are
    for processor in logits_processor:
        if type(processor) in STATELESS:  # a subclass may remember its calls
            rows = [processor(ids, row) for row in rows]
    return torch.cat(rows).softmax(-1)


def draw(q: Tensor, count: int, generator: torch.Generator | None = None) -> LongTensor:
    """Draw `count` tokens without replacement from `q`, float32 `(V,)`, in order: int64 `(count,)`.

    The k largest of log q + Gumbel noise are k such draws (Kool et al., 2019). `q` has as many
    positive entries at least.
    """
    noise = -torch.empty_like(q).exponential_(generator=generator).log()
    return (q.log() + noise).topk(count).indices


def sampled_tree(q: Tensor, num_nodes: int, generator: torch.Generator | None = None) -> Draft:
    """Build a best-first tree whose siblings are drawn from `q` without replacement.

    This is Algorithm 1 of ParallelSpec.

    The shape depends only on `q` and never on the draws, so that these have the distribution that
    the rule assumes.

    Args:
        q: float32 `(K, V)`, the distribution at each distance.
        num_nodes: N, at least 1; fewer come back where fewer tokens are possible.
        generator: the generator of the draws; default: torch's own.

    Returns:
        A draft with `q`; siblings stand in the order in which they were drawn.
    """
    shape = best_paths(possible(q.log().topk(min(num_nodes, q.shape[1])).values), num_nodes)
    depths = torch.tensor(shape.depths, device=q.device)
    draft = Draft(torch.empty_like(depths), shape.parents, q[depths - 1])
    for parent in dict.fromkeys(shape.parents):
        children = draft.children(parent)
        draft.tokens[children] = draw(draft.q[children[0]], len(children), generator)
    return draft


class Draws:
    """A maker of drafts that are drawn from the drafter's distributions.

    Attributes:
        generator: the generator of the draws; None: torch's own.
    """

    generator: torch.Generator | None = None

    def draft(
        self,
        text: LongTensor,
        logits: Tensor,
        size: int | None,
        logits_processor: LogitsProcessorList,
    ) -> Draft:
        """Draw a tree of `size` nodes, None for a chain, from logits `(K, V)`.

        The logits are of independent distances after ids `(1, n)`; if a row of them has no finite
        maximum, the draft is empty. In a chain each row is warped as if the earlier draws were in
        the text.
        """
        if not logits.amax(-1).isfinite().all():
            return Draft.chain(text[0, :0])
        if size is not None:
            return sampled_tree(warp(text, logits, logits_processor), size, self.generator)
        rows, length = [], text.shape[1]
        for row in logits.split(1):
            rows.append(warp(text, row, logits_processor))
            token = torch.multinomial(rows[-1], 1, generator=self.generator)
            text = torch.cat([text, token], dim=1)
        return Draft.chain(text[0, length:], torch.cat(rows))

    def children(
        self, text: LongTensor, logits: Tensor, count: int, logits_processor: LogitsProcessorList
    ) -> tuple[Tensor, list[float], list[int]]:
        """Draw at most `count` tokens after ids `(1, n)` from logits `(1, V)`, without replacement.

        Returns:
            The distribution that they were drawn from, float32 `(V,)`; the log-chance of each rank
            there; and the tokens.
        """
        q = warp(text, logits, logits_processor)
        chances = possible(q.log().topk(count).values)[0]
        return q[0], chances, draw(q[0], len(chances), self.generator).tolist()


class Rejection(Rule):
    """A rule that accepts children drawn from `q` with probability `min(1, p/q)`.

    A child is judged after its earlier siblings were rejected.

    The rule is exact for children sampled without replacement (ParallelSpec, Algorithm 1; for one
    child, Leviathan et al., 2023). Tokens that were not sampled have a `q` of 1 each. A sampled
    chain is judged as a whole.
    """

    same_text = False

    def __init__(self) -> None:
        self.draws = Draws()

    def path(
        self,
        draft: Draft,
        logits: Tensor,
        prefix: LongTensor,
        logits_processor: LogitsProcessorList,
    ) -> tuple[list[int], Tensor | None]:
        """Implement `Rule.path`: judge a sampled chain as a whole (Sun et al., 2403.10444).

        On average no fewer tokens are kept than by `judge` one by one: a token that `p` wants more
        than `q` makes up for one that it wants less. Other drafts, and processors with a memory,
        are judged one by one.
        """
        sampled = len(draft) > 0 and draft.q is not None and draft.depth == len(draft)
        if not sampled or any(type(processor) not in STATELESS for processor in logits_processor):
            return [], None
        text = torch.cat([prefix, draft.tokens[None].to(prefix.device)], dim=1)
        count, length = len(draft), prefix.shape[1]
        rows = [
            logits_processor(text[:, : length + node], logits[node : node + 1].float())
            for node in range(count + 1)
        ]
        p, ratio, accepted = torch.cat(rows).softmax(-1), torch.ones((), device=logits.device), 0
        rest = (p[0] - draft.q[0].to(p)).clamp(min=0)
        for node, token in enumerate(draft.token_ids):
            ratio = (ratio * p[node, token] / draft.q[node, token].to(p)).clamp(max=1)
            if node + 1 < count:
                left = (ratio * p[node + 1] - draft.q[node + 1].to(p)).clamp(min=0)
                chance = left.sum() / (left.sum() + 1 - ratio)
            else:
                left, chance = p[count], ratio
            if torch.rand((), device=p.device) < chance:  # never if it is 0 / 0
                accepted, rest = node + 1, left
        rest = rest / rest.sum() if rest.sum() > 0 else p[accepted]
        return list(range(accepted)), rest[None]

    def judge(self, draft: Draft, node: int, scores: Tensor, row: int) -> tuple[int, int | None]:
        """Implement `Rule.judge`."""
        p = scores.softmax(-1)[0]
        q = None
        for child in draft.children(node):
            token = draft.token_ids[child]
            if draft.q is None:
                q = torch.zeros_like(p)
                q[token] = 1
            elif q is None:
                q = draft.q[child].to(p.device).clone()
            if torch.rand((), device=p.device) * q[token] < p[token]:
                return token, child
            residual = (p - q).clamp_(min=0)
            total = residual.sum()
            p = residual / total if total > 0 else p
            q[token] = 0
            q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
        return drawn(p[None]), None
