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
        token: the token's id.
        node: the draft node that it is, or None for the target's own token, which ends the round.
        logits: `(1, V)`, the target's logits, with anything that processors wrote into them.
        scores: `(1, V)`, the scores after the logits processors.
    """

    token: int
    node: int | None
    logits: Tensor
    scores: Tensor


def child_that_is(draft: Draft, node: int, token: int) -> tuple[int, int | None]:
    """Return a token, and the drafted child of `node` that is this token, or None."""
    return token, next(
        (child for child in draft.children(node) if draft.token_ids[child] == token), None
    )


class Rule:
    """An acceptance rule, and the properties of it that the engine asks for.

    Attributes:
        draws: the maker of drafts (`rules.rejection.Draws`) of a rule that accepts only drawn
            tokens; None: any draft will do.
        same_text: whether each token is the one that plain decoding takes: then the size of a draft
            may depend on the clock, and processors see plain decoding's texts only.
        rests: whether the clock may decide that a round is a plain one.
        in_turn: whether plain decoding draws for all sequences of a batch at once, step by step.
        only_argmax: whether only the most probable token decides.
    """

    draws: Any = None
    same_text = rests = True
    in_turn = only_argmax = False

    def begin(self, call: Any, vocab_size: int, generator: torch.Generator | None) -> None:
        """Begin a call that draws from `generator`, by default torch's; most rules do nothing."""

    def end(self) -> None:
        """End the call, also after an exception; most rules do nothing."""

    def race(self, row: int, length: int, processors: LogitsProcessorList, budget: Any) -> Any:
        """Return the scorer of guesses by their chance to be the target's draw, if any.

        The guesses stand after `length` tokens, padding included. None: the guesses keep
        the drafter's scores.
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
        """Judge a draft as a whole, if the rule does so.

        Args:
            draft, logits, logits_processor: as for `accept`.
            prefix: int64 `(1, n)`, the text before the draft.

        Returns:
            The accepted nodes from the root down, and the distribution `(1, V)` of the token after
            them; None instead of a distribution: `judge` chooses that token.
        """
        return [], None

    def judge(self, draft: Draft, node: int, scores: Tensor, row: int) -> tuple[int, int | None]:
        """Choose the token after `node` by processed scores `(1, V)`.

        Args:
            draft: the draft of one of the call's sequences.
            node: the node, -1 for the last known token.
            scores: the scores after it.
            row: the sequence's place in the call.

        Returns:
            The token, and the drafted child of `node` that is this token, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no judge(draft, node, scores, row).")

    def draw_together(self, scores: Tensor) -> list[int] | None:
        """Draw the tokens of all sequences, at one length, from processed scores `(B, V)`.

        Returns:
            The tokens; None: each sequence is judged by itself.
        """
        return None


class Greedy(Rule):
    """A rule that accepts a drafted child if it is the target's most probable token."""

    only_argmax = True

    def judge(self, draft: Draft, node: int, scores: Tensor, row: int) -> tuple[int, int | None]:
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
    row: int = 0,
) -> Iterator[Emitted]:
    """Yield the new tokens of a round: accepted drafts, then one token of the target's own.

    The caller stops iterating where decoding stops; without `choices`, a token is computed only
    when it is asked for.

    Args:
        draft: a draft of `N` nodes.
        logits: `(at least N + 1, V)`; row 0 follows the known prefix, row `i + 1` follows node `i`.
        buffer: int64 `(1, at least length + N + 1)`; its first `length` ids are the prefix. Each
            token is written after it before it is yielded.
        length: the prefix's number of tokens.
        logits_processor: the sequence's logits processors.
        rule: the call's acceptance rule.
        choices: the most probable token of each row, if only that decides; None: `rule` judges.
        row: the sequence's place in the call.
    """
    if choices is not None:
        yield from _most_probable(draft, logits, buffer[0, length:], choices)
        return
    node = -1
    path, rest = rule.path(draft, logits, buffer[:, :length], logits_processor)
    while True:
        # a copy, since processors may write into it, as in plain decoding
        raw = logits[node + 1 : node + 2].to(torch.float32, copy=True)
        scores = logits_processor(buffer[:, :length], raw)
        if path:
            token, child = draft.token_ids[path[0]], path.pop(0)
        elif rest is None:
            token, child = rule.judge(draft, node, scores, row)
        else:
            token, child = drawn(rest), None
        buffer[0, length] = token
        length += 1
        yield Emitted(token, child, raw, scores)
        if child is None:
            return
        node = child


def _most_probable(
    draft: Draft, logits: Tensor, room: LongTensor, choices: list[int]
) -> Iterator[Emitted]:
    """Yield the new tokens of a round that only the most probable tokens decide.

    All are written into `room` in one operation.
    """
    nodes = [-1]
    while (child := child_that_is(draft, nodes[-1], choices[nodes[-1] + 1])[1]) is not None:
        nodes.append(child)
    room[: len(nodes)] = room.new_tensor([choices[node + 1] for node in nodes])
    for node, child in zip(nodes, [*nodes[1:], None], strict=True):
        raw = logits[node + 1 : node + 2]
        yield Emitted(choices[node + 1], child, raw, raw)
