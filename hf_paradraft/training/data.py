"""Texts and chats as tokens with loss masks: only what the drafter will have to write carries a label."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

IGNORED = -100


def load_rows(source: str | Path, split: str = "train") -> Dataset:
    """Rows `{"text": …}` or `{"messages": […]}` from a JSON-lines file or a Hub dataset.

    A row may have `finished`, false where its last answer was cut off and must not be learned to end there.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: it has no rows, or neither column.
    """
    if Path(source).is_file():
        try:
            rows = load_dataset("json", data_files=str(source), split="train")
        except Exception as error:  # datasets wraps the parser's own message, whatever it was
            reason = error.__cause__ or error
            raise ValueError(f"{source} is not JSON lines, or has no rows: {str(reason) or 'it is empty'}") from None
    elif str(source).endswith((".jsonl", ".json")):
        raise OSError(f"There is no file {source}.")
    else:
        try:
            rows = load_dataset(str(source), split=split)
        except Exception as error:
            raise OSError(f"{source} is neither a file here nor a dataset that could be fetched: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"{source} has no rows to train on.")
    if not {"text", "messages"} & set(rows.column_names):
        raise ValueError(f"{source} needs a column 'text' or 'messages', but has {', '.join(rows.column_names)}.")
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
    return turns


def text_of(row: Mapping[str, Any]) -> str:
    """A row's text, "" if it has none.

    Raises:
        ValueError: it is something else than a text.
    """
    text = row.get("text")
    if not isinstance(text, str | None):
        raise ValueError(f"'text' must be a text, but is {reprlib.repr(text)}.")
    return text or ""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True) -> dict[str, list[int]]:
    """All tokens labelled, the end-of-text token last if the text is `finished`, so that the drafter learns to stop."""
    ids = tokenizer(text)["input_ids"]
    if finished and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": list(ids)}


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Mapping[str, str]], finished: bool = True
) -> dict[str, list[int]]:
    """Assistant turns labelled, with the token that ends them; everything else ignored.

    Args:
        tokenizer: has a chat template.
        messages: from `turns_of`.
        finished: False if the last answer was cut off: then nothing after it is kept.

    Raises:
        ValueError: the tokenizer has no chat template, or one that rewrites earlier turns.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template: train on {'text': …} rows, or set one.")

    def render(turns: list[Mapping[str, str]], generation: bool) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation)

    ids: list[int] = []
    labels: list[int] = []
    text = ""

    def append(until: str, labelled: bool) -> None:
        nonlocal text
        if not until.startswith(text):
            raise ValueError("The chat template rewrites earlier turns, so the assistant's tokens cannot be told apart.")
        piece = tokenizer(until[len(text) :], add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        labels.extend(piece if labelled else [IGNORED] * len(piece))
        text = until

    for count, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            append(render(messages[: count - 1], True), False)
            turn = render(messages[:count], False)
            if count == len(messages) and not finished:
                answer = (message["content"] or "").strip()  # some templates trim
                turn = turn[: turn.rindex(answer) + len(answer)]
            append(turn, True)
    return {"input_ids": ids, "labels": labels}


def encode_rows(rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, num_proc: int | None = None) -> Dataset:
    """Tokenise every row; cut at `max_length`; leave out rows in which nothing is left to learn.

    Returns:
        Columns `input_ids`, `labels` (`labels[t]` belongs to token `t`) and `length`.

    Raises:
        ValueError: no row carries a label, or one is neither a text nor a chat; the message says which.
    """

    def encode(row: dict[str, Any], index: int) -> dict[str, Any]:
        finished = row.get("finished") is not False
        try:
            if row.get("messages"):
                encoded = encode_chat(tokenizer, turns_of(row["messages"]), finished)
            else:
                encoded = encode_text(tokenizer, text_of(row), finished)
        except (ValueError, TemplateError) as error:
            raise ValueError(f"Row {index + 1}: {error}") from None
        encoded = {name: values[:max_length] for name, values in encoded.items()}
        return {**encoded, "length": len(encoded["input_ids"])}

    encoded = rows.map(encode, with_indices=True, remove_columns=rows.column_names, num_proc=num_proc, desc="tokenise")
    kept = encoded.filter(lambda labels: any(label != IGNORED for label in labels[1:]), input_columns="labels", desc="labels")
    if len(kept) == 0:
        raise ValueError(
            f"None of the {len(rows)} rows has a token to learn within max_length={max_length}: "
            "chats need assistant turns, and texts more than one token."
        )
    return kept
