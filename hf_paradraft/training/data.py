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
from transformers.utils import logging

from ..chat import RefusedTurns, render_chat, whole_characters
from ..files import rows_of

logger = logging.get_logger(__name__)
IGNORED = -100
ANSWER = "paradraftanswer"  # no template has it
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what a turn's thoughts are called
OPENS, CLOSES = "<think>", "</think>"  # around thoughts, where a template has no place for them
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
COLUMNS = {"text", "messages", "conversations"}
MANY = 0.5  # of the rows: if a template refuses more of them, it is not the rows that are odd


def load_rows(source: str | Path) -> list[dict[str, Any]]:
    """Load rows of a JSON-lines file, or of a Hub dataset `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT`.

    A row is `{"text": …}`, `{"messages": […]}` or ShareGPT's `{"conversations": […]}`. It may have `tools`, the schemas that the
    target was shown, and `finished`, false if its last answer was cut off and must not be learned to end there. A row of
    `regenerate` has `ids`, `prompt_tokens` and `tokenizer` too: the tokens themselves.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: it is not JSON lines, has no rows, or no column to learn from.
    """
    rows = list(rows_of(source, "train"))
    if not rows:
        raise ValueError(f"{source} is not JSON lines, or has no rows: it is empty.")
    if not any(COLUMNS & row.keys() for row in rows):
        raise ValueError(f"{source} needs a column 'text', 'messages' or 'conversations', but has {', '.join(rows[0])}.")
    odd = [
        f"Row {number} has none of {', '.join(sorted(COLUMNS))}."
        for number, row in enumerate(rows, 1)
        if not COLUMNS & row.keys()
    ]
    leave_out(odd, len(rows))
    return [_with_messages(source, number, row) for number, row in enumerate(rows, 1) if COLUMNS & row.keys()]


def _with_messages(source: str | Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Turn ShareGPT's `conversations` of a row into messages.

    Raises:
        ValueError: they are no turns, or of somebody that is not known.
    """
    if row.get("messages") or not row.get("conversations"):
        return row
    messages = []
    for turn in row["conversations"] if isinstance(row["conversations"], list) else [None]:
        said = turn if isinstance(turn, Mapping) else {}
        role, content = said.get("role", SHAREGPT.get(said.get("from"))), said.get("content", said.get("value"))
        if role is None or content is None:
            raise ValueError(
                f"{source}, row {number}: a turn of 'conversations' needs 'from' ({', '.join(SHAREGPT)}) and 'value', but one is "
                f"{reprlib.repr(turn)}: rewrite it as {{'messages': [{{'role': …, 'content': …}}]}}."
            )
        messages.append({"role": role, "content": content})
    rest = {name: value for name, value in row.items() if name not in ("conversations", "messages")}
    return {"messages": messages, **rest}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read the schemas of a row's tools, which some sets keep as one JSON text; None: it has none.

    Raises:
        ValueError: they are something else.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = row["tools"]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"'tools' must be a list of JSON schemas, but is {reprlib.repr(tools)}.")
    whole_characters(json.dumps(tools, ensure_ascii=False, default=str))
    return tools


def turns_of(messages: Any) -> list[dict[str, Any]]:
    """Read the turns of a chat, each with a `role` and its `content` as one text, or None next to tool calls.

    Thoughts, whatever a set calls them, stand under the two names that templates ask for.

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
        thought = next((message[name] for name in THOUGHTS if isinstance(message.get(name), str) and message[name]), None)
        thoughts = {} if thought is None else {"reasoning_content": thought, "thinking": thought}
        turns.append({**message, "content": content, **thoughts})
        for part in (content or "", thought or "", json.dumps(message, ensure_ascii=False, default=str)):
            whole_characters(part)
    return turns


def text_of(row: Mapping[str, Any]) -> str:
    """Read the text of a row; "" if it has none.

    Raises:
        ValueError: it is something else than a text.
    """
    text = row.get("text")
    if not isinstance(text, str | None):
        raise ValueError(f"'text' must be a text, but is {reprlib.repr(text)}.")
    return whole_characters(text or "")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, finished: bool = True) -> dict[str, list[int]]:
    """Tokenise and label a whole text, the end-of-text token last if it is `finished`, so that the drafter learns to stop."""
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

    The last answer stands as it is after what opens its turn, whatever the template would make of it: some leave out what was
    thought, or put an empty thought in front. Thoughts next to it stand before it as the template shows them. Where a template
    rewrites earlier turns, only what follows is learned.

    Args:
        tokenizer: has a chat template.
        messages: from `turns_of`.
        finished: False if the last answer was cut off: then nothing after it is kept.
        tools: from `tools_of`.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show answers.
        RefusedTurns: it refuses these turns.
    """
    ids: list[int] = []
    labels: list[int] = []
    text = ""

    def append(more: str, labelled: bool) -> None:
        nonlocal text
        # As the end of the text, if that leaves the tokens before alone: some tokenizers put a space before what begins a text.
        whole = tokenizer(text + more, add_special_tokens=False)["input_ids"]
        piece = whole[len(ids) :] if whole[: len(ids)] == ids else tokenizer(more, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        labels.extend(piece if labelled else [IGNORED] * len(piece))
        text += more

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = _opened(tokenizer, messages[: index + 1], tools)
        if not opened.startswith(text):
            ids, labels, text = [], [], ""
        append(opened[len(text) :], False)
        if index + 1 == len(messages) and not message.get("tool_calls"):
            closing = _around(tokenizer, messages, tools)[1] if finished else ""
            append(_answer(tokenizer, messages, opened, tools) + closing, True)
        elif (turn := render_chat(tokenizer, messages[: index + 1], False, tools)).startswith(opened):
            append(turn[len(opened) :], True)
    return {"input_ids": ids, "labels": labels}


def _opened(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Render everything before the last turn's answer; templates render no empty conversation, so a first turn is cut."""
    if len(messages) > 1:
        return render_chat(tokenizer, messages[:-1], True, tools)
    return _around(tokenizer, messages, tools)[0]


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], opened: str, tools: list[dict[str, Any]] | None
) -> str:
    """Render what the target wrote in the last turn: thoughts, if there are some, and the answer."""
    *before, last = messages
    thought, content = last.get("reasoning_content"), last["content"] or ""
    if thought is None:
        if content.lstrip().startswith(OPENS) and opened.rstrip().endswith(OPENS):
            logger.warning_once(
                f"Answers begin with {OPENS}, which the chat template has opened already: they are learned with both, as "
                f"they stand. If the target writes it once, take it off the rows, or put thoughts under {THOUGHTS[0]}."
            )
        return content
    shown = render_chat(tokenizer, [*before, {**last, "content": ANSWER}], False, tools)
    if shown.startswith(opened) and thought.strip() in (begun := shown[len(opened) :].rpartition(ANSWER)[0]):
        return begun + content
    opening = "" if opened.rstrip().endswith(OPENS) else f"{OPENS}\n"
    return f"{opening}{thought}\n{CLOSES}\n\n{content}"


