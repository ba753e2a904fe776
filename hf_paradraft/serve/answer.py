"""One request on its way from the scheduler to its client: its text, finish reason and usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from sys import maxsize
from typing import Any

from fastapi import Request
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from ..chat import end_tokens
from ..decoding.begin import num_logits
from .errors import FAILED, Refusal
from .grammar import Grammar, json_grammar
from .metrics import Metrics, speculation
from .requests import Ask, ChatRequest, CompletionRequest
from .scheduler import Job, News, Scheduler
from .text import Writer
from .tools import ToolForm, ToolReader

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


class Answer:
    """The answer to one request: text as it comes, then its finish reason.

    Args:
        service: the service, which answers it.
        metrics: the counts to which it is added.
        ask: the request.
        job: the encoded request.
        connection: the client's connection, which may be closed.

    Raises:
        Refusal: too many requests wait, or the server ends.
    """

    def __init__(self, service: Service, metrics: Metrics, ask: Ask, job: Job, connection: Request):
        self.service, self.metrics, self.ask, self.job = service, metrics, ask, job
        self.reader = (
            ToolReader(service.tool_form)
            if isinstance(ask, ChatRequest) and ask.wants_tools
            else None
        )
        if job.grammar is not None:
            job.options["logits_processor"] = [job.grammar]
        self.connection, self.begun = connection, time.monotonic()
        self.checked_client = self.begun
        self.reason: Any = ""  # OpenAI's `finish_reason`
        self.writer = Writer(service.tokenizer, [*ask.stops, *service.stops], job.ids)
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        job.tell = self._tell
        service.scheduler.submit(job)

    async def begin(self) -> None:
        """Wait for the first tokens, so that an error before them has its own HTTP status.

        Raises:
            Refusal: the request cannot be served or took too long, or its client has gone.
        """
        try:
            self.first = await self._next()
        except BaseException:
            self._close()
            raise

    async def deltas(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the answer as OpenAI's deltas, as it comes, and set `reason` after the last.

        Raises:
            Refusal: as in `begin`.
        """
        news = self.first
        try:
            while True:
                text = self.writer.push(news.tokens)
                if self.writer.stopped:
                    self.reason = "stop"
                elif news.over:
                    text += self.writer.end()
                    limit = self.job.options["max_new_tokens"]
                    ended = self.writer.count < limit or news.tokens[-1] in self.job.ends
                    self.reason = "stop" if ended else "length"
                if self.reader is not None:
                    for delta in self.reader.push(text, bool(self.reason)):
                        yield delta
                    if self.reason == "stop" and self.reader.num_calls:
                        self.reason = "tool_calls"
                elif text:
                    yield {"content": text}
                if self.reason:
                    return
                news = await self._next()
        finally:
            self._close()

    def _close(self) -> None:
        self.service.scheduler.cancel(self.job)
        self.metrics.count(self.job, self.reason or "abort", time.monotonic() - self.begun)

    def _tell(self, news: News) -> None:
        with suppress(RuntimeError):  # the loop is closed: the client has gone
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)

    async def _next(self) -> News:
        """Wait for news, and check now and then whether the client is still there."""
        while True:
            now = time.monotonic()
            if now - self.begun >= self.service.seconds:
                raise Refusal(
                    504,
                    f"The request took longer than {self.service.seconds:.0f} seconds.",
                    "timeout",
                )
            if now - self.checked_client > CLIENT_SECONDS:
                self.checked_client = now
                if await self.connection.is_disconnected():
                    raise Refusal(499, "The client has gone.", "client_closed_request")
            with suppress(TimeoutError):
                news = await asyncio.wait_for(self.news.get(), CLIENT_SECONDS)
                break
        if isinstance(news.error, Refusal):
            raise news.error
        if isinstance(news.error, ValueError):
            raise Refusal(400, str(news.error))
        if news.error is not None:
            raise Refusal(500, FAILED)
        if news.tokens and not self.writer.count:
            self.metrics.first_token.observe(time.monotonic() - self.begun)
        return news

    @property
    def counts(self) -> dict[str, Any]:
        """The request's usage in tokens, and the counts of its drafts.

        Cached tokens of the prompt, and accepted and rejected drafts, are counted in addition.
        """
        stats, given, made = self.job.stats, len(self.job.ids), self.writer.count
        accepted = min(sum(stats.successes), made)  # more may have come after the end of the text
        usage = {
            "prompt_tokens": given,
            "completion_tokens": made,
            "total_tokens": given + made,
            "prompt_tokens_details": {"cached_tokens": self.job.known},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": stats.num_drafted - accepted,
            },
        }
        return {"usage": usage, "metrics": {"speculative_decoding": speculation(stats)}}
