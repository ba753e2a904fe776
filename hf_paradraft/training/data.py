"""Texts and chats as tokens with loss masks: only what the drafter will have to write carries a label."""

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Sequence, Value
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..chat import render_chat, whole_characters
from ..files import rows_of

IGNORED = -100
ANSWER = "paradraftanswer"  # no template has it


def load_rows(source: str | Path) -> list[dict[str, Any]]:
    """Rows `{"text": …}` or `{"messages": […]}` of a JSON-lines file or a Hub dataset: `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT`.

    A row may have `finished`, false where its last answer was cut off and must not be learned to end there. What `regenerate`
    wrote has `ids`, `prompt_tokens` and `tokenizer` too: the tokens themselves.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: it is not JSON lines, has no rows, or neither column.
    """
    rows = list(rows_of(source, "train"))
    if not rows:
        raise ValueError(f"{source} is not JSON lines, or has no rows: it is empty.")
    if not any({"text", "messages"} & row.keys() for row in rows):
        raise ValueError(f"{source} needs a column 'text' or 'messages', but has {', '.join(rows[0])}.")
    return rows


def turns_of(messages: Any) -> list[dict[str, Any]]:
    """The turns of a chat, each with a `role` and its `content` as one text, or None beside tool calls.

    Raises:
        ValueError: it is no chat, or not one of texts.
    """
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"'messages' must be a list of turns, but is {reprlib.repr(messages)}.")
    turns = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            content = "".join(part["text"] for part in content)
        says_nothing = content is None and bool(message.get("tool_calls"))
        if not isinstance(message.get("role"), str) or not (isinstance(content, str) or says_nothing):
            raise ValueError(f"A turn needs 'role' and 'content', both texts, but this one is {reprlib.repr(dict(message))}.")
        turns.append({**message, "content": content})
        whole_characters(content or "")
    return turns


def text_of(row: Mapping[str, Any]) -> str:
    """A row's text, "" if it has none.

    Raises:
        ValueError: it is something else than a text.
    """
    text = row.get("text")
    if not isinstance(text, str | None):
        raise ValueError(f"'text' must be a text, but is {reprlib.repr(text)}.")
    return whole_characters(text or "")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True) -> dict[str, list[int]]:
    """All tokens labelled, the end-of-text token last if the text is `finished`, so that the drafter learns to stop."""
    ids = tokenizer(text)["input_ids"]
    if finished and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": list(ids)}


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], finished: bool = True
) -> dict[str, list[int]]:
    """Assistant turns labelled, with the token that ends them; everything else ignored.

    The last answer stands as it is behind what opens its turn, whatever the template would make of it: some leave out what was
    thought, or put an empty thought in front. Where a template rewrites earlier turns, only what follows is learned.

    Args:
        tokenizer: has a chat template.
        messages: from `turns_of`.
        finished: False if the last answer was cut off: then nothing after it is kept.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show answers.
    """
    ids: list[int] = []
    labels: list[int] = []
    text = ""

    def append(more: str, labelled: bool) -> None:
        nonlocal text
        piece = tokenizer(more, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        labels.extend(piece if labelled else [IGNORED] * len(piece))
        text += more

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = render_chat(tokenizer, messages[:index], True)
        if not opened.startswith(text):
            ids, labels, text = [], [], ""
        append(opened[len(text) :], False)
        if index + 1 == len(messages) and not message.get("tool_calls"):
            append(message["content"] + (_closing(tokenizer, messages) if finished else ""), True)
        elif (turn := render_chat(tokenizer, messages[: index + 1], False)).startswith(opened):
            append(turn[len(opened) :], True)
    return {"input_ids": ids, "labels": labels}


def _closing(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """What a template puts behind the last answer."""
    *before, last = messages
    shown = render_chat(tokenizer, [*before, {**last, "content": ANSWER}], False)
    if ANSWER not in shown:
        raise ValueError("The chat template does not show the assistant's answer, so it cannot be learned.")
    return shown.rpartition(ANSWER)[2]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells tokenizers apart whose ids mean other tokens."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def encode_written(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tokens that the target wrote, as `regenerate` keeps them; the prompt of a chat carries no labels.

    Raises:
        ValueError: they are no tokens.
    """
    ids, unlabelled = row["ids"], row.get("prompt_tokens", 0)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in [*ids, unlabelled]):
        raise ValueError(f"'ids' must be a list of token ids, and 'prompt_tokens' a number, but are {reprlib.repr(ids)}.")
    return {"input_ids": list(ids), "labels": [IGNORED] * unlabelled + ids[unlabelled:]}


def encode_rows(rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokenise every row; cut at `max_length`; leave out rows in which nothing is left to learn.

    Rows that `regenerate` wrote with this tokenizer have their tokens already.

    Returns:
        Columns `input_ids`, `labels` (`labels[t]` belongs to token `t`) and `length`.

    Raises:
        ValueError: no row carries a label, or one is neither a text nor a chat; the message says which.
    """
    samples: list[dict[str, Any]] = []
    count, ours = 0, tokenizer_hash(tokenizer)
    for count, row in enumerate(tqdm(rows, desc="tokenise", unit="rows", leave=False), 1):
        try:
            if row.get("finished") not in (True, False, None):
                raise ValueError(f"'finished' must be true or false, but is {reprlib.repr(row['finished'])}.")
            finished = row.get("finished") is not False
            if row.get("tokenizer") == ours and "ids" in row:
                encoded = encode_written(row)
            elif row.get("messages"):
                encoded = encode_chat(tokenizer, turns_of(row["messages"]), finished)
            else:
                encoded = encode_text(tokenizer, text_of(row), finished)
        except ValueError as error:
            raise ValueError(f"Row {count}: {error}") from None
        ids, labels = encoded["input_ids"][:max_length], encoded["labels"][:max_length]
        if any(label != IGNORED for label in labels[1:]):
            samples.append({"input_ids": ids, "labels": labels, "length": len(ids)})
    if not samples:
        raise ValueError(
            f"None of the {count} rows has a token to learn within max_length={max_length}: "
            "chats need assistant turns, and texts more than one token."
        )
    numbers = Sequence(Value("int32"))
    return Dataset.from_list(samples, Features({"input_ids": numbers, "labels": numbers, "length": Value("int32")}))
