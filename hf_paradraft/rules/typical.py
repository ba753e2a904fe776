"""Typical acceptance, which is lossy: probable tokens are accepted (Medusa; PPD, section 4.2)."""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..decoding.accept import Rule, drawn
from ..protocol import Draft

EPSILON, DELTA = 0.09, 0.3


class Typical(Rule):
    """A lossy rule that accepts the longest typical path, and draws a token after it."""

    clocked = rests = False
    looks_ahead = True

    def path(
        self,
        draft: Draft,
        logits: Tensor,
        prefix: LongTensor,
        logits_processor: LogitsProcessorList,
    ) -> tuple[list[int], None]:
        """Implement `Rule.path`."""
        return typical_path(draft, logits, prefix, logits_processor), None

    def judge(self, draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
        """Implement `Rule.judge`: draw the token after the path, and accept no further node."""
        return drawn(scores.softmax(-1)), None


def typical_path(
    draft: Draft,
    logits: Tensor,
    prefix: LongTensor,
    logits_processor: LogitsProcessorList,
    node: int = -1,
) -> list[int]:
    """Find the longest path below `node` of tokens with `p > min(ε, δ exp(-H(p)))`.

    The threshold is that of PPD, section 4.2, after Medusa.

    Args:
        draft: a draft of `N` nodes.
        logits: the target's logits, as for `accept`.
        prefix: int64 `(1, n)`, the text up to and with `node`.
        logits_processor: the logits processors, run on every path that is tried.
        node: the node that the path begins after; -1 for the last known token.
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
