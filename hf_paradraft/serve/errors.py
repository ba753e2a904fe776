"""Errors in OpenAI's form, and the refusal of wrong keys and too large bodies."""

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 4 << 20
CLOSE = {"Connection": "close"}  # the rest of the body is not read


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


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal by which a client is told of an error; of most, only the log says why."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StarletteHTTPException):
        return Refusal(error.status_code, str(error.detail), headers=error.headers)
    return Refusal(500, "The request failed; the server's log says why.")


class RequestGuard:
    """An ASGI middleware that refuses requests without the key, and bodies too large.

    The key is looked at before the body is read; a body is refused once it is too large.

    Args:
        app: the app that gets all other requests.
        api_key: the key that clients have to send, except for `/health`; None: none.
    """

    def __init__(self, app: ASGIApp, api_key: str | None = None):
        self.app, self.api_key = app, api_key

    def _lets_in(self, scope: Scope) -> bool:
        if self.api_key is None or scope["path"] == "/health":
            return True
        scheme, _, sent = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        right = secrets.compare_digest(sent.strip(), self.api_key.encode())
        return right and scheme.lower() == b"bearer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not self._lets_in(scope):
            refusal = Refusal(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
                headers=CLOSE,
            )
            await refusal.response()(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise Refusal(
                    413,
                    f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.",
                    "body_too_large",
                    headers=CLOSE,
                )
            return message

        await self.app(scope, counted, send)
