"""The outer side of the page's HTTP: deadlines of each connection, and the headers of each answer.

A connection that sends no whole request in time, or takes no bytes of an answer in time, is cut off. uvicorn and h11 bound the
size of a request's head; requests have no body here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from node.web.event_stream import SEND_SECONDS_MAX

REQUEST_SECONDS_MAX: Final = 15.0
TRANSPORT: Final = "transport"
"""The key of the connection in the state of a request."""
NO_BODY: Final = b"requests have no body here"
POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; worker-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    b"content-security-policy": POLICY.encode("ascii"),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-opener-policy": b"same-origin",
    b"permissions-policy": b"camera=(), geolocation=(), microphone=(), payment=()",
}


class Timed(H11Protocol):
    """A connection with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to come in time."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}
        self._expect()

    def handle_events(self) -> None:
        """A whole request ends the wait."""
        super().handle_events()
        if self._deadline is not None and self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        """The next request has to come in time, too."""
        self._expect()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS_MAX, self.transport.abort)


class HttpGuard:
    """Before the whole app: adds the headers, and cuts connections off that take no bytes.

    `bodies`: whether requests may have one. Without, a request that announces one is refused, so no proxy and this server can
    differ about where it ends.
    """

    def __init__(self, app: Any, *, bodies: bool) -> None:
        self._app, self._bodies = app, bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        transport = scope.get("state", {}).get(TRANSPORT)

        async def timed(event: Any) -> None:
            if event["type"] == "http.response.start":
                event["headers"] = [*event.get("headers", []), *HEADERS.items()]
            try:
                async with asyncio.timeout(SEND_SECONDS_MAX):
                    await send(event)
            except TimeoutError:
                if transport is not None:
                    transport.abort()
                raise ConnectionError("the browser takes no bytes") from None

        try:
            if not self._bodies and announces_body(scope["headers"]):
                length = (b"content-length", str(len(NO_BODY)).encode("ascii"))
                plain = (b"content-type", b"text/plain")
                await timed(
                    {
                        "type": "http.response.start",
                        "status": 400,
                        "headers": [(b"connection", b"close"), length, plain],
                    }
                )
                await timed({"type": "http.response.body", "body": NO_BODY})
                return
            await self._app(scope, receive, timed)
        except ConnectionError:
            return  # the connection is gone, and with it everybody who could be told


def announces_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request says that a body follows; the names are in small letters."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0") for name, value in headers
    )
