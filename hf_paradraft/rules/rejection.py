"""Rejection sampling: output distributed as the target's (Leviathan et al., 2023; ParallelSpec)."""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..decoding.accept import Rule, drawn
from ..protocol import Draft
from .draws import STATELESS, Draws


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
