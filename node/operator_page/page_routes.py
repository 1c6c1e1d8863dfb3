"""The routes of the operator's page: its files, and three POSTs. Each request names this page as its host and as its origin.

Refuses: other hosts (a stranger's DNS name for this machine), other origins, plain HTTP from other machines, bodies that are
too large or too slow, and addresses that ask too often. It decides nothing else: the process behind the pipe does.

Requests to the process that started this one: lines on stdout, and the answers on stdin. Knows no key and no session.

A request is its number, a space, and JSON. An answer is JSON with that number. Requests that wait are bounded, and each has
a deadline. The end of stdin ends all of them, and then this process.

`python -m node.operator_page.page_routes` is HTTP for the operator's browser: `coordinator/web` starts it, and answers its
requests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Protocol
from urllib.parse import urlsplit

import typer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from node.web.server import HttpGuard, listening, server_of, url_of
from protos.console import configure_logging, exit_with
from protos.limits import RateLimiter
from protos.process import heeded
from protos.text import print_json

WAITING_MAX: Final = 32
ANSWER_SECONDS_MAX: Final = 330.0
"""A model that is built takes up to 300 s (`coordinator/commands/planning.py`); all else takes seconds."""
WRITE_SECONDS_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = (1 << 20) - 64
LINE_BYTES_MAX: Final = 8 << 20
"""An answer: 512 peers and 512 invites, with their texts."""


@dataclass(frozen=True)
class PipeReply:
    """A status of HTTP, and JSON. `cookie`: a session begins."""

    status: int
    body: dict[str, Any]
    cookie: str = ""


class Asks(Protocol):
    """Where requests go."""

    async def ask(self, values: dict[str, Any]) -> PipeReply:
        """The answer to one request."""


class Pipe:
    """The two pipes. `run` reads the answers until stdin ends."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[PipeReply]] = {}
        self._next = 0
        self._out: asyncio.StreamWriter | None = None

    async def ask(self, values: dict[str, Any]) -> PipeReply:
        """The answer, or a status that says why there is none."""
        if self._out is None or len(self._waiting) >= WAITING_MAX:
            return PipeReply(503, {"error": "too many requests wait for the coordinator: try again in a moment"})
        number, self._next = self._next, self._next + 1
        line = json.dumps(values, ensure_ascii=True).encode("ascii")
        if len(line) > REQUEST_BYTES_MAX:
            return PipeReply(413, {"error": f"the request has more than {REQUEST_BYTES_MAX} bytes"})
        waits: asyncio.Future[PipeReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waits
        try:
            self._out.write(b"%d %b\n" % (number, line))
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await self._out.drain()
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                return await waits
        except (TimeoutError, ConnectionError):
            return PipeReply(504, {"error": "the coordinator did not answer in time: look whether the action was done"})
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Until stdin ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        )
        out, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        )
        self._out = asyncio.StreamWriter(out, protocol, None, loop)
        try:
            with suppress(ValueError):  # a line that is too long or is no answer ends the reading, and this process
                while line := await reader.readline():
                    self._take(json.loads(line))
        finally:
            self._out = None
            out.close()
            transport.close()
            for waits in self._waiting.values():
                waits.cancel()

    def _take(self, values: dict[str, Any]) -> None:
        waits = self._waiting.get(int(values["id"]))
        if waits is not None and not waits.done():
            waits.set_result(PipeReply(int(values["status"]), dict(values["body"]), str(values["cookie"])))


