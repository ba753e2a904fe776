"""One request on its way from the scheduler to its client: its text, finish reason and usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from sys import maxsize
from typing import Any, NamedTuple

from fastapi import Request
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from ..chat import end_tokens
from ..decoding.begin import num_logits
from .errors import Refusal, refusal_of
from .grammar import Grammar, ToolForm, json_grammar
from .metrics import Metrics, speculation
from .requests import Ask, ChatRequest, CompletionRequest
from .scheduler import Job, News, Scheduler
from .text import ToolReader, Writer

DEFAULT_NEW_TOKENS = 4096  # tokens of an answer whose request sets no limit
# options of a generation config that a request's own fields replace
ONE_TEXT = {
    "num_return_sequences": 1,
    "num_beams": 1,
    "stop_strings": None,
    "max_time": None,
    "use_cache": True,
}
CLIENT_SECONDS = 0.2  # seconds between two looks at whether a client is still there


@dataclass
class Service:
    """The endpoint's model, and its limits.

    Attributes:
        scheduler: the scheduler, which answers.
        tokenizer: the target's tokenizer.
        name: the model's name for clients.
        api_key: the key that clients have to send; None: none.
        seconds: the most seconds of one request.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase
    name: str
    api_key: str | None = None
    seconds: float = 600.0

    @cached_property
    def metrics(self) -> Metrics:
        """The counts for Prometheus."""
        return Metrics(self.scheduler)

    @cached_property
    def context(self) -> int:
        """The most tokens of prompt and answer."""
        text = self.scheduler.target.config.get_text_config()
        return getattr(text, "max_position_embeddings", None) or maxsize

    @cached_property
    def stops(self) -> list[str]:
        """The texts that end every answer, from the target's generation config."""
        stops = self.scheduler.target.generation_config.stop_strings or []
        return [stops] if isinstance(stops, str) else stops

    @cached_property
    def longest_token(self) -> int:
        """The length of the vocabulary's longest token, in characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer in the form that grammars need."""
        target = self.scheduler.target
        return from_tokenizer(self.tokenizer, num_logits(target), end_tokens(target) or None)

    @cached_property
    def tool_form(self) -> ToolForm:
        """The form in which the model calls tools."""
        return ToolForm.of_template(self.tokenizer)

    def grammar(self, ask: ChatRequest) -> Grammar:
        """Make the grammar of an answer.

        Raises:
            Refusal: it cannot be followed.
        """
        param = "tools" if ask.wants_tools else "response_format"
        try:
            grammar = (
                self.tool_form.grammar(ask) if ask.wants_tools else json_grammar(ask.answer_schema)
            )
            return Grammar(self.grammar_tokenizer, grammar)
        except ValueError as error:
            raise Refusal(400, str(error), param=param) from error

    def read(self, ask: ChatRequest | CompletionRequest) -> Job:
        """Encode a request, and set its options for `generate`.

        Raises:
            Refusal: a part cannot be encoded, or the prompt is too long.
        """
        param = "messages" if isinstance(ask, ChatRequest) else "prompt"
        too_long = Refusal(
            400,
            f"The prompt is longer than the model's context of {self.context} tokens: shorten it.",
            "context_length_exceeded",
            param,
        )
        try:
            text = ask.model_dump_json(include={"messages", "prompt", "tools"})
            if len(text) > self.context * self.longest_token:
                raise too_long
            job = Job(
                ask.ids(self.tokenizer),
                ask.options(),
                seed=ask.seed,
                drafts=ask.speculation.enabled,
            )
            if not job.ids:
                raise ValueError(f"{param}: the text is empty.")
            if (room := self.context - len(job.ids)) < 1:
                raise too_long
            if ask.prediction is not None:
                param = "prediction"
                # an answer is no longer
                job.prediction = ask.prediction.ids(self.tokenizer)[: self.context]
        except (TypeError, ValueError) as error:  # a lone surrogate raises either
            raise Refusal(400, str(error), param=param) from error
        rows = self.scheduler.target.get_input_embeddings().weight.shape[0]
        if (largest := max([*job.ids, *(job.prediction or [])])) >= rows:
            raise Refusal(
                400, f"The text has the token {largest}, and the model knows {rows}: leave it out."
            )
        job.options |= {
            **ONE_TEXT,
            "max_new_tokens": min(ask.limit or DEFAULT_NEW_TOKENS, room),
            "pad_token_id": self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
        }
        return job


