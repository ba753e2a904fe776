"""Chats as tokens, and tokens as text, the same way in training, benchmarks and serving."""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from torch import LongTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria
from transformers.utils import logging

logger = logging.get_logger(__name__)
BEFORE = 64  # tokens of a prompt that are decoded with its answer
HALF = "\ufffd"  # the end of a text that ends in half a character
_want_parts: dict[str, bool] = {}  # by chat template
PROBE = "paradraftprobe"  # no template has it


class RefusedTurns(ValueError):
    """A conversation that the chat template refuses: its turns do not alternate, say."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    opened: bool,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render a conversation as text, by the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the turns of the conversation.
        opened: whether to begin the assistant's next turn.
        tools: JSON schemas of the tools that the model was offered.

    Raises:
        ValueError: the tokenizer has no chat template.
        RefusedTurns: the template refuses these turns.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template: use {'text': …} rows, or set one.")
    if _wants_parts(tokenizer):
        messages = [_in_parts(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opened
        )
    except (TemplateError, TypeError) as error:  # a template may add values that are no text
        raise RefusedTurns(f"The chat template refuses {reprlib.repr(messages)}: {error}") from None


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn with its text as a list of one part."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def _wants_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a template shows a turn's text only if it comes as a list of parts.

    SmolVLM's template does so.
    """

    def shows(turn: Mapping[str, Any]) -> bool:
        with suppress(Exception):  # a template may raise anything
            return PROBE in tokenizer.apply_chat_template([turn], tokenize=False)
        return False

    template, turn = str(tokenizer.chat_template), {"role": "user", "content": PROBE}
    if template not in _want_parts:
        _want_parts[template] = not shows(turn) and shows(_in_parts(turn))
    return _want_parts[template]


def whole_characters(text: str) -> str:
    """Return a text unchanged, or refuse it if it has half a character (a lone surrogate).

    Raises:
        ValueError: the text has half a character, which JSON may hold but no tokenizer reads.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text has half a character at place {error.start}: {reprlib.repr(text)}."
        ) from None
    return text


def encode_chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Encode a conversation up to the place where the answer begins.

    Without a chat template its texts are encoded, with a warning.
    """
    if tokenizer.chat_template is None:
        logger.warning_once(
            "The tokenizer has no chat template: the model reads prompts as bare text, to which a "
            "chat model answers badly. If it is one, set the chat template that it was trained "
            "with."
        )
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    return tokenizer(render_chat(tokenizer, messages, True, tools), add_special_tokens=False)[
        "input_ids"
    ]


def sampling(temperature: float) -> dict[str, Any]:
    """Make the arguments of `generate` for a temperature; 0 is greedy."""
    return (
        {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    )


def stopping(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Make the arguments of `generate` that a model's own stop strings need.

    A custom loop does not get a tokenizer from `generate`.
    """
    if not (strings := model.generation_config.stop_strings):
        return {}
    criterion = StopStringCriteria(tokenizer, strings)
    return {"stop_strings": None, "stopping_criteria": [criterion]}


def encode_question(tokenizer: PreTrainedTokenizerBase, text: str) -> LongTensor:
    """Encode a conversation of one turn, up to where the answer begins: int64 `(1, n)`."""
    return LongTensor([encode_chat_prompt(tokenizer, [{"role": "user", "content": text}])])


def learned_context(model: PreTrainedModel) -> int | None:
    """Look up the number of tokens that a model has learned position embeddings for.

    It is None if longer texts can be read.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    words = model.get_input_embeddings()
    tables = [
        part
        for part in model.modules()
        if isinstance(part, torch.nn.Embedding) and part is not words
    ]
    return (
        context
        if any(0 <= table.num_embeddings - (context or 0) <= 2 for table in tables)
        else None
    )


def check_room(model: PreTrainedModel, tokens: int, new: int) -> None:
    """Refuse a prompt that leaves too little of a model's context for its answer.

    Raises:
        ValueError: prompt and answer exceed the context.
    """
    context = learned_context(model)
    if context is not None and tokens + new > context:
        raise ValueError(
            f"A prompt of {tokens} tokens with up to {new} new ones has no place in the target's "
            f"context of {context}: shorten one of both."
        )


def end_tokens(model: PreTrainedModel) -> list[int]:
    """List the ids that end a model's text."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def until_end(ids: list[int], ends: Collection[int]) -> tuple[list[int], bool]:
    """Cut new tokens off after the first that ends them, and tell whether there is one."""
    last = next((index for index, token in enumerate(ids) if token in ends), None)
    return (ids, False) if last is None else (ids[: last + 1], True)


def text_after(tokenizer: PreTrainedTokenizerBase, prompt: list[int], ids: list[int]) -> str:
    """Decode the text that new tokens add to a prompt's text.

    Some tokenizers decode the first tokens of a text differently, so the prompt is decoded with
    them.
    """
    given, whole = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, [*prompt, *ids])
    )
    return (
        whole[len(given) :]
        if whole.startswith(given)
        else tokenizer.decode(ids, skip_special_tokens=True)
    )


class Detokeniser:
    """A decoder of tokens as they come, into whole characters and without special tokens.

    Args:
        tokenizer: the target's tokenizer.
        prompt: the prompt's tokens.

    Attributes:
        ids: the tokens after the last piece of text, and before them the `known` ones of that
            piece, without which some tokenizers decode the others differently.
        shown: the text of the known tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._keep(list(prompt[-BEFORE:]))
        if self.shown.endswith(HALF):  # a prompt's half character is never shown
            self._keep([])

    def _keep(self, ids: list[int]) -> None:
        """Keep only the tokens of the last piece."""
        self.ids, self.known, self.shown = ids, len(ids), self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Decode the text that the next token adds: "" for half a character.

        The whole character comes with its other half.
        """
        self.ids.append(token)
        text = self._decode(self.ids)
        new = "" if text.endswith(HALF) else text[len(self.shown) :]
        if new:
            self._keep(self.ids[self.known :])
        return new

    def rest(self) -> str:
        """Decode half a character at the end as `decode` does."""
        return self._decode(self.ids)[len(self.shown) :]
