"""Judge a draft, one token at a time, exactly as the target would have decoded without it.

The logits processors run once per emitted token, in order and on the true prefix, as in plain decoding: a processor that
keeps state sees nothing else. With `sample_match` the random numbers are drawn as in plain sampling too, so the same seed
gives the same text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..protocol import Draft
from .sampling import STATELESS

# (draft, node, processed scores (1, V)) -> (token, the drafted child that it is or None)
Rule = Callable[[Draft, int, Tensor], tuple[int, int | None]]


@dataclass
class Emitted:
    """One new token.

    Attributes:
        token: its id.
        node: the draft node that it is, or None for the target's own token, which ends the round.
        logits: `(1, V)` float32, the target's, with what processors wrote into them.
        scores: `(1, V)` float32, after the logits processors.
    """

    token: int
    node: int | None
    logits: Tensor
    scores: Tensor


def child_that_is(draft: Draft, node: int, token: int) -> tuple[int, int | None]:
    """Find the drafted child that is this token: the token, and the child or None."""
    return token, next((child for child in draft.children(node) if draft.token_ids[child] == token), None)


def greedy(draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
    """Choose the target's most probable token; a drafted child is accepted when it is that token."""
    return child_that_is(draft, node, int(scores.argmax()))


def drawn(p: Tensor) -> int:
    """Draw a token from the distribution `p`, `(1, V)`."""
    return int(torch.multinomial(p, 1))


def sample_match(draft: Draft, node: int, scores: Tensor, draw: Callable[[Tensor], int] = drawn) -> tuple[int, int | None]:
    """Draw a token from the target's distribution; a drafted child is accepted when it is that token.

    Exact for every draft, even one that knows the draw.

    Args:
        draft, node, scores: as for every rule.
        draw: gives a token of a distribution `(1, V)`, as plain decoding would at this place.
    """
    return child_that_is(draft, node, draw(scores.softmax(-1)))


