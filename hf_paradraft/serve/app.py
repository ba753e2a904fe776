"""The endpoint: OpenAI's paths and bodies, metrics for Prometheus, and the process that serves it.

The process prints its address once it answers, and ends on a signal.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile
from threading import Timer
from types import FrameType
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.utils import logging

from .answer import Part, Service, answer
from .errors import Refusal, RequestGuard, refusal_of
from .requests import Ask, ChatRequest, CompletionRequest

logger = logging.get_logger(__name__)
TYPES = "str", "int"  # of fields that take several, in pydantic's error places
SHUTDOWN_GRACE = 2  # seconds to send an error to interrupted requests
ECHO_LENGTH = 80  # characters of a client's own words in an error


async def _events(
    ask: Ask, about: dict[str, Any], first: Part, parts: AsyncGenerator[Part]
) -> AsyncGenerator[str]:
    """Make the lines of a stream: an answer's parts, the usage if wanted, and the end."""
    chat = isinstance(ask, ChatRequest)
    with_usage = ask.stream_options is not None and ask.stream_options.include_usage

    def line(*choices: Any, **more: Any) -> str:
        return f"data: {json.dumps({**about, 'choices': choices, **more})}\n\n"

    def chunk(part: Part) -> str:
        delta = {"delta": part.delta} if chat else {"text": part.delta.get("content", "")}
        usage = {"usage": None} if with_usage else {}  # in every chunk
        choice = {"index": 0, **delta, "logprobs": None, "finish_reason": part.reason}
        return line(choice, **usage)

    try:
        yield chunk(first)
        async for part in parts:
            yield chunk(part)
        if with_usage:
            yield line(**part.counts)
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status has been sent
        if not isinstance(error, Refusal):
            logger.exception("A request failed after its first chunk.")
        yield f"data: {json.dumps(refusal_of(error).body)}\n\n"
    finally:
        await parts.aclose()


async def _whole(ask: Ask, about: dict[str, Any], parts: AsyncGenerator[Part]) -> dict[str, Any]:
    """Make the body of an answer that is not streamed."""
    text, calls = "", []
    async for part in parts:
        text += part.delta.get("content", "")
        calls += [
            {name: value for name, value in call.items() if name != "index"}
            for call in part.delta.get("tool_calls", ())
        ]
    said: dict[str, Any] = {"text": text}
    if isinstance(ask, ChatRequest):
        said = {
            "message": {
                "role": "assistant",
                "content": text or (None if calls else ""),
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
            }
        }
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": part.reason}
    return {**about, "choices": [choice], **part.counts}


def make_app(service: Service) -> FastAPI:
    """Make the endpoint.

    Args:
        service: the model and limits; its scheduler is started and stopped with the app.
    """
    one_reads = asyncio.Semaphore()  # prompts are encoded one after the other
    one_compiles = asyncio.Semaphore()  # and schemas

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        service.scheduler.stop()

    app = FastAPI(title="hf_paradraft", lifespan=lifespan)
    app.add_middleware(RequestGuard, api_key=service.api_key)

    def check_name(name: str | None) -> None:
        if name not in (None, service.name):
            raise Refusal(
                404,
                f"The model {name!r} is not served here: {service.name} is.",
                "model_not_found",
                "model",
            )

    async def answered(ask: ChatRequest | CompletionRequest, connection: Request) -> Response:
        """Queue a request, and send its answer, as a stream or in one piece."""
        chat = isinstance(ask, ChatRequest)
        check_name(ask.model)
        if ask.stream_options is not None and not ask.stream:
            raise Refusal(400, "stream_options goes with stream.", param="stream_options")
        async with one_reads:  # in a thread: others go on meanwhile
            job = await asyncio.to_thread(service.read, ask)
        if isinstance(ask, ChatRequest) and (ask.wants_tools or ask.answer_schema is not None):
            async with one_compiles:
                job.grammar = await asyncio.to_thread(service.grammar, ask)
            job.options["logits_processor"] = [job.grammar]
        parts = answer(service, ask, job, connection)
        first = await anext(parts)
        about: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
            "object": "chat.completion" if chat else "text_completion",
        }
        if not ask.stream:
            return JSONResponse(await _whole(ask, about, parts))
        about["object"] += ".chunk" if chat else ""
        events = _events(ask, about, first, parts)
        return StreamingResponse(events, media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(ask: ChatRequest, connection: Request) -> Response:
        """Answer a conversation."""
        return await answered(ask, connection)

    @app.post("/v1/completions")
    async def complete(ask: CompletionRequest, connection: Request) -> Response:
        """Continue a text."""
        return await answered(ask, connection)

    about_model = {
        "id": service.name,
        "created": int(time.time()),
        "object": "model",
        "owned_by": "hf_paradraft",
    }

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> Response:
        """List the model."""
        return JSONResponse({"object": "list", "data": [about_model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """Describe the model."""
        check_name(name)
        return JSONResponse(about_model)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """Report whether requests are answered."""
        alive = service.scheduler.thread.is_alive()
        return PlainTextResponse(
            "" if alive else "The scheduler has stopped.", 200 if alive else 503
        )

    @app.get("/metrics")
    async def scrape() -> Response:
        """Return the counts for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(RecursionError)
    async def too_deep(connection: Request, error: RecursionError) -> Response:
        return Refusal(400, "The body is nested too deeply.").response()

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(Exception)
    async def refused(connection: Request, error: Exception) -> Response:
        return refusal_of(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(connection: Request, error: RequestValidationError) -> Response:
        # of a union, the member that fits best
        worst = min(error.errors(), key=lambda one: one["type"].endswith("_type"))
        place = [str(part) for part in worst["loc"][1:]]
        if not place or worst["type"] == "json_invalid":
            return Refusal(
                400, "The body has to be a JSON object, sent as application/json."
            ).response()
        inner = takewhile(
            lambda part: part.replace("_", "").isalnum() and part not in TYPES, place[1:]
        )
        param = ".".join([place[0], *inner])[:ECHO_LENGTH]
        message = (
            "it is not served here"
            if worst["type"] == "extra_forbidden"
            else worst["msg"].removeprefix("Value error, ")
        )
        return Refusal(400, f"{param}: {message[: ECHO_LENGTH * 2]}", param=param).response()

    return app


class Server(uvicorn.Server):
    """A uvicorn server that prints its address once it answers."""

    last_call: Timer

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Implement `uvicorn.Server`: requests not done in time get an error of their own."""
        if not self.should_exit:
            self.last_call.daemon = True
            self.last_call.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Implement `uvicorn.Server`."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)


def run(service: Service, host: str, port: int, grace: int) -> None:
    """Serve until the process is told to stop; `grace`: seconds for running requests."""
    app = make_app(service)
    # Objects that exist now are left out of garbage collection: full collections are then fast and
    # frequent, so that ended requests are freed soon.
    gc.collect()
    gc.freeze()
    server = Server(
        uvicorn.Config(
            app, host, port, log_level="warning", timeout_graceful_shutdown=grace + SHUTDOWN_GRACE
        )
    )
    server.last_call = Timer(grace, service.scheduler.stop)
    server.run()
