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

    same_text = rests = False

    def path(
        self,
        draft: Draft,
        logits: Tensor,
        prefix: LongTensor,
        logits_processor: LogitsProcessorList,
        node: int = -1,
    ) -> tuple[list[int], None]:
        """Implement `Rule.path`: find the longest path of tokens with `p > min(ε, δ exp(-H(p)))`.

        The threshold is that of PPD, section 4.2, after Medusa. Processors are run on every path
        that is tried.

        Args:
            draft, logits, logits_processor: as for `Rule.path`.
            prefix: int64 `(1, n)`, the text up to and with `node`.
            node: the node that the path begins after; -1 for the last known token.
        """
        if not (children := draft.children(node)):
            return [], None
        p = logits_processor(prefix, logits[node + 1 : node + 2].float()).softmax(-1)[0]
        threshold = min(EPSILON, DELTA * float(torch.exp(torch.special.entr(p).sum().neg())))
        paths = []
        for child in children:
            token = draft.token_ids[child]
            if p[token] > threshold:
                longer = torch.cat([prefix, prefix.new_tensor([[token]])], dim=1)
                after, _ = self.path(draft, logits, longer, logits_processor, child)
                paths.append([child, *after])
        return max(paths, key=len, default=[]), None

    def judge(self, draft: Draft, node: int, scores: Tensor, row: int) -> tuple[int, int | None]:
        """Implement `Rule.judge`: draw the token after the path, and accept no further node."""
        return drawn(scores.softmax(-1)), None
