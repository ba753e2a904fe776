"""Requests with large bodies are turned away in front, before anything of them is kept."""

from typing import Any


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than so many bytes, whether its length is
    announced or not.

    Args:
        app: what it stands in front of.
        bytes_at_most: of a request's body.
    """

    def __init__(self, app: Any, bytes_at_most: int):
        self.app, self.most = app, bytes_at_most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.most:
            await self._refuse(send)
            return
        seen, started = 0, False

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise OverflowError
            return message

        async def noted(message: Any) -> None:
            nonlocal started
            if seen <= self.most:  # what the app makes of half a body is not sent
                started = True
                await send(message)

        try:
            await self.app(scope, counted, noted)
        except OverflowError:
            if seen <= self.most:
                raise
        if seen > self.most and not started:
            await self._refuse(send)

    async def _refuse(self, send: Any) -> None:
        text = f"A request has at most {self.most} bytes here.".encode()
        headers = [
            (b"content-type", b"text/plain"),
            (b"content-length", str(len(text)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": text})
