"""The HTTP of the endpoint: OpenAI's paths and bodies, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.utils import logging

from .answer import MOST_NEW, Answer, Service
from .errors import FAILED, Bodies, Refusal, error_body
from .metrics import Metrics
from .requests import Ask, ChatRequest, CompletionRequest

logger = logging.get_logger(__name__)
KINDS, SAID = ("str", "int"), 4  # what pydantic calls the kinds that a field may be of; of what is wrong, so much is said


def _events(answer: Answer, texts: AsyncGenerator[str], chunk: Callable[..., Any], with_usage: bool) -> AsyncIterator[str]:
    """Make the lines of a stream: chunks of text, why it ended, its usage if that is wanted, and its end."""

    async def lines() -> AsyncIterator[str]:
        def line(made: Any) -> str:
            if with_usage and made.usage is None:
                made.usage = None  # said in every chunk
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
        except Exception as error:  # the status has been sent
            if not isinstance(error, Refusal):
                logger.exception("A request failed after its first chunk.")
                error = Refusal(500, FAILED)
            yield f"data: {json.dumps(error_body(error.status_code, error.detail, error.code))}\n\n"
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
        scheme, _, sent = connection.headers.get("authorization", "").partition(" ")
        right = secrets.compare_digest(sent.strip().encode("latin-1"), (service.api_key or "").encode())  # as it was sent
        if service.api_key is not None and not (right and scheme.lower() == "bearer"):
            raise Refusal(401, "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.", "invalid_api_key")

    async def begun(ask: Ask, connection: Request) -> Answer:
        """Let a request wait for its place."""
        if ask.model not in (None, service.name):
            raise Refusal(404, f"The model {ask.model!r} is not served here: {service.name} is.", "model_not_found", "model")
        if ask.stream_options is not None and not ask.stream:
            raise Refusal(400, "stream_options goes with stream.", param="stream_options")
        field_name, prediction = "messages" if isinstance(ask, ChatRequest) else "prompt", None
        try:  # in a thread: others go on meanwhile
            ids = await asyncio.to_thread(ask.ids, service.tokenizer)  # type: ignore[attr-defined]
            if ask.prediction is not None:
                field_name = "prediction"
                prediction = await asyncio.to_thread(ask.prediction.ids, service.tokenizer)
                prediction = prediction[: service.context or MOST_NEW]  # an answer has no more
        except ValueError as error:
            raise Refusal(400, str(error), param=field_name) from error
        return Answer(service, metrics, ask, ids, prediction, connection)

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
        answer = await begun(ask, connection)
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
        answer = await begun(ask, connection)
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

    @app.api_route("/v1/models", methods=["GET", "HEAD"], dependencies=[Depends(allowed)])
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

    @app.api_route("/health", methods=["GET", "HEAD"])
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
        return JSONResponse(error_body(error.status_code, str(error.detail), code, param), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(connection: Request, error: RequestValidationError) -> Response:
        worst = error.errors()[0]
        if worst["type"] == "json_invalid":
            return JSONResponse(error_body(400, f"The body is no JSON: {worst['ctx']['error']}."), 400)
        if worst["loc"] == ("body",):
            return JSONResponse(error_body(400, "The body has to be a JSON object, sent as application/json."), 400)
        said: dict[str, None] = {}
        for one in error.errors():
            first, *inner = map(str, one["loc"][1:])
            name = ".".join([first, *(part for part in inner if part not in KINDS and "[" not in part)])
            message = "it is not served here" if one["type"] == "extra_forbidden" else one["msg"].removeprefix("Value error, ")
            said[f"{name}: {message}"] = None
        return JSONResponse(error_body(400, "; ".join([*said][:SAID]), None, next(iter(said)).partition(":")[0]), 400)

    @app.exception_handler(Exception)
    async def failed(connection: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, FAILED), 500)

    return app