class Part(NamedTuple):
    """A part of an answer in OpenAI's form.

    Attributes:
        delta: the addition to the message.
        reason: the `finish_reason` of the last part; None before.
        counts: the usage in tokens and the counts of drafts, of the last part; None before.
    """

    delta: dict[str, Any]
    reason: str | None = None
    counts: dict[str, Any] | None = None


async def answer(service: Service, ask: Ask, job: Job, connection: Request) -> AsyncGenerator[Part]:
    """Yield the parts of the answer to one request, as they come.

    The first part has no text. It comes with the first tokens, so that an error before them can
    have its own HTTP status.

    Args:
        service: the service, which answers it.
        ask: the request.
        job: the encoded request.
        connection: the client's connection, which may be closed.

    Raises:
        Refusal: too many requests wait, the server ends, the request cannot be served or took too
            long, or its client has gone.
    """
    begun, loop, told = time.monotonic(), asyncio.get_running_loop(), asyncio.Queue[News]()
    calls_tools = isinstance(ask, ChatRequest) and ask.wants_tools
    reader = ToolReader(service.tool_form) if calls_tools else None
    writer = Writer(service.tokenizer, [*ask.stops, *service.stops], job.ids)
    reason = ""

    def tell(news: News) -> None:
        with suppress(RuntimeError):  # the loop is closed: the client has gone
            loop.call_soon_threadsafe(told.put_nowait, news)

    job.tell = tell
    service.scheduler.submit(job)
    try:
        async for news in _news(told, connection, service.seconds):
            if not writer.count:
                service.metrics.first_token.observe(time.monotonic() - begun)
                yield Part({"role": "assistant", "content": ""})
            text = writer.push(news.tokens)
            if writer.stopped:
                reason = "stop"
            elif news.over:
                text += writer.end()
                limit = job.options["max_new_tokens"]
                ended = writer.count < limit or news.tokens[-1] in job.ends
                reason = "stop" if ended else "length"
            if reader is not None:
                for delta in reader.push(text, bool(reason)):
                    yield Part(delta)
                if reason == "stop" and reader.num_calls:
                    reason = "tool_calls"
            elif text:
                yield Part({"content": text})
            if reason:
                yield Part({}, reason, _counts(job, writer.count))
                return
    finally:
        service.scheduler.cancel(job)
        service.metrics.count(job, reason or "abort", time.monotonic() - begun)


async def _news(
    told: asyncio.Queue[News], connection: Request, seconds: float
) -> AsyncGenerator[News]:
    """Yield news of a request, and check now and then whether the client is still there.

    Raises:
        Refusal: as in `answer`.
    """
    begun = checked = time.monotonic()
    while True:
        now = time.monotonic()
        if now - begun >= seconds:
            raise Refusal(504, f"The request took longer than {seconds:.0f} seconds.", "timeout")
        if now - checked > CLIENT_SECONDS:
            checked = now
            if await connection.is_disconnected():
                raise Refusal(499, "The client has gone.", "client_closed_request")
        try:
            news = await asyncio.wait_for(told.get(), CLIENT_SECONDS)
        except TimeoutError:
            continue
        if isinstance(news.error, ValueError):
            raise Refusal(400, str(news.error))
        if news.error is not None:
            raise refusal_of(news.error)
        yield news


def _counts(job: Job, made: int) -> dict[str, Any]:
    """Count a request's usage in tokens, and its drafts.

    Cached tokens of the prompt, and accepted and rejected drafts, are counted in addition.

    Args:
        job: the request.
        made: the number of new tokens that were read.
    """
    stats, given = job.stats, len(job.ids)
    accepted = min(sum(stats.successes), made)  # more may have come after the end of the text
    usage = {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": given + made,
        "prompt_tokens_details": {"cached_tokens": job.known},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": stats.num_drafted - accepted,
        },
    }
    return {"usage": usage, "metrics": {"speculative_decoding": speculation(stats)}}
