"""Errors in OpenAI's form, and the refusal of too large bodies before they are read."""

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST = 4 << 20  # bytes of a body
FAILED = "The request failed; the server's log says why."


class Refusal(HTTPException):
    """An error that is answered in OpenAI's form.

    Args:
        status: the HTTP status.
        message: a sentence that says what was wrong and what to do.
        code: OpenAI's short name for the error.
        param: the request's field that is wrong.
        headers: the answer's headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, kind)
        return {
            "error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> JSONResponse:
        """Make the HTTP response."""
        return JSONResponse(self.body, self.status_code, self.headers)


class Door:
    """An ASGI middleware that refuses requests without the key, and bodies too large.

    Both are refused before the body is read; a body without a length, once it is too large.

    Args:
        app: the app that gets all other requests.
        api_key: the key that clients have to send, except for `/health`; None: none.
    """

    def __init__(self, app: ASGIApp, api_key: str | None = None):
        self.app, self.api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, read = dict(scope["headers"]), 0
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        right = (
            secrets.compare_digest(sent.strip(), (self.api_key or "").encode())
            and scheme.lower() == b"bearer"
        )
        length = headers.get(b"content-length", b"0")
        if self.api_key is not None and not right and scope["path"] != "/health":
            await NO_KEY.response()(scope, receive, send)
            return
        if not length.isdigit() or int(length) > LARGEST:
            await TOO_LARGE.response()(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST:
                raise TOO_LARGE
            return message

        await self.app(scope, counted, send)


CLOSE = {"Connection": "close"}  # the rest of the body is not read
NO_KEY = Refusal(
    401,
    "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
    "invalid_api_key",
    headers=CLOSE,
)
TOO_LARGE = Refusal(
    413, f"The body is larger than {LARGEST >> 20} MiB.", "body_too_large", headers=CLOSE
)
