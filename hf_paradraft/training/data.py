"""Texts and chats as tokens with loss masks: only tokens that the drafter will have to write carry
a label.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import RefusedTurns, render_chat
from .rows import IGNORED
from .source import THOUGHTS, leave_out, text_of, tools_of, turns_of
from .target import short_hash

logger = logging.get_logger(__name__)
ANSWER = "paradraftanswer"  # no template has it
OPENS, CLOSES = "<think>", "</think>"  # around thoughts, where a template has no place for them


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True
) -> dict[str, list[int]]:
    """Tokenise and label a whole text, with the end-of-text token last if it is `finished`.

    From that token the drafter learns to stop.
    """
    ids = tokenizer(text)["input_ids"]
    if finished and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": list(ids)}


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    finished: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, list[int]]:
    """Label assistant turns, with the token that ends them; everything else is ignored.

    The last answer stands as it is after the opening of its turn, for templates may change it: some
    leave out thoughts, or put an empty thought in front. Thoughts next to it stand before it as the
    template shows them. If a template rewrites earlier turns, only the turns that follow are
    learned.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the turns, from `turns_of`.
        finished: False if the last answer was cut off: then nothing after it is kept.
        tools: the schemas of tools, from `tools_of`.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show answers.
        RefusedTurns: it refuses these turns.
    """
    ids: list[int] = []
    labels: list[int] = []
    text = ""
    ends = {
        index: str(token)
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }

    def append(more: str, labelled: bool) -> None:
        nonlocal text
        answered = bool(labels) and labels[-1] != IGNORED
        ended = text.rstrip().endswith(tuple(ends.values()))
        # Encoded with the text before it, if that leaves the tokens before it unchanged: some
        # tokenizers put a space before the first word of a text.
        whole = tokenizer(text + more, add_special_tokens=False)["input_ids"]
        piece = (
            whole[len(ids) :]
            if whole[: len(ids)] == ids
            else tokenizer(more, add_special_tokens=False)["input_ids"]
        )
        ids.extend(piece)
        labels.extend(piece if labelled else [IGNORED] * len(piece))
        # the next turn's marker ends an answer
        if answered and not ended and piece and piece[0] in ends:
            labels[-len(piece)] = piece[0]
        text += more

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        learned = _is_learned(message)
        if index:
            opened = render_chat(tokenizer, messages[:index], True, tools)
        else:  # templates render no empty conversation
            opened, _ = _around(tokenizer, messages[:1], tools)
        if not opened.startswith(text):
            ids, labels, text = [], [], ""
        append(opened[len(text) :], False)
        if index + 1 == len(messages) and not message.get("tool_calls"):
            closing = _around(tokenizer, messages, tools)[1] if finished else ""
            append(_answer(tokenizer, messages, opened, tools) + closing, learned)
            # the template writes the end of an answer as the opening of the next turn
            if finished and not closing.strip():
                with suppress(RefusedTurns):
                    asked = {"role": "user", "content": ANSWER}
                    more = render_chat(tokenizer, [*messages, asked], False, tools)
                    end = next((end for end in ends.values() if more.startswith(text + end)), "")
                    append(end, learned)
        elif (turn := render_chat(tokenizer, messages[: index + 1], False, tools)).startswith(
            opened
        ):
            append(turn[len(opened) :], learned)
    return {"input_ids": ids, "labels": labels}


def _is_learned(turn: dict[str, Any]) -> bool:
    """Tell whether a turn is to be learned, by its `weight`, `loss` or `train`.

    Data sets give turns that are not learned a weight of 0, or a false `loss` or `train`.

    Raises:
        ValueError: a weight between, which is not known here.
    """
    marks = {name: turn[name] for name in ("weight", "loss", "train") if turn.get(name) is not None}
    if odd := {name: mark for name, mark in marks.items() if mark not in (0, 1)}:
        raise ValueError(f"A turn is learned or not, by 1 or 0, true or false, but one has {odd}.")
    return all(marks.values())


def _answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    opened: str,
    tools: list[dict[str, Any]] | None,
) -> str:
    """Render the target's own part of the last turn: thoughts, if any, and the answer."""
    *before, last = messages
    thought, content = last.get("reasoning_content"), last["content"] or ""
    if thought is None:
        if content.lstrip().startswith(OPENS) and opened.rstrip().endswith(OPENS):
            logger.warning_once(
                f"Answers begin with {OPENS}, which the chat template has opened already: they are "
                "learned with both, as they stand. If the target writes it once, take it off the "
                f"rows, or put thoughts under {THOUGHTS[0]}."
            )
        return content
    shown = render_chat(tokenizer, [*before, {**last, "content": ANSWER}], False, tools)
    if shown.startswith(opened) and thought.strip() in (
        begun := shown[len(opened) :].rpartition(ANSWER)[0]
    ):
        return begun + content
    opening = "" if opened.rstrip().endswith(OPENS) else f"{OPENS}\n"
    return f"{opening}{thought}\n{CLOSES}\n\n{content}"


