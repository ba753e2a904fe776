"""Drafts that are drawn from the drafter's distributions, for rejection (ParallelSpec, Alg. 1)."""

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


def are_numbers(logits: Tensor) -> bool:
    """Tell whether each row of logits `(K, V)` has a finite maximum."""
    return bool(logits.amax(-1).isfinite().all())


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
        if not are_numbers(logits):
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
