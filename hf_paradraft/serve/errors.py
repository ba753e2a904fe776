"""Refusals in OpenAI's words, of bodies that are too large before they are read."""

from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST = 4 << 20  # bytes of a body
FAILED = "The request failed; the server's log says why."


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


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Make the body of one of OpenAI's errors; arguments as for `Refusal`."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Bodies:
    """An ASGI middleware that refuses bodies that are too large before they are read.

    Args:
        app: that it serves.
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
        body = error_body(413, f"The body is larger than {LARGEST >> 20} MiB.", "body_too_large")
        await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
