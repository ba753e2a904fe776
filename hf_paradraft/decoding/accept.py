"""Judge a draft, one token at a time, exactly as the target would have decoded without it.

The logits processors run once per emitted token, in order and on the true prefix, as in plain
decoding: a processor that keeps state sees nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessorList

from ..protocol import Draft


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
    return token, next(
        (child for child in draft.children(node) if draft.token_ids[child] == token), None
    )


class Rule:
    """A rule of acceptance, which says itself what it allows.

    Attributes:
        draws: draws drafts (`rules.draws.Draws`), where nothing else may be in them; None: any
            draft will do.
        clocked: whether the size of a draft may depend on the clock.
        rests: whether the clock may decide that a round is a plain one.
        looks_ahead: whether processors are shown texts that plain decoding never sees.
        in_turn: whether plain decoding draws for all sequences of a batch at once, step by step.
        only_argmax: whether the most probable token alone decides.
    """

    draws: Any = None
    clocked = rests = True
    looks_ahead = in_turn = only_argmax = False

    def begin(self, call: Any, vocab_size: int, generator: torch.Generator | None) -> None:
        """Begin a call, whose draws come from `generator`, by default torch's. Most do nothing."""

    def end(self) -> None:
        """End the call, whatever ended it. Most do nothing."""

    def of_row(self, row: int) -> Rule:
        """Return the rule of one of the call's sequences."""
        return self

    def race(self, row: int, length: int, processors: LogitsProcessorList, budget: Any) -> Any:
        """Return the scorer that orders a drafter's guesses by the target's draw, if any.

        The guesses stand after `length` tokens, padding included. None: nothing orders them.
        """

    def undisturbed(self) -> AbstractContextManager:
        """Enter a block in which a drafter's draws do not move the target's generator."""
        return nullcontext()

    def path(
        self,
        draft: Draft,
        logits: Tensor,
        prefix: LongTensor,
        logits_processor: LogitsProcessorList,
    ) -> tuple[list[int], Tensor | None]:
        """Judge a draft as a whole, where that is the rule's way.

        Args:
            draft, logits, logits_processor: as for `accept`.
            prefix: int64 `(1, n)`, the text before the draft.

        Returns:
            The accepted nodes from the root down, and the distribution `(1, V)` of the token after
            them; None: that one is still to be judged.
        """
        return [], None

    def judge(self, draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
        """Choose the token after `node` by processed scores `(1, V)`.

        Returns:
            The token, and the drafted child that it is or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no judge(draft, node, scores).")

    def draw_together(self, scores: Tensor) -> list[int] | None:
        """Draw the tokens of all sequences, at one length, from processed scores `(B, V)`.

        Returns:
            The tokens; None: each sequence is judged by itself.
        """
        return None


class Greedy(Rule):
    """The target's most probable token; a drafted child is accepted if it is that token."""

    only_argmax = True

    def judge(self, draft: Draft, node: int, scores: Tensor) -> tuple[int, int | None]:
        """Implement `Rule.judge`."""
        return child_that_is(draft, node, int(scores.argmax()))


def drawn(p: Tensor) -> int:
    """Draw a token from the distribution `p`, `(1, V)`."""
    return int(torch.multinomial(p, 1))


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
        buffer: int64 `(1, at least length + N + 1)`; its first `length` ids are the prefix. Each
            token is written after it before it is yielded.
        length: of the prefix.
        logits_processor: the target's.
        rule: of the sequence.
        choices: the most probable token of each row, where that alone decides.

    Raises:
        ValueError: a logits processor knows of more rows than this one.

    Stop iterating where decoding stops; but for `choices`, nothing is computed ahead of what is
    asked for.
    """
    if choices is not None:
        yield from _most_probable(draft, logits, buffer[0, length:], choices)
        return
    node = -1
    path, rest = rule.path(draft, logits, buffer[:, :length], logits_processor)
    while True:
        # which processors may write into, as in plain decoding
        raw = logits[node + 1 : node + 2].to(torch.float32, copy=True)
        scores = logits_processor(buffer[:, :length], raw)
        if scores.shape != raw.shape:
            raise ValueError(
                f"A logits processor made scores of shape {tuple(scores.shape)} for one row of "
                f"{raw.shape[1]}."
            )
        if path:
            token, child = draft.token_ids[path[0]], path.pop(0)
        else:
            token, child = rule.judge(draft, node, scores) if rest is None else (drawn(rest), None)
        buffer[0, length] = token
        length += 1
        yield Emitted(token, child, raw, scores)
        if child is None:
            return
        node = child


def _most_probable(
    draft: Draft, logits: Tensor, room: LongTensor, choices: list[int]
) -> Iterator[Emitted]:
    """Yield the new tokens where the most probable ones alone decide.

    They are written into `room` in one operation.
    """
    nodes = [-1]
    while (child := child_that_is(draft, nodes[-1], choices[nodes[-1] + 1])[1]) is not None:
        nodes.append(child)
    room[: len(nodes)] = room.new_tensor([choices[node + 1] for node in nodes])
    for node, child in zip(nodes, [*nodes[1:], None], strict=True):
        raw = logits[node + 1 : node + 2]
        yield Emitted(choices[node + 1], child, raw, raw)
