"""The HTTP of the endpoint: OpenAI's paths, bodies and errors, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import CompletionTokensDetails
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ..protocol import SpeculationStats
from .requests import Ask, ChatRequest, CompletionRequest
from .scheduler import Job, News, QueueFull, Scheduler
from .text import Writer

LARGEST = 4 << 20  # bytes of a body
MOST_NEW = 4096  # tokens of an answer whose request does not say how many
POLL = 0.2  # seconds between two looks at whether a client is still there


@dataclass
class Service:
    """The endpoint's model, and its limits.

    Attributes:
        scheduler: answers.
        tokenizer: the target's.
        name: of the model, for clients.
        context: tokens of prompt and answer at most; None: any number.
        api_key: that clients have to send; None: none.
        seconds: for one request, at most.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase
    name: str
    context: int | None
    api_key: str | None = None
    seconds: float = 600.0
    created: int = field(default_factory=lambda: int(time.time()))


class Refusal(HTTPException):
    """An answer with one of OpenAI's errors.

    Args:
        status: of HTTP.
        message: what was wrong, and what to do.
        code: OpenAI's short name for it.
        param: the field of the request.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Metrics:
    """Counts for Prometheus.

    Args:
        scheduler: knows who runs and who waits.
    """

    def __init__(self, scheduler: Scheduler):
        self.registry = registry = CollectorRegistry()
        self.drafts = Counter("spec_decode_num_drafts", "Rounds with a draft.", registry=registry)
        self.drafted = Counter("spec_decode_num_draft_tokens", "Drafted tokens.", registry=registry)
        self.emitted = Counter("spec_decode_num_emitted_tokens", "New tokens, the target's own included.", registry=registry)
        self.accepted = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens.", ["position"], registry=registry
        )
        self.requests = Counter("requests", "Requests, by how they ended.", ["finish_reason"], registry=registry)
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.", registry=registry)
        self.seconds = Histogram("request_seconds", "From a request to its end.", registry=registry)
        running = Gauge("num_requests_running", "Requests that are being answered.", registry=registry)
        running.set_function(lambda: len(scheduler.running) + (scheduler.reading is not None))
        waiting = Gauge("num_requests_waiting", "Requests that wait for a place.", registry=registry)
        waiting.set_function(lambda: len(scheduler.waiting))

    def count(self, stats: SpeculationStats, reason: str, seconds: float) -> None:
        """Count a request that has ended."""
        self.drafts.inc(stats.attempts[0] if stats.attempts else 0)
        self.drafted.inc(stats.num_drafted)
        self.emitted.inc(stats.num_emitted)
        for position, accepted in enumerate(stats.successes):
            self.accepted.labels(str(position)).inc(accepted)
        self.requests.labels(reason).inc()
        self.seconds.observe(seconds)


class Answer:
    """One request on its way: text as it comes, then why it ended.

    Args:
        service: answers it.
        metrics: count it.
        ask: the request.
        ids: its prompt.
        connection: the client's, which may be gone.
    """

    def __init__(self, service: Service, metrics: Metrics, ask: Ask, ids: list[int], connection: Request):
        self.service, self.metrics, self.connection = service, metrics, connection
        self.begun = self.looked = time.monotonic()
        self.prompt_tokens = len(ids)
        self.reason: Any = ""  # why it ended, in OpenAI's words
        self.writer = Writer(service.tokenizer, ask.stops)
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        room = MOST_NEW if service.context is None else service.context - len(ids)
        if room < 1:
            raise Refusal(
                400,
                f"The prompt has {len(ids)} tokens, and the model's context is {service.context}: shorten it.",
                "context_length_exceeded",
                "messages" if isinstance(ask, ChatRequest) else "prompt",
            )
        prediction = None
        if ask.prediction is not None:
            prediction = service.tokenizer(ask.prediction.text, add_special_tokens=False)["input_ids"]
        options = {
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
        """Yield what may be shown, round by round, and set `reason` behind the last one.

        Raises:
            Refusal: the request cannot be served, took too long, or nobody waits for it any more.
        """
        try:
            while not self.reason:
                news = await self._next()
                if news.error is not None:
                    if isinstance(news.error, ValueError):
                        raise Refusal(400, str(news.error))
                    raise Refusal(500, "The request failed; the server's log says why.")
                if news.tokens and not self.writer.count:
                    self.metrics.first_token.observe(time.monotonic() - self.begun)
                text = self.writer.push(news.tokens)
                if self.writer.stopped:
                    self.reason = "stop"
                elif news.over:
                    text += self.writer.rest()
                    limit = self.job.options["max_new_tokens"]
                    ended = self.writer.count < limit or news.tokens[-1] in self.job.ends
                    self.reason = "stop" if ended else "length"
                yield text
        finally:
            self.service.scheduler.cancel(self.job)
            self.metrics.count(self.job.stats, self.reason or "abort", time.monotonic() - self.begun)

    def _tell(self, news: News) -> None:
        self.loop.call_soon_threadsafe(self.news.put_nowait, news)

    async def _next(self) -> News:
        """Wait for news, and look now and then whether somebody still waits for them."""
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


class Bodies:
    """Refuses bodies that are too large before they are read.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        read = 0
        if not length.isdigit() or int(length) > LARGEST:
            await self._refuse(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST:
                raise Refusal(413, f"The body is larger than {LARGEST >> 20} MiB.", "body_too_large")
            return message

        await self.app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _error(413, f"The body is larger than {LARGEST >> 20} MiB.", "body_too_large")
        await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)


