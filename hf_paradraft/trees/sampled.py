"""A tree whose tokens are drawn, for recursive rejection (ParallelSpec, Algorithm 1)."""

import torch
from torch import LongTensor, Tensor

from .best_first import Paths, best_paths


def draw(q: Tensor, count: int, generator: torch.Generator | None = None) -> LongTensor:
    """`count` draws without replacement from `q`, float32 `(V,)`, in order: int64 `(count,)`.

    The k largest of log q + Gumbel noise are k such draws (Kool et al., 2019). `q` has as many positive entries at least.
    """
    noise = -torch.empty_like(q).exponential_(generator=generator).log()
    return (q.log() + noise).topk(count).indices


def possible(q: Tensor, most: int) -> list[list[float]]:
    """The largest log-probabilities of each row of `q` `(K, V)`, `most` of them or as many as are possible, falling."""
    top = q.log().topk(min(most, q.shape[1])).values.tolist()
    return [[score for score in row if score > -torch.inf] for row in top]


def sampled_paths(q: Tensor, num_nodes: int, generator: torch.Generator | None = None) -> tuple[Paths, LongTensor]:
    """A tree of the best-first shape whose siblings are drawn from `q` without replacement.

    The shape depends on `q` alone and never on what is drawn, so that the draws are what the rule takes them for.

    Args:
        q: float32 `(K, V)`, the distribution at each distance.
        num_nodes: N, at least 1; fewer come back where fewer tokens are possible.
        generator: of the draws; default: torch's own.

    Returns:
        The shape, and tokens int64 `(N,)`; siblings stand in the order in which they were drawn.
    """
    paths = best_paths(possible(q, num_nodes), num_nodes)
    tokens = torch.empty(len(paths.parents), dtype=torch.long, device=q.device)
    for parent in dict.fromkeys(paths.parents):
        children = [node for node, other in enumerate(paths.parents) if other == parent]
        tokens[children] = draw(q[paths.depths[children[0]]], len(children), generator)
    return paths, tokens