OWN: Final = Path(__file__).with_name("static")
SHARED: Final = Path(__file__).parents[1] / "web" / "static"
FILES: Final = {
    "/": OWN / "index.html",
    "/operator.js": OWN / "operator.js",
    "/operator.css": OWN / "operator.css",
    "/page.css": SHARED / "page.css",
    "/words.js": SHARED / "words.js",
    "/icon.svg": SHARED / "icon.svg",
}
COOKIE: Final = "swarmentum-operator"
TOKEN: Final = "x-swarmentum-token"  # noqa: S105 - the name of a header
BODY_BYTES_MAX: Final = 1 << 18
BODY_SECONDS_MAX: Final = 15.0
SECRET_CHARACTERS_MAX: Final = 128
LOGINS_AT_ONCE, LOGIN_EACH_MS = 10, 6_000.0
REQUESTS_AT_ONCE, REQUEST_EACH_MS = 240, 100.0
ADDRESSES_KEPT: Final = 1024
NOT_STORED: Final = {"cache-control": "no-store"}
TOO_OFTEN: Final = "too many requests from your address: wait a minute, and try again"


def app_of(asks: Asks, hosts: Iterable[str] = (), clock: Callable[[], float] = time.monotonic) -> Any:
    """The whole app. `hosts`: names under which browsers find the page, besides addresses and localhost."""
    page = BrowserRequests(asks, frozenset(host.lower() for host in hosts), clock)
    routes = [Route(path, page.file, methods=["GET"]) for path in FILES]
    routes += [Route(f"/api/{name}", getattr(page, name), methods=["POST"]) for name in ("login", "logout", "ask")]
    return HttpGuard(Starlette(routes=routes, exception_handlers={HTTPException: refused}), bodies=True)


async def refused(request: Request, error: Exception) -> Response:
    """Why a request has no answer, as JSON."""
    assert isinstance(error, HTTPException)
    return answered(PipeReply(error.status_code, {"error": str(error.detail)}), error.headers)


def answered(answer: PipeReply, headers: Any = None) -> Response:
    """An answer as HTTP. Nobody stores it, and no other origin may read it."""
    body = json.dumps(answer.body, ensure_ascii=True, allow_nan=False)
    return Response(body, answer.status, {**NOT_STORED, **(headers or {})}, "application/json")


class BrowserRequests:
    """The requests of browsers."""

    def __init__(self, asks: Asks, hosts: frozenset[str], clock: Callable[[], float]) -> None:
        self._asks, self._hosts, self._clock = asks, hosts, clock
        self._logins = RateLimiter(LOGINS_AT_ONCE, LOGIN_EACH_MS, ADDRESSES_KEPT)
        self._requests = RateLimiter(REQUESTS_AT_ONCE, REQUEST_EACH_MS, ADDRESSES_KEPT)

    async def file(self, request: Request) -> Response:
        """A file of the page. It says nothing about any run."""
        self._check_host(request)
        return FileResponse(FILES[request.url.path], headers={"cache-control": "no-cache"})

    async def login(self, request: Request) -> Response:
        """A session for the secret of a link."""
        secure = self._check(request, self._logins)
        values = await body_of(request)
        secret = text_of(values, "secret")
        answer = await self._asks.ask({"do": "login", "secret": secret, "address": address_of(request)})
        response = answered(answer)
        if answer.cookie:
            response.set_cookie(COOKIE, answer.cookie, path="/", httponly=True, samesite="strict", secure=secure)
        return response

    async def logout(self, request: Request) -> Response:
        """The session ends, here and in the browser."""
        secure = self._check(request, self._requests)
        response = answered(await self._asks.ask({"do": "logout", **self._secrets(request)}))
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict", secure=secure)
        return response

    async def ask(self, request: Request) -> Response:
        """A request in a session."""
        self._check(request, self._requests)
        values = await body_of(request)
        asked = {"what": text_of(values, "what"), "run": text_of(values, "run"), "values": values.get("values", {})}
        if not isinstance(asked["values"], dict):
            raise HTTPException(400, "values: expected an object")
        return answered(await self._asks.ask({"do": "ask", **self._secrets(request), **asked}))

    def _secrets(self, request: Request) -> dict[str, str]:
        found = {"cookie": request.cookies.get(COOKIE, ""), "token": request.headers.get(TOKEN, "")}
        if max(map(len, found.values())) > SECRET_CHARACTERS_MAX:
            raise HTTPException(400, "the cookie or the token is none of this page's")
        return {**found, "address": address_of(request)}

    def _check(self, request: Request, rate: RateLimiter) -> bool:
        """Whether the page is on HTTPS. Raises HTTPException for a request that is not the page's own."""
        host = self._check_host(request)
        try:
            origin = urlsplit(request.headers.get("origin", ""))
            own = origin.scheme in ("http", "https") and origin.netloc.lower() == host
        except ValueError:
            own = False
        if not own or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise HTTPException(403, "another site sent this request: only the page itself may")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "expected JSON")
        if origin.scheme == "http" and not is_loopback(name_of(host)):
            raise HTTPException(
                403,
                "this page logs nobody in over plain HTTP from another machine: use an SSH tunnel, or a proxy with TLS",
            )
        if not rate.allow(address_of(request), 1000 * self._clock()):
            raise HTTPException(429, TOO_OFTEN, {"retry-after": "60"})
        return origin.scheme == "https"

    def _check_host(self, request: Request) -> str:
        """The host that the browser asked for. Raises HTTPException for a name that a stranger's DNS may have."""
        host = request.headers.get("host", "").lower()
        if host in self._hosts or name_of(host) in self._hosts or name_of(host) == "localhost":
            return host
        try:
            ipaddress.ip_address(name_of(host))
        except ValueError:
            text = f"the page does not know the host {host[:64]!r}: start the coordinator with --operator-web-host"
            raise HTTPException(421, text) from None
        return host