def rejection(draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
    """Accept children sampled from `q` with probability `min(1, p/q)`, each after the last one's rejection.

    Exact for children sampled without replacement (ParallelSpec, Algorithm 1; for one child, Leviathan et al., 2023). Tokens that
    were not sampled have a `q` of 1 each.
    """
    p = scores.softmax(-1)[0]
    q = None
    for child in draft.children(node):
        token = draft.token_ids[child]
        if draft.q is None:
            q = torch.zeros_like(p).index_fill_(0, draft.tokens[child : child + 1].to(p.device), 1.0)
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


def _drawn_from(rest: Tensor, draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
    return drawn(rest), None


def typical(draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
    """Draw a token from the target's distribution, where `typical_path` accepts no further drafted token. The rule is lossy."""
    return drawn(scores.softmax(-1)), None


RULES: dict[str, Rule] = {"greedy": greedy, "sample_match": sample_match, "rejection": rejection, "typical": typical}
EPSILON, DELTA = 0.09, 0.3


def typical_path(
    draft: Draft, logits: Tensor, prefix: LongTensor, logits_processor: LogitsProcessorList, node: int = -1
) -> list[int]:
    """Find the longest path below `node` of tokens with `p > min(ε, δ exp(-H(p)))` (PPD, section 4.2, after Medusa).

    Args:
        draft: `N` nodes.
        logits: as for `accept`.
        prefix: int64 `(1, n)`, up to and with `node`.
        logits_processor: run on every path that is looked at.
        node: -1 for the last known token.
    """
    children = draft.children(node)
    if not children:
        return []
    p = logits_processor(prefix, logits[node + 1 : node + 2].float()).softmax(-1)[0]
    threshold = min(EPSILON, DELTA * float(torch.exp(torch.special.entr(p).sum().neg())))
    paths = []
    for child in children:
        token = draft.token_ids[child]
        if p[token] > threshold:
            longer = torch.cat([prefix, prefix.new_tensor([[token]])], dim=1)
            paths.append([child, *typical_path(draft, logits, longer, logits_processor, child)])
    return max(paths, key=len, default=[])


def block_path(
    draft: Draft, logits: Tensor, prefix: LongTensor, logits_processor: LogitsProcessorList
) -> tuple[list[int], Tensor]:
    """Choose how much of a sampled chain to keep, and the next token's distribution, judging it whole (Sun et al., 2403.10444).

    On average no fewer tokens are kept than by `rejection` one by one: a token that `p` wants more than `q` makes up for one that
    it wants less.

    Args:
        draft: a chain of `N` nodes, with `q`.
        logits: as for `accept`.
        prefix: int64 `(1, n)`, the text before the draft.
        logits_processor: all without a memory.

    Returns:
        The accepted nodes, and a distribution `(1, V)`.
    """
    text = torch.cat([prefix, draft.tokens[None].to(prefix.device)], dim=1)
    count, length = len(draft), prefix.shape[1]
    rows = [logits_processor(text[:, : length + node], logits[node : node + 1].float()) for node in range(count + 1)]
    p, ratio, accepted = torch.cat(rows).softmax(-1), torch.ones((), device=logits.device), 0
    rest = (p[0] - draft.q[0].to(p)).clamp(min=0)
    for node, token in enumerate(draft.token_ids):
        ratio = (ratio * p[node, token] / draft.q[node, token].to(p)).clamp(max=1)
        if node + 1 < count:
            left = (ratio * p[node + 1] - draft.q[node + 1].to(p)).clamp(min=0)
            chance = left.sum() / (left.sum() + 1 - ratio)
        else:
            left, chance = p[count], ratio
        if torch.rand((), device=p.device) < chance:  # never where it is 0 / 0
            accepted, rest = node + 1, left
    return list(range(accepted)), rest[None] / rest.sum() if rest.sum() > 0 else p[accepted : accepted + 1]


def accept(
    draft: Draft,
    logits: Tensor,
    buffer: LongTensor,
    length: int,
    logits_processor: LogitsProcessorList,
    rule: Rule,
    choices: list[int] | None = None,
) -> Iterator[Emitted]:
    """Yield the new tokens of a round: accepted drafts, then one token of the target's own.

    Args:
        draft: `N` nodes.
        logits: `(at least N + 1, V)`; row 0 follows the known prefix, row `i + 1` follows node `i`.
        buffer: int64 `(1, at least length + N + 1)`; its first `length` ids are the prefix. Each token is written behind it
            before it is yielded.
        length: of the prefix.
        logits_processor: the target's.
        rule: one of `RULES`.
        choices: the most probable token of each row, where that alone decides.

    Raises:
        ValueError: a logits processor knows of more rows than this one.

    Stop iterating where decoding stops; nothing is computed ahead of what is asked for.
    """
    node = -1
    path: list[int] = []
    if rule is typical:
        path = typical_path(draft, logits, buffer[:, :length], logits_processor)
    elif (
        rule is rejection
        and len(draft)
        and draft.q is not None
        and draft.is_chain
        and all(type(processor) in STATELESS for processor in logits_processor)
    ):
        path, rest = block_path(draft, logits, buffer[:, :length], logits_processor)
        rule = partial(_drawn_from, rest)
    while True:
        raw = logits[node + 1 : node + 2]
        if choices is not None:
            scores = raw
            token, child = child_that_is(draft, node, choices[node + 1])
        else:
            raw = raw.to(torch.float32, copy=True)  # which processors may write into, as in plain decoding
            scores = logits_processor(buffer[:, :length], raw)
            if scores.shape != raw.shape:
                raise ValueError(f"A logits processor made scores of shape {tuple(scores.shape)} for one row of {raw.shape[1]}.")
            token, child = (draft.token_ids[path[0]], path.pop(0)) if path else rule(draft, node, scores)
        buffer[0, length] = token
        length += 1
        yield Emitted(token, child, raw, scores)
        if child is None:
            return
        node = child