def _around(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[str, str]:
    """Render what a template puts before the last answer, and after it."""
    *before, last = messages
    bare = {name: value for name, value in last.items() if name not in THOUGHTS}
    shown = render_chat(tokenizer, [*before, {**bare, "content": ANSWER}], False, tools)
    if ANSWER not in shown:
        raise ValueError("The chat template does not show the assistant's answer, so it cannot be learned.")
    head, _, tail = shown.rpartition(ANSWER)
    return head, tail


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer's vocabulary, to tell apart tokenizers whose ids mean other tokens."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def encode_written(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Read the tokens that the target wrote from a row of `regenerate`; the prompt of a chat carries no labels.

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
    refused: list[str] = []
    count, ours = 0, tokenizer_hash(tokenizer)
    for count, row in enumerate(tqdm(rows, desc="tokenise", unit="rows", leave=False), 1):
        try:
            if row.get("finished") not in (True, False, None):
                raise ValueError(f"'finished' must be true or false, but is {reprlib.repr(row['finished'])}.")
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
    if (empty := count - len(refused) - len(samples)) and samples:
        logger.warning("%d of %d rows have no token to learn within max_length=%d: left out.", empty, count, max_length)
    if not samples:
        raise ValueError(
            f"None of the {count} rows has a token to learn within max_length={max_length}: "
            "chats need assistant turns, and texts more than one token."
        )
    numbers = Sequence(Value("int32"))
    return Dataset.from_list(samples, Features({"input_ids": numbers, "labels": numbers, "length": Value("int32")}))


def leave_out(refused: list[str], count: int) -> None:
    """Say how many rows the chat template refuses, and what is wrong with the first.

    Args:
        refused: a sentence for each of them.
        count: rows in all.

    Raises:
        ValueError: they are more than half of all rows.
    """
    if len(refused) > MANY * count:
        raise ValueError(refused[0] if count == 1 else f"{len(refused)} of {count} rows cannot be used. {refused[0]}")
    if refused:
        logger.warning("%d of %d rows are left out. %s", len(refused), count, refused[0])
