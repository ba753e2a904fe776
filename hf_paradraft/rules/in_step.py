"""Tokens of a batch that are taken step by step, as plain decoding shows them to processors that
may know the batch's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoding.accept import Emitted, child_that_is
from ..decoding.call import Call
from ..decoding.sequence import Processors, take
from ..names import pad_token_of


def advance_in_step(logits_processor: Processors, call: Call, logits: list[Tensor]) -> None:
    """Judge a call's drafts step by step, and take the new tokens of its sequences.

    All sequences are kept at one length: a round ends for all of them with the first one whose
    draft is used up or rejected. Sequences that have ended go on with padding, until all have
    ended.

    Args:
        logits_processor: the call's logits processors.
        call: the call.
        logits: the target's logits for each sequence, `(at least N + 1, V)`.
    """
    nodes: list[int | None] = [-1] * len(call.sequences)
    while any(sequence.ended is None for sequence in call.sequences):
        if None in nodes:
            return
        length = call.sequences[0].length
        for sequence in call.sequences:
            sequence.outcome.num_read = len(sequence.outcome.accepted)
        raw = torch.stack(
            [read[node + 1] for read, node in zip(logits, nodes, strict=True)]
        ).float()
        scores = logits_processor(call.padded(length), raw)
        drawn = call.rule.draw_together(scores)
        for index, sequence in enumerate(call.sequences):
            draft, node, here = sequence.draft, nodes[index], slice(index, index + 1)
            if sequence.ended is not None:
                token, nodes[index] = child_that_is(
                    draft, node, pad_token_of(call.generation_config)
                )
            elif drawn is not None:
                token, nodes[index] = child_that_is(draft, node, drawn[index])
            else:
                token, nodes[index] = call.rule.judge(draft, node, scores[here], index)
            sequence.ids[0, length] = token
            take(sequence, Emitted(token, nodes[index], raw[here], scores[here]), call.ends)
        call.stop()
        for sequence in call.sequences:
            if sequence.finished and sequence.ended is None:
                sequence.ended = sequence.length
            sequence.finished = False
    for sequence in call.sequences:
        sequence.length, sequence.finished = sequence.end, True
