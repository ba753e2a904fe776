"""Requests in OpenAI's form: each field is obeyed, or refused by its name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceParam,
)
from openai.types.shared_params import (
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from ..chat import encode_chat_prompt, whole_characters

MIN_TEMPERATURE = 1e-3  # a lower one overflows logits
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]  # only the first wrong item is reported


def _drop_nulls(part: Any) -> Any:
    """Leave out nulls outside of schemas, and `index` in lists: some clients send them."""
    if isinstance(part, list):
        return [_drop_nulls(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if value is not None and name != "index"}
    return {
        name: value if name in ("parameters", "schema") else _drop_nulls(value)
        for name, value in kept.items()
    }


class Strict(BaseModel):
    """A base class of bodies that refuses unknown fields.

    A null is as if not sent, and so is [] or {} for a field of `MAY_BE_EMPTY` or an
    unknown one.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = cls.model_fields.keys()
        sent = {
            name: value
            for name, value in fields.items()
            if value is not None and (value not in ([], {}) or name in known - MAY_BE_EMPTY)
        }
        unknown = next((name for name in sent if name not in known), None)  # one is reported
        return {name: sent[name] for name in sent if name in known or name == unknown}


MAY_BE_EMPTY = {
    "stop", "stream_options", "speculation", "prediction", "metadata", "response_format", "tools",
    "tool_calls",
}  # fmt: skip


SAMPLING = "temperature", "top_p", "top_k", "min_p"  # the options of sampling


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Parts = Annotated[ListOf[TextPart], Field(max_length=1024)]


class Content(Strict):
    """Text, in one piece or several."""

    content: str | Parts

    @property
    def text(self) -> str:
        """Join the parts."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class Message(Content):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[
        ListOf[ChatCompletionMessageFunctionToolCallParam], BeforeValidator(_drop_nulls)
    ] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("it has no content")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        turn["content"] = whole_characters(self.text)
        if self.reasoning_content is not None:
            turn["reasoning_content"] = turn["thinking"] = whole_characters(self.reasoning_content)
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.loads(call["function"]["arguments"] or "{}"),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class Prediction(Content):
    """A text that the answer may repeat."""

    type: Literal["content"] = "content"

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode the predicted text."""
        return tokenizer(whole_characters(self.text), add_special_tokens=False)["input_ids"]


class StreamOptions(Strict):
    """Additions to a stream's text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Speculation(Strict):
    """The request's option to turn drafting off."""

    enabled: bool = True


Single = Annotated[int, Field(ge=1, le=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class Ask(Strict):
    """Fields of both kinds of request."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: PositiveInt | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[ListOf[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()
    prediction: Prediction | None = None
    n: Single = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    user: str | None = None  # these make no difference to an answer
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False

    @field_validator("temperature")
    @classmethod
    def _sane(cls, temperature: float | None) -> float | None:
        if temperature and temperature < MIN_TEMPERATURE:
            raise ValueError(f"a temperature is 0, which is greedy, or at least {MIN_TEMPERATURE}")
        return temperature

    @property
    def stops(self) -> list[str]:
        """List the texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """The most new tokens that the client wants."""
        return self.max_tokens

    def options(self) -> dict[str, Any]:
        """Make the arguments of `generate` from the fields that were sent.

        Others keep the values of the target's generation config.
        """
        said = self.model_dump(include={*SAMPLING, "repetition_penalty"}, exclude_none=True)
        if self.temperature == 0:
            return {**said, **dict.fromkeys(SAMPLING), "do_sample": False}
        return {**said, "do_sample": True} if said.keys() & {*SAMPLING} else said


AnswerForm = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema


class ChatRequest(Ask):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: Literal[False] = False
    response_format: Annotated[
        AnswerForm, Field(discriminator="type"), BeforeValidator(_drop_nulls)
    ] = {"type": "text"}
    tools: Annotated[
        ListOf[ChatCompletionFunctionToolParam], Field(max_length=128), BeforeValidator(_drop_nulls)
    ] = []
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam = "auto"
    parallel_tool_calls: bool = True

    @property
    def limit(self) -> int | None:
        """The most new tokens that the client wants; `max_tokens` is the older name."""
        return self.max_completion_tokens or self.max_tokens

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode the conversation, up to where the answer begins."""
        turns = [message.turn for message in self.messages]
        return encode_chat_prompt(tokenizer, turns, self.offered or None)

    @property
    def offered(self) -> list[Any]:
        """List the tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def wants_tools(self) -> bool:
        """Whether the answer is read for tool calls, even if no tools are offered."""
        return bool(self.offered) or self.tool_choice not in ("none", "auto")

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: it is text."""
        form: Any = self.response_format
        schema = form.get("json_schema", {"schema": {"type": "object"}}).get("schema", {})
        return None if form["type"] == "text" else schema


class CompletionRequest(Ask):
    """The body of `/v1/completions`."""

    prompt: str | ListOf[str] | ListOf[NonNegativeInt] | ListOf[ListOf[NonNegativeInt]]
    echo: Literal[False] = False
    best_of: Single = 1

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode the prompt.

        Raises:
            ValueError: there are several prompts.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError(
                    "prompt: one text a request is served here, for n is 1: send several requests "
                    "at a time."
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = tokenizer(whole_characters(prompt))["input_ids"]
        return prompt
