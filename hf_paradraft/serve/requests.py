"""Requests in OpenAI's words: each field is obeyed, or refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from ..chat import encode_chat_prompt, whole_characters

LEAST = 1e-3  # a temperature below it overflows logits


class Strict(BaseModel):
    """Fields that are not listed are refused; null, and [] or {} in the place of no number or text, are as if not sent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        empty = {name for name, value in fields.items() if value in ([], {}) and name not in cls.model_fields.keys() - PARTS}
        return {name: value for name, value in fields.items() if name in KEPT or (value is not None and name not in empty)}


KEPT = ("messages", "prompt", "content")  # empty ones are an error of their own
PARTS = {"stop", "stream_options", "speculation", "prediction", "metadata", "response_format"}  # fields that may be empty


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Join the parts of its content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Prediction(Strict):
    """A text that the answer may repeat."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """Join the parts of its content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode it."""
        return tokenizer(whole_characters(self.text), add_special_tokens=False)["input_ids"]


class StreamOptions(Strict):
    """Additions to a stream's text."""

    include_usage: Annotated[bool, Field(strict=True)] = False
    include_obfuscation: Literal[False] = False


class Speculation(Strict):
    """The choice whether a request is drafted for."""

    enabled: Annotated[bool, Field(strict=True)] = True


class ResponseFormat(Strict):
    """The form of an answer: text."""

    type: Literal["text"]


class Ask(Strict):
    """Fields of both kinds of request."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[int, Field(ge=1, strict=True)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, strict=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: Annotated[bool, Field(strict=True)] = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()
    prediction: Prediction | None = None
    n: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    user: str | None = None  # these make no difference to an answer
    metadata: dict[str, Any] | None = None
    store: Literal[False] = False

    @field_validator("temperature")
    @classmethod
    def _sane(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < LEAST:
            raise ValueError(f"a temperature is 0, which is greedy, or at least {LEAST}")
        return temperature

    @field_validator("stop")
    @classmethod
    def _says_something(cls, stop: Any) -> Any:
        if "" in ([stop] if isinstance(stop, str) else stop or []):
            raise ValueError("an empty text would stop every answer")
        return stop

    @property
    def stops(self) -> list[str]:
        """List the texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """How many tokens the client wants at most."""
        return self.max_tokens

    def options(self) -> dict[str, Any]:
        """Make the arguments of `generate`; what is not said is as the target's generation config has it."""
        if self.temperature == 0:
            rules: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            rules = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            rules = {name: value for name, value in rules.items() if value is not None}
            if rules:
                rules["do_sample"] = True
        if self.repetition_penalty is not None:
            rules["repetition_penalty"] = self.repetition_penalty
        return rules


class ChatRequest(Ask):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    logprobs: Literal[False] = False
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto"] | None = None  # of no tools

    @property
    def limit(self) -> int | None:
        """How many tokens the client wants at most; `max_tokens` is the older name."""
        return self.max_completion_tokens or self.max_tokens

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode the conversation, up to where the answer begins.

        Raises:
            ValueError: there is nothing in it.
        """
        turns = []
        for turn in self.messages:
            turns.append({"role": "system" if turn.role == "developer" else turn.role, "content": whole_characters(turn.text)})
            if turn.reasoning_content is not None:
                turns[-1]["reasoning_content"] = turns[-1]["thinking"] = whole_characters(turn.reasoning_content)
        if not (ids := encode_chat_prompt(tokenizer, turns)):
            raise ValueError("messages: the text is empty.")
        return ids


class CompletionRequest(Ask):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Encode the prompt.

        Raises:
            ValueError: there are several, or none; or ids that the tokenizer does not have.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError("prompt: one text a request is served here, for n is 1: send several requests at a time.")
            prompt = prompt[0]
        if isinstance(prompt, str):
            prompt = tokenizer(whole_characters(prompt))["input_ids"]
        if not prompt:
            raise ValueError("prompt: the text is empty.")
        if not all(0 <= token < len(tokenizer) for token in prompt):
            raise ValueError(f"prompt: ids of the tokenizer are wanted, from 0 to {len(tokenizer) - 1}.")
        return prompt