def name_of(host: str) -> str:
    """The name or the address in a host, without its port and brackets."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.strip("[]")


def is_loopback(name: str) -> bool:
    """Whether a browser reaches this name on its own machine alone."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def address_of(request: Request) -> str:
    """The address of the browser, or of the proxy before it."""
    return "" if request.client is None else request.client.host[:64]


def text_of(values: dict[str, Any], name: str) -> str:
    """A short text of the body. Raises HTTPException."""
    text = values.get(name, "")
    if not isinstance(text, str) or len(text) > SECRET_CHARACTERS_MAX:
        raise HTTPException(400, f"{name}: expected a text of at most {SECRET_CHARACTERS_MAX} characters")
    return text


async def body_of(request: Request) -> dict[str, Any]:
    """The body of a request, an object. Raises HTTPException for one that is too large or too slow."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            async for part in request.stream():
                data += part
                if len(data) > BODY_BYTES_MAX:
                    raise HTTPException(
                        413, f"the request has more than {BODY_BYTES_MAX} bytes", {"connection": "close"}
                    )
    except TimeoutError:
        raise HTTPException(408, "the request did not come in time", {"connection": "close"}) from None
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is no JSON") from None
    if not isinstance(values, dict):
        raise HTTPException(400, "the request is no object")
    return values


CONNECTIONS_MAX = 64

app = typer.Typer(add_completion=False)


@app.command()
def page(
    listen: Annotated[str, typer.Option(help="host:port of the page.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name under which browsers find the page; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON.")] = False,
) -> None:
    """Serve the operator's page until stdin ends."""
    configure_logging(as_json=as_json)
    asyncio.run(serve(listen, tuple(host or ())))


async def serve(listen: str, hosts: tuple[str, ...]) -> None:
    """Until a stop signal, or the end of stdin."""
    made, pipe, stop = listening(listen), Pipe(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, stop.set)
    server = server_of(app_of(pipe, hosts), CONNECTIONS_MAX)
    serving = asyncio.ensure_future(server.serve(sockets=[made]))
    print_json({"event": "serving", "url": url_of(made)})
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(pipe.run()), serving]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        server.should_exit = True
        for task in waits:
            if task is not serving:
                task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        made.close()


if __name__ == "__main__":
    exit_with(app)
