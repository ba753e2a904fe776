"""One request on its way from the scheduler to its client: text round by round, its end, and what it has used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails
from transformers import PreTrainedTokenizerBase

from .errors import FAILED, Refusal
from .metrics import Metrics
from .requests import Ask, ChatRequest
from .scheduler import Job, News, QueueFull, Scheduler, Stopped
from .text import Writer

MOST_NEW = 4096  # tokens of an answer whose request does not say how many
# What a generation config may say of calls, and a request has its own word for.
ONE_TEXT = {"num_return_sequences": 1, "num_beams": 1, "stop_strings": None, "max_time": None, "use_cache": True}
POLL = 0.2  # seconds between two looks at whether a client is still there


@dataclass
class Service:
    """The endpoint's model, and its limits.

    Attributes:
        scheduler: answers.
        tokenizer: the target's.
        name: of the model, for clients.
        context: tokens of prompt and answer at most; None: any number.
        stops: texts that end every answer, as the target's generation config has them.
        api_key: that clients have to send; None: none.
        seconds: for one request, at most.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase
    name: str
    context: int | None
    stops: Sequence[str] = ()
    api_key: str | None = None
    seconds: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))


class Answer:
    """One request on its way: text as it comes, then why it ended.

    Args:
        service: answers it.
        metrics: count it.
        ask: the request.
        ids: its prompt.
        prediction: ids that the answer may repeat; None: not known.
        connection: the client's, which may be gone.
    """

    def __init__(
        self, service: Service, metrics: Metrics, ask: Ask, ids: list[int], prediction: list[int] | None, connection: Request
    ):
        self.service, self.metrics, self.connection = service, metrics, connection
        self.begun = self.looked = time.monotonic()
        self.prompt_tokens = len(ids)
        self.reason: Any = ""  # why it ended, in OpenAI's words
        self.writer = Writer(service.tokenizer, [*ask.stops, *service.stops], ids)
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        rows = service.scheduler.target.get_input_embeddings().weight.shape[0]
        if (largest := max([*ids, *(prediction or [])])) >= rows:
            raise Refusal(400, f"The text has the token {largest}, and the model knows {rows}: leave it out.")
        room = MOST_NEW if service.context is None else service.context - len(ids)
        if room < 1:
            raise Refusal(
                400,
                f"The prompt has {len(ids)} tokens, and the model's context is {service.context}: shorten it.",
                "context_length_exceeded",
                "messages" if isinstance(ask, ChatRequest) else "prompt",
            )
        options = {
            **ONE_TEXT,
            "max_new_tokens": min(ask.limit or MOST_NEW, room),
            "pad_token_id": service.tokenizer.pad_token_id or service.tokenizer.eos_token_id or 0,
            **ask.options(),
        }
        self.job = Job(ids, options, self._tell, ask.seed, ask.speculation.enabled, prediction)
        try:
            service.scheduler.submit(self.job)
        except QueueFull as error:
            raise Refusal(429, str(error), "queue_full", headers={"Retry-After": "1"}) from error

    async def texts(self) -> AsyncGenerator[str]:
        """Yield what may be shown, round by round, and set `reason` after the last one.

        Raises:
            Refusal: the request cannot be served, took too long, or it is not waited for any more.
        """
        try:
            while not self.reason:
                news = await self._next()
                if news.error is not None:
                    if isinstance(news.error, ValueError):
                        raise Refusal(400, str(news.error))
                    if isinstance(news.error, Stopped):
                        raise Refusal(503, str(news.error), "server_stopping")
                    raise Refusal(500, FAILED)
                if news.tokens and not self.writer.count:
                    self.metrics.first_token.observe(time.monotonic() - self.begun)
                text = self.writer.push(news.tokens)
                if self.writer.stopped:
                    self.reason = "stop"
                elif news.over:
                    text += self.writer.end()
                    limit = self.job.options["max_new_tokens"]
                    ended = self.writer.count < limit or news.tokens[-1] in self.job.ends
                    self.reason = "stop" if ended else "length"
                yield text
        finally:
            self.service.scheduler.cancel(self.job)
            self.metrics.count(self.job.stats, self.reason or "abort", time.monotonic() - self.begun)

    def _tell(self, news: News) -> None:
        with suppress(RuntimeError):  # the loop is closed: the client has gone
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)

    async def _next(self) -> News:
        """Wait for news, and look now and then whether they are still waited for."""
        while True:
            now = time.monotonic()
            left = self.service.seconds - (now - self.begun)
            if left <= 0:
                raise Refusal(504, f"The request took longer than {self.service.seconds:.0f} seconds.", "timeout")
            if now - self.looked > POLL:
                self.looked = now
                if await self.connection.is_disconnected():
                    raise Refusal(499, "The client has gone.", "client_closed_request")
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.news.get(), min(POLL, left))

    @property
    def usage(self) -> CompletionUsage:
        """Count the tokens of prompt and answer, and those that were drafted for it."""
        stats, completion = self.job.stats, self.writer.count
        accepted = sum(stats.successes)
        details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=stats.num_drafted - accepted
        )
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.prompt_tokens + completion,
            completion_tokens_details=details,
        )