def _events(answer: Answer, texts: AsyncGenerator[str], chunk: Callable[..., Any], with_usage: bool) -> AsyncIterator[str]:
    """Make the lines of a stream: chunks of text, why it ended, its usage if that is wanted, and its end."""

    async def lines() -> AsyncIterator[str]:
        def line(made: Any) -> str:
            return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"

        try:
            yield line(chunk("", None, first=True))
            async for text in texts:
                if text:
                    yield line(chunk(text, None))
            yield line(chunk("", answer.reason))
            if with_usage:
                yield line(chunk(None, None, usage=answer.usage))
            yield "data: [DONE]\n\n"
        except Refusal as refusal:  # the status has been sent
            yield f"data: {json.dumps(_error(refusal.status_code, refusal.detail, refusal.code))}\n\n"
        finally:
            await texts.aclose()

    return lines()


async def _with_first(texts: AsyncGenerator[str]) -> AsyncGenerator[str]:
    """Wait for the first text, so that what cannot be served has a status of its own; then give all of them."""
    first = await anext(texts)

    async def all_of_them() -> AsyncGenerator[str]:
        try:
            yield first
            async for text in texts:
                yield text
        finally:
            await texts.aclose()

    return all_of_them()


def make_app(service: Service) -> FastAPI:
    """Make the endpoint.

    Args:
        service: what it serves; its scheduler is started and stopped with the app.
    """
    metrics = Metrics(service.scheduler)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        service.scheduler.stop()

    app = FastAPI(title="hf_paradraft", lifespan=lifespan)
    app.add_middleware(Bodies)

    def allowed(connection: Request) -> None:
        """Look at the client's key."""
        sent = connection.headers.get("authorization", "").removeprefix("Bearer ")
        if service.api_key is not None and not secrets.compare_digest(sent.encode(), service.api_key.encode()):
            raise Refusal(401, "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.", "invalid_api_key")

    def begun(ask: Ask, connection: Request) -> Answer:
        """Let a request wait for its place."""
        if ask.model not in (None, service.name):
            raise Refusal(404, f"The model {ask.model!r} is not served here: {service.name} is.", "model_not_found", "model")
        if ask.stream_options is not None and not ask.stream:
            raise Refusal(400, "stream_options goes with stream.", param="stream_options")
        try:
            ids = ask.ids(service.tokenizer)  # type: ignore[attr-defined]
        except ValueError as error:
            field_name = "messages" if isinstance(ask, ChatRequest) else "prompt"
            raise Refusal(400, str(error), param=field_name) from error
        return Answer(service, metrics, ask, ids, connection)

    async def answered(answer: Answer, ask: Ask, chunk: Callable[..., Any], whole: Callable[[str], Any]) -> Response:
        """Send an answer, as a stream or in one piece."""
        texts = await _with_first(answer.texts())
        if ask.stream:
            usage = ask.stream_options is not None and ask.stream_options.include_usage
            return StreamingResponse(_events(answer, texts, chunk, usage), media_type="text/event-stream")
        text = "".join([piece async for piece in texts])
        return JSONResponse(whole(text).model_dump(exclude_unset=True))

    @app.post("/v1/chat/completions", dependencies=[Depends(allowed)])
    async def chat(ask: ChatRequest, connection: Request) -> Response:
        """Answer a conversation."""
        answer = begun(ask, connection)
        about: dict[str, Any] = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": service.name}

        def chunk(
            text: str | None, reason: Any, first: bool = False, usage: CompletionUsage | None = None
        ) -> ChatCompletionChunk:
            parts: dict[str, Any] = {"role": "assistant", "content": ""} if first else {"content": text} if text else {}
            choices = [] if text is None else [ChunkChoice(index=0, delta=ChoiceDelta(**parts), finish_reason=reason)]
            more: dict[str, Any] = {} if usage is None else {"usage": usage}
            return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **about, **more)

        def whole(text: str) -> ChatCompletion:
            message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
            choice = Choice(index=0, message=message, finish_reason=answer.reason, logprobs=None)
            return ChatCompletion(object="chat.completion", choices=[choice], usage=answer.usage, **about)

        return await answered(answer, ask, chunk, whole)

    @app.post("/v1/completions", dependencies=[Depends(allowed)])
    async def complete(ask: CompletionRequest, connection: Request) -> Response:
        """Go on with a text."""
        answer = begun(ask, connection)
        about: dict[str, Any] = {
            "id": f"cmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
            "object": "text_completion",
        }

        def chunk(text: str | None, reason: Any, first: bool = False, usage: CompletionUsage | None = None) -> Completion:
            choices = [] if text is None else [CompletionChoice.model_construct(index=0, text=text, finish_reason=reason)]
            more: dict[str, Any] = {} if usage is None else {"usage": usage}
            return Completion.model_construct(None, choices=choices, **about, **more)

        def whole(text: str) -> Completion:
            choice = CompletionChoice(index=0, text=text, finish_reason=answer.reason, logprobs=None)
            return Completion(choices=[choice], usage=answer.usage, **about)

        return await answered(answer, ask, chunk, whole)

    @app.get("/v1/models", dependencies=[Depends(allowed)])
    async def models() -> Response:
        """List the model."""
        model = Model(id=service.name, created=service.created, object="model", owned_by="hf_paradraft")
        return JSONResponse({"object": "list", "data": [model.model_dump()]})

    @app.get("/v1/models/{name:path}", dependencies=[Depends(allowed)])
    async def one_model(name: str) -> Response:
        """Describe the model."""
        if name != service.name:
            raise Refusal(404, f"The model {name!r} is not served here: {service.name} is.", "model_not_found", "model")
        model = Model(id=service.name, created=service.created, object="model", owned_by="hf_paradraft")
        return JSONResponse(model.model_dump())

    @app.get("/health")
    async def health() -> Response:
        """Say that requests are answered."""
        alive = service.scheduler.thread.is_alive()
        return PlainTextResponse("" if alive else "The scheduler has stopped.", 200 if alive else 503)

    @app.get("/metrics", dependencies=[Depends(allowed)])
    async def scrape() -> Response:
        """Give the counts to Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(StarletteHTTPException)
    async def refused(connection: Request, error: StarletteHTTPException) -> Response:
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        return JSONResponse(_error(error.status_code, str(error.detail), code, param), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(connection: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:] if part != "body") or None
        message = "it is not served here" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        return JSONResponse(_error(400, f"{param or 'body'}: {message}", None, param), 400)

    @app.exception_handler(Exception)
    async def failed(connection: Request, error: Exception) -> Response:
        return JSONResponse(_error(500, "The request failed; the server's log says why."), 500)

    return app
