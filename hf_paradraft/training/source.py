"""Rows as people keep them, and their prompts: texts, chats of several conventions, tools,
thoughts; other rows are refused by number.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat import whole_characters
from ..files import parse_json, rows_of

logger = logging.get_logger(__name__)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a turn's thoughts
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
COLUMNS = {"text", "messages", "conversations"}
MANY = 0.5  # of the rows: if a template refuses more of them, it is not the rows that are odd


def load_rows(source: str | Path) -> list[dict[str, Any]]:
    """Load rows of a JSON-lines file, or of a Hub dataset `ID`, `ID:CONFIG` or `ID:CONFIG:SPLIT`.

    A row is `{"text": …}`, `{"messages": […]}` or ShareGPT's `{"conversations": […]}`. It may have
    `tools`, the schemas that the target was shown, and `finished`, false if its last answer was cut
    off and must not be learned to end there. A row of `regenerate` has `ids`, `prompt_tokens` and
    `tokenizer` too: the tokens themselves.

    Raises:
        OSError: there is no such file or dataset.
        ValueError: it is not JSON lines, has no rows, or no column to learn from.
    """
    rows = list(rows_of(source, "train"))
    if not rows:
        raise ValueError(f"{source} is not JSON lines, or has no rows: it is empty.")
    usable = {number: row for number, row in enumerate(rows, 1) if COLUMNS & row.keys()}
    if not usable:
        raise ValueError(
            f"{source} needs a column 'text', 'messages' or 'conversations', but has "
            f"{', '.join(rows[0])}."
        )
    odd = [
        f"Row {number} has none of {', '.join(sorted(COLUMNS))}."
        for number in range(1, len(rows) + 1)
        if number not in usable
    ]
    leave_out(odd, len(rows))
    return [_with_messages(source, number, row) for number, row in usable.items()]


def _with_messages(source: str | Path, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Turn ShareGPT's `conversations` of a row into messages, with its `system` before them.

    Raises:
        ValueError: they are no turns, or of a role that is not known.
    """
    system, chat = row.get("system"), row.get("messages")
    messages: list[Any] = []
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    if chat or not row.get("conversations"):
        return {**row, "messages": [*messages, *chat]} if isinstance(chat, list) else row
    for turn in row["conversations"] if isinstance(row["conversations"], list) else [None]:
        said = turn if isinstance(turn, Mapping) else {}
        role = said.get("role") or SHAREGPT.get(str(said.get("from")))
        content = said.get("value") if said.get("content") is None else said["content"]
        if role is None or (content is None and not said.get("tool_calls")):
            raise ValueError(
                f"{source}, row {number}: a turn of 'conversations' needs 'from' "
                f"({', '.join(SHAREGPT)}) and 'value', but one is {reprlib.repr(turn)}: rewrite it "
                f"as {{'messages': [{{'role': …, 'content': …}}]}}."
            )
        more = {name: value for name, value in said.items() if name not in ("from", "value")}
        messages.append({**more, "role": role, "content": content})
    rest = {
        name: value
        for name, value in row.items()
        if name not in ("conversations", "messages", "system")
    }
    return {"messages": messages, **rest}


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read the schemas of a row's tools, which some sets keep as one JSON text; None: it has none.

    Raises:
        ValueError: they are something else.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = parse_json(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"'tools' must be a list of JSON schemas, but is {reprlib.repr(tools)}.")
    whole_characters(json.dumps(tools, ensure_ascii=False, default=str))
    return tools


def thought_of(turn: Mapping[str, Any]) -> str | None:
    """Read the thoughts before a turn, under any of their names; None if there are none."""
    named = (turn.get(name) for name in THOUGHTS)
    return next((thought for thought in named if isinstance(thought, str) and thought), None)


def turns_of(messages: Any) -> list[dict[str, Any]]:
    """Read the turns of a chat, each with a `role` and its `content` as one text.

    Next to tool calls, `content` may be None. Thoughts of any name stand under the two names that
    templates ask for.

    Raises:
        ValueError: it is no chat, or not one of texts.
    """
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise ValueError(f"'messages' must be a list of turns, but is {reprlib.repr(messages)}.")
    turns = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
        ):
            content = "".join(part["text"] for part in content)
        says_nothing = content is None and bool(message.get("tool_calls"))
        if not (
            isinstance(message.get("role"), str)
            and (isinstance(content, str) or says_nothing)
            and all(isinstance(message.get(name), str | None) for name in THOUGHTS)
        ):
            raise ValueError(
                "A turn needs 'role' and 'content', both texts, and its thoughts are a text or "
                f"none, but this one is {reprlib.repr(dict(message))}."
            )
        thought = thought_of(message)
        thoughts = {} if thought is None else {"reasoning_content": thought, "thinking": thought}
        turns.append({**message, "content": content, **thoughts})
        whole_characters(content or "")
        whole_characters(json.dumps(message, ensure_ascii=False, default=str))
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


def prompts_of(
    source: str | Path, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[dict]:
    """Yield the prompt of each row: a chat's turns before the last answer, or a text's beginning.

    Prompts are `{"messages": turns before the last answer}`, with its tools, or `{"text": its first
    tokens}`.

    Raises:
        ValueError: a row is none of both, or a text where no tokenizer can cut it.
    """
    for count, row in enumerate(load_rows(source), 1):
        try:
            turns, text = turns_of(row["messages"]) if row.get("messages") else [], text_of(row)
            tools = tools_of(row)
        except ValueError as error:
            raise ValueError(f"{source}, row {count}: {error}") from None
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if turns:
            messages = [
                {k: v for k, v in turn.items() if v is not None or k == "content"} for turn in turns
            ]
            yield {"messages": messages, **({} if tools is None else {"tools": tools})}
        elif text and not row.get("messages"):
            if tokenizer is None:
                raise ValueError(
                    f"{source}, row {count}: a server answers conversations, give rows with "
                    "'messages'."
                )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][:prompt_tokens]
            while (begun := tokenizer.decode(ids)).endswith("\ufffd") and len(ids) > 1:
                ids.pop()  # half a character
            yield {"text": begun}


def leave_out(refused: list[str], count: int) -> None:
    """Say how many rows the chat template refuses, and why it refuses the first.

    Args:
        refused: a sentence for each of them.
        count: rows in all.

    Raises:
        ValueError: they are more than half of all rows.
    """
    if len(refused) > MANY * count:
        raise ValueError(f"{len(refused)} of {count} rows cannot be used. {refused[0]}")
    if refused:
        logger.warning("%d of %d rows are left out. %s", len(refused), count, refused[0])
