"""HEAD requests, which every resource that has GET must answer (RFC 9110, section 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answers HEAD with the status and headers of GET; streams of events have no HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and leaves out the body of what HEAD is answered with."""
        asked = scope["type"] == "http" and scope["method"] == "HEAD"
        if not asked or scope["path"].endswith("/events"):
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)
