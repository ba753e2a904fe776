"""Guesses in the target's own ids, and the trees that are made of them.

A path is never more probable than its beginning, so the N most probable paths always form a tree.
Where distances do not depend on each other, walking from the most probable path finds them in O(N
log N).
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import takewhile
from math import exp, inf, log

import numpy
import torch
from numpy import ndarray
from torch import LongTensor, Tensor

from ..protocol import Draft


def cut(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Drop the logits of ids that the target lacks from logits `(…, V')`.

    Where the drafter maps its ids, these are set to -inf instead.
    """
    if vocabulary is None:
        return logits[..., :vocab_size]
    if len(vocabulary) != logits.shape[-1]:
        raise ValueError(
            f"A drafter maps {len(vocabulary)} ids of its own, but its logits are for "
            f"{logits.shape[-1]}."
        )
    outside = (vocabulary < 0) | (vocabulary >= vocab_size)
    return logits.masked_fill(outside.to(logits.device), -torch.inf)


def to_target(ids: LongTensor, vocabulary: LongTensor | None) -> LongTensor:
    """Map the drafter's ids to the target's."""
    return ids if vocabulary is None else vocabulary.to(ids.device)[ids]


def widen(logits: Tensor, vocabulary: LongTensor | None, vocab_size: int) -> Tensor:
    """Make logits `(K, V)` float32 over the target's vocabulary.

    Ids that the drafter does not have get -inf.

    Args:
        logits: `(K, V')`, from `cut`.
        vocabulary: int64 `(V',)`, or None where the first V' ids are the same.
        vocab_size: V.
    """
    wide = torch.full(
        (len(logits), vocab_size), -torch.inf, dtype=torch.float32, device=logits.device
    )
    if vocabulary is None:
        wide[:, : logits.shape[-1]] = logits
        return wide
    inside = (vocabulary >= 0) & (vocabulary < vocab_size)
    wide[:, vocabulary[inside].to(logits.device)] = logits[:, inside.to(logits.device)].float()
    return wide


def best_paths(scores: list[list[float]], num_nodes: int, least: float = 0.0) -> Draft:
    """Find the N most probable paths over distances that do not depend on each other.

    Args:
        scores: log-probabilities by depth and rank, which fall from rank to rank.
        num_nodes: N; fewer come back only if there are no more.
        least: the probability below which a path is left out, except the first one.

    Returns:
        A draft with ranks instead of tokens, most probable first: parents come before children,
        and the first n nodes are the best n.
    """
    parents, ranks, acceptance = list[int](), list[int](), list[float]()
    dearest = -log(least) if least > 0 else inf
    # (minus log-probability, depth, rank, parent, the parent's log-probability)
    heap = [(-row[0], 0, 0, -1, 0.0) for row in scores[:1]]
    while heap and len(parents) < num_nodes and (heap[0][0] <= dearest or not parents):
        cost, depth, rank, parent, base = heappop(heap)
        if rank + 1 < len(scores[depth]):
            heappush(heap, (-(base + scores[depth][rank + 1]), depth, rank + 1, parent, base))
        if depth + 1 < len(scores):
            heappush(heap, (cost - scores[depth + 1][0], depth + 1, 0, len(parents), -cost))
        parents.append(parent)
        ranks.append(rank)
        acceptance.append(exp(scores[depth][rank]))
    return Draft.of_ids(ranks, torch.device("cpu"), parents, None, acceptance)


def possible(scores: Tensor | ndarray) -> list[list[float]]:
    """List the log-probabilities of possible tokens, up to the first row without any.

    In each row of `scores`, `(K, r)`, they fall from rank to rank.
    """
    return list(
        takewhile(bool, ([score for score in row if score > -inf] for row in scores.tolist()))
    )


def read(scores: Tensor, ids: LongTensor, vocabulary: LongTensor | None) -> tuple[ndarray, ndarray]:
    """Bring the drafter's scores of some of its ids to the host, in one transfer.

    Args:
        scores, ids: `(n, r)`, of any floating dtype and int64.
        vocabulary: the target's ids, as for `to_target`.

    Returns:
        The scores, float64 `(n, r)`, and the target's ids, int32 `(n, r)`.
    """
    both = (
        torch.stack([scores.float().view(torch.int32), to_target(ids, vocabulary).int()])
        .cpu()
        .numpy()
    )
    return both[0].view(numpy.float32).astype(float), both[1]


def best_first_tree(
    logits: Tensor,
    num_nodes: int,
    calibration: ndarray | None = None,
    vocabulary: Tensor | None = None,
    least: float = 0.0,
    ranks: int | None = None,
) -> Draft:
    """Build the tree with the largest expected number of accepted tokens.

    The guesses' probabilities are taken to be right, once they are corrected.

    Args:
        logits: `(K, V')`; row `d` guesses the token at distance `d + 1`.
        num_nodes: N; fewer nodes come back only if there are no more that reach `least`.
        calibration: `(K,)`, the factor that corrects each distance's probabilities; default: 1.
        vocabulary: int64 `(V',)`, the target's id of each of the drafter's.
        least: the path probability below which a path is left out.
        ranks: the most guesses of each distance that may be nodes; 1 makes a chain.

    Returns:
        A draft, most probable first (so parents come before children, and the first n nodes are the
        best tree of n), with `acceptance` and without `q`; it ends before the first row without
        finite logits.
    """
    top, ids = logits.float().log_softmax(-1).topk(min(ranks or num_nodes, logits.shape[1]), dim=-1)
    scores, tokens = read(top, ids, vocabulary)
    if calibration is not None:
        scores += numpy.log(calibration)[:, None]
    tree = best_paths(possible(scores), num_nodes, least)
    chosen = [
        int(tokens[depth - 1, rank])
        for depth, rank in zip(tree.depths, tree.token_ids, strict=True)
    ]
    return Draft.of_ids(chosen, logits.device, tree.parents, None, tree.acceptance)


def likely_path(draft: Draft) -> list[int]:
    """List the nodes on a draft's path of most probable children, from the first one down.

    Where chances are unknown, the path takes first children.
    """
    path: list[int] = []
    while children := draft.children(path[-1] if path else -1):
        path.append(
            children[0]
            if draft.acceptance is None
            else max(children, key=draft.acceptance.__getitem__)
        )
    return path


def part(draft: Draft, nodes: Sequence[int], root: int | None = -1) -> Draft:
    """Make a draft of some nodes of another one, parents before children and all below `root`."""
    index = {root: -1, **{node: number for number, node in enumerate(nodes)}}
    return Draft.of_ids(
        [draft.token_ids[node] for node in nodes],
        draft.tokens.device,
        [index[draft.parents[node]] for node in nodes],
        None if draft.q is None or not nodes else draft.q[nodes],
        None if draft.acceptance is None else [draft.acceptance[node] for node in nodes],
    )
