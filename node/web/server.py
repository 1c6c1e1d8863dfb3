"""HTTP for browsers: a socket that listens, and a uvicorn server with this project's limits: deadlines of each connection, and
the headers of each answer. Knows no routes and no runs.

The page of the runs (serve.py) and the operator's page (node/operator_page) are served this way.

A connection that sends no whole request in time, or takes no bytes of an answer in time, is cut off. uvicorn and h11 bound
the size of a request's head; requests have no body here.

Server-sent events: one message is made once, and every reader of a run gets the same bytes. Readers are bounded. A reader
that does not read in time is dropped: its connection ends, and its browser connects again.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos.errors import OperatorError

READERS_MAX: Final = 1024
READER_MESSAGES_MAX: Final = 16
"""Messages that wait for one reader."""
SEND_SECONDS_MAX: Final = 10.0
"""A reader whose connection takes no bytes for so long is dropped."""
KEEP_ALIVE_SECONDS: Final = 15.0
"""A silent stream gets a comment this often, so that proxies keep it open."""
KEEP_ALIVE = b": still here\n\n"
END = b""

Send = Callable[[bytes], Any]


def message(event: str, data: Any) -> bytes:
    """One event. The data is one line of JSON, so no text in it can begin another event."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"event: {event}\ndata: {text}\n\n".encode("ascii")


class Reader:
    """One open stream."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(READER_MESSAGES_MAX)
        self.dropped = False

    def put(self, data: bytes) -> bool:
        """Whether there was room."""
        try:
            self._waiting.put_nowait(data)
        except asyncio.QueueFull:
            self.dropped = True
        return not self.dropped

    async def messages(self) -> AsyncIterator[bytes]:
        """Messages until the channel ends the stream; a comment if there is none for a while."""
        while not self.dropped:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    data = await self._waiting.get()
            except TimeoutError:
                data = KEEP_ALIVE
            if data == END:
                return
            yield data

    def end(self) -> None:
        """End the stream, also if messages wait."""
        self.dropped = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(END)


class Channels:
    """The readers of each run, and of the list (under the empty name)."""

    def __init__(self, readers_max: int = READERS_MAX) -> None:
        self._readers: dict[str, set[Reader]] = {}
        self._readers_max = readers_max
        self._closed = False

    @property
    def count(self) -> int:
        """Open streams."""
        return sum(map(len, self._readers.values()))

    def enter(self, name: str) -> Reader | None:
        """A new reader; None if there are too many, or the process stops."""
        if self._closed or self.count >= self._readers_max:
            return None
        reader = Reader()
        self._readers.setdefault(name, set()).add(reader)
        return reader

    def leave(self, name: str, reader: Reader) -> None:
        """The reader has gone; safe to call twice."""
        readers = self._readers.get(name, set())
        readers.discard(reader)
        if not readers:
            self._readers.pop(name, None)

    def watched(self, name: str) -> bool:
        """Whether anybody reads."""
        return name in self._readers

    def publish(self, name: str, data: bytes) -> None:
        """Give a message to each reader; those that have no room are dropped."""
        for reader in list(self._readers.get(name, ())):
            if not reader.put(data):
                reader.end()
                self.leave(name, reader)

    def end(self, name: str) -> None:
        """End the streams of one run."""
        for reader in self._readers.pop(name, set()):
            reader.end()

    def close(self) -> None:
        """End all streams, and take no new reader."""
        self._closed = True
        for readers in list(self._readers.values()):
            for reader in readers:
                reader.end()
        self._readers.clear()


async def stream(reader: Reader, send: Send) -> bool:
    """Send the reader's messages. False if the other side took no bytes in time, or was dropped."""
    async for data in reader.messages():
        try:
            async with asyncio.timeout(SEND_SECONDS_MAX):
                await send(data)
        except TimeoutError:
            return False
    return not reader.dropped


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


LISTEN: Final = "127.0.0.1:7780"
CONNECTIONS_MAX: Final = 2048
DESCRIPTORS_KEPT: Final = 256
STOP_SECONDS_MAX: Final = 2
HEAD_BYTES_MAX: Final = 16 << 10


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: this program has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def listening(listen: str) -> socket.socket:
    """A socket that listens at `host:port`; OperatorError says why there is none."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise OperatorError(f"--listen {listen}: expected host:port, for example {LISTEN}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(512)
    except OSError as error:
        made.close()
        text = f"--listen {listen}: cannot listen there ({error.strerror}); choose another port, or 0 for a free one"
        raise OperatorError(text) from error
    return made


def url_of(made: socket.socket) -> str:
    """Where a browser on this machine finds the page."""
    host, port = made.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def raise_descriptors() -> None:
    """Let this process have a descriptor for each connection, if the system allows so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + DESCRIPTORS_KEPT
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def server_of(app: Any, connections_max: int = CONNECTIONS_MAX) -> Server:
    """A server of the app. `serve(sockets=[made])` runs it, and `should_exit` ends it."""
    return Server(
        uvicorn.Config(
            app,
            http=Timed,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=connections_max,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=STOP_SECONDS_MAX,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
    )