def _around(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> tuple[str, str]:
    """Render the parts of a template before the last answer, and after it."""
    *before, last = messages
    bare = {name: value for name, value in last.items() if name not in THOUGHTS}
    shown = render_chat(tokenizer, [*before, {**bare, "content": ANSWER}], False, tools)
    if ANSWER not in shown:
        raise ValueError(
            "The chat template does not show the assistant's answer, so it cannot be learned."
        )
    head, _, tail = shown.rpartition(ANSWER)
    return head, tail


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer's vocabulary, to tell apart tokenizers whose ids mean other tokens."""
    return short_hash(json.dumps(sorted(tokenizer.get_vocab().items())))


def encode_written(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Read the tokens that the target wrote from a row of `regenerate`.

    The prompt of a chat carries no labels.

    Raises:
        ValueError: they are no tokens.
    """
    ids, unlabelled = row["ids"], row.get("prompt_tokens") or 0
    if not isinstance(ids, list) or not all(
        type(token) is int and token >= 0 for token in [*ids, unlabelled]
    ):
        raise ValueError(
            "'ids' must be a list of token ids, and 'prompt_tokens' a number, but are "
            f"{reprlib.repr(ids)}."
        )
    return {"input_ids": ids, "labels": [IGNORED] * unlabelled + ids[unlabelled:]}


def encode_rows(
    rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Dataset:
    """Tokenise every row; cut at `max_length`; leave out rows in which nothing is left to learn.

    Rows that `regenerate` wrote with this tokenizer have their tokens already.

    Returns:
        Columns `input_ids`, `labels` (`labels[t]` belongs to token `t`) and `length`.

    Raises:
        ValueError: no row carries a label, or one is neither a text nor a chat; the message says
            which.
    """
    samples: list[dict[str, Any]] = []
    refused: list[str] = []
    count, ours = 0, tokenizer_hash(tokenizer)
    for count, row in enumerate(tqdm(rows, desc="tokenise", unit="rows", leave=False), 1):
        try:
            if row.get("finished") not in (True, False, None):
                raise ValueError(
                    f"'finished' must be true or false, but is {reprlib.repr(row['finished'])}."
                )
            finished = row.get("finished") is not False
            if row.get("tokenizer") == ours and "ids" in row:
                encoded = encode_written(row)
            elif row.get("messages"):
                encoded = encode_chat(tokenizer, turns_of(row["messages"]), finished, tools_of(row))
            else:
                encoded = encode_text(tokenizer, text_of(row), finished)
        except RefusedTurns as error:
            refused.append(f"Row {count}: {error}")
            continue
        except ValueError as error:
            raise ValueError(f"Row {count}: {error}") from None
        ids, labels = encoded["input_ids"][:max_length], encoded["labels"][:max_length]
        if any(label != IGNORED for label in labels[1:]):
            samples.append({"input_ids": ids, "labels": labels, "length": len(ids)})
    leave_out(refused, count)
    if not samples:
        raise ValueError(
            f"None of the {count} rows has a token to learn within max_length={max_length}: "
            "chats need assistant turns, and texts more than one token."
        )
    if empty := count - len(refused) - len(samples):
        logger.warning(
            "%d of %d rows have no token to learn within max_length=%d: left out.",
            empty,
            count,
            max_length,
        )
    return Dataset.from_list(samples)
