"""The gate to gRPC: the TCP connections of one network address are bounded, and each call passes here first.

Connections: gRPC bounds only the number of all. `Bounded` looks from time to time at the sockets of a listening port. If a site
has too many connections, it shuts down those without a call, the newest first. gRPC then ends them like any connection whose
other side has gone. It reads `/proc`, so it works on Linux only. On other systems a firewall has to bound the connections
(`deploy/coordinator.nft` is for Linux, too). Refuses to touch a socket that it does not find again under its descriptor.

Calls: places by network address, a time limit for the request, bytes that parse. gRPC hands a call with one request over only
when the request is there, and a stranger need not send the request. So the gate takes each such call as a stream of requests,
and reads one within REQUEST_SECONDS_MAX. The wire shows no difference. Refuses calls that find no place (`call_limits.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from coordinator.serving.call_limits import LOOPBACK, Caller, CallSlot, Lane, Places
from coordinator.serving.metrics import Metrics
from protos.address import network_of, site
from protos.errors import Reason

SITE_MAX = 600
"""Connections of one address (an IPv6 /64 counts as one): a NAT with 500 peers, one connection each, finds room."""
LOOPBACK_MAX = 4096
LOOK_EVERY_S = 2.0
_ESTABLISHED = "01"
_SOCKETS = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_DESCRIPTORS = Path("/proc/self/fd")
_IS_THERE = _DESCRIPTORS.is_dir()


@dataclass(frozen=True)
class Connection:
    """An accepted connection: the socket's number in the kernel, and the other end's address and port."""

    inode: int
    address: str
    port: int

    @property
    def far(self) -> tuple[str, int]:
        """The other end's address and port."""
        return self.address, self.port


def far_end(peer: str) -> tuple[str, int]:
    """The address and port in gRPC's name of a peer: `ipv4:192.0.2.1:50000`, `ipv6:%5B2001:db8::1%5D:50000`."""
    return str(network_of(peer)), int(peer.rpartition(":")[2])


def parse(lines: Iterable[str], port: int) -> list[Connection]:
    """The established connections that a listening port accepted, from the lines of `/proc/net/tcp` or `tcp6`."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) < 10 or words[3] != _ESTABLISHED or int(words[1].rpartition(":")[2], 16) != port:
            continue
        host, _, number = words[2].rpartition(":")
        found.append(Connection(int(words[9]), _address(host), int(number, 16)))
    return found


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's own order."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)


def surplus(
    found: Iterable[Connection], busy: Collection[tuple[str, int]], site_max: int, loopback_max: int
) -> list[Connection]:
    """The connections to close: of each site with too many, those without a call, the newest (highest socket number)
    first."""
    sites: dict[str, list[Connection]] = defaultdict(list)
    for connection in found:
        sites[site(ip_address(connection.address))].append(connection)
    gone = []
    for where, here in sites.items():
        over = len(here) - (loopback_max if where == LOOPBACK else site_max)
        if over > 0:
            idle = sorted((c for c in here if c.far not in busy), key=lambda c: c.inode, reverse=True)
            gone += idle[:over]
    return gone


class Bounded:
    """The connections of one listening port. `busy`: connections with a call under way, as gRPC names them."""

    def __init__(
        self, port: int, busy: Callable[[], Collection[str]], site_max: int = SITE_MAX, loopback_max: int = LOOPBACK_MAX
    ) -> None:
        self._port, self._busy, self._most = port, busy, (site_max, loopback_max)
        self.ended = 0
        """Connections that were shut down since the start."""

    async def run(self) -> None:
        """Look every LOOK_EVERY_S, until cancelled. Ends at once without `/proc`."""
        log = structlog.get_logger("coordinator").bind(step=0, peer="-")
        while _IS_THERE:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = await asyncio.to_thread(self.look, {far_end(peer) for peer in self._busy()})
            if ended:
                self.ended += ended
                log.warning("one network address has too many connections; its idle ones are closed", ended=ended)

    def look(self, busy: Collection[tuple[str, int]]) -> int:
        """Look once. Returns the number of connections that were shut down. Blocks, because it reads each descriptor."""
        if len(list(_DESCRIPTORS.iterdir())) <= min(self._most):
            return 0  # to read the tables of 500 connections every 2 s took half of an idle coordinator's CPU time
        found: list[Connection] = []
        for table in _SOCKETS:
            with suppress(OSError), table.open() as lines:
                found += parse(lines, self._port)
        if len(found) <= min(self._most):
            return 0
        gone = {connection.inode: connection for connection in surplus(found, busy, *self._most)}
        return sum(_shut(int(path.name), gone) for path in _DESCRIPTORS.iterdir()) if gone else 0


def _shut(descriptor: int, gone: dict[int, Connection]) -> bool:
    """Shut this descriptor's socket down, if it is one of these. The check uses a copy that no other code can close."""
    try:
        if _inode(descriptor) not in gone:
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if _inode(copy.fileno()) not in gone:
                return False
            copy.shutdown(socket.SHUT_RDWR)
    except OSError:  # the connection has ended meanwhile
        return False
    return True


def _inode(descriptor: int) -> int:
    """The inode of the socket behind a descriptor; -1 if it is no socket."""
    text = str((_DESCRIPTORS / str(descriptor)).readlink())
    return int(text[8:-1]) if text.startswith("socket:[") else -1


REQUEST_SECONDS_MAX = 10.0
Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types
_LANES = {
    "GetRun": Lane.READING,
    "ListEntries": Lane.READING,
    "GetChallenge": Lane.JOINING,
    "TellFailure": Lane.JOINING,
    "MayJoin": Lane.JOINING,
    "Join": Lane.JOINING,
    "Follow": Lane.PEERS,
    "OfferEntries": Lane.PEERS,
    "Report": Lane.PEERS,
    "Tell": Lane.PEERS,
}
_PEERS_SERVICE, _OPERATORS_SERVICE = "swarmentum.v1.CoordinatorService", "swarmentum.v1.OperatorService"


_admits: ContextVar[Callable[[bytes], None] | None] = ContextVar("admits", default=None)


def admitted(session_id: bytes) -> None:
    """The running call belongs to a session. The call gives its stranger's place back, and its connection gets places of its
    own."""
    admits = _admits.get()
    if admits is not None:
        admits(session_id)


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Before all services of one server. `known` says whether a peer with a session is at a site."""

    def __init__(self, places: Places, known: Callable[[str], bool], metrics: Metrics) -> None:
        self._places, self._known, self._metrics = places, known, metrics
        self._made: dict[str, Any] = {}
        self.under_way: Counter[str] = Counter()
        """Calls of each connection, as gRPC names it."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """gRPC calls this for each call. The gate makes one handler a method."""
        if details.method in self._made:
            return self._made[details.method]
        handler = await continuation(details)
        if handler is not None:
            self._made[details.method] = self._guarded(handler, lane_of(details.method))
        return handler and self._made[details.method]

    def _guarded(self, handler: Any, lane: Lane) -> Any:
        """The same method behind the gate, as a stream of raw requests."""
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._telling(handler, lane), None, handler.response_serializer
            )
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(requests: Any, context: Context) -> Any:
            place = await self._enter(lane, context)
            _admits.set(partial(self._admit, place, context.peer()))
            with self._counted(context.peer()), place:
                request = await self._request(requests, context, handler.request_deserializer)
                return await inner(request, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(call, None, _serialised(handler.response_serializer))
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    def _telling(self, handler: Any, lane: Lane) -> Any:
        """A stream of requests. The first has to come in time, because it names the stream's peer."""

        async def call(requests: Any, context: Context) -> None:
            place = await self._enter(lane, context)
            _admits.set(partial(self._admit, place, context.peer()))

            async def parsed() -> AsyncIterator[Any]:
                yield await self._request(requests, context, handler.request_deserializer)
                async for data in requests:
                    yield await self._parsed(data, context, handler.request_deserializer)

            with self._counted(context.peer()), place:
                await handler.stream_stream(parsed(), context)

        return call

    @contextmanager
    def _counted(self, connection: str) -> Iterator[None]:
        self.under_way[connection] += 1
        try:
            yield
        finally:
            self.under_way[connection] -= 1
            if not self.under_way[connection]:
                del self.under_way[connection]

    async def _enter(self, lane: Lane, context: Context) -> CallSlot:
        at = site(network_of(context.peer()))
        place = self._places.acquire(lane, Caller(at, context.peer(), self._known(at)), 1000 * time.monotonic())
        if isinstance(place, str):
            self._metrics.refused.labels(Reason.TOO_MANY.value).inc()
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, place)
        return place

    def _admit(self, place: CallSlot, connection: str, session_id: bytes) -> None:
        place.leave()
        self._places.met(session_id, connection)

    async def _request(self, requests: Any, context: Context, parse: Callable[[bytes], Any]) -> Any:
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                data = await anext(aiter(requests))
        except StopAsyncIteration:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "malformed: there is no request")
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time")
        return await self._parsed(data, context, parse)

    async def _parsed(self, data: bytes, context: Context, parse: Callable[[bytes], Any]) -> Any:
        try:
            return parse(data)
        except DecodeError:
            self._metrics.refused.labels(Reason.MALFORMED.value).inc()
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "malformed: not a request of this method")


def _serialised(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A serializer that lets bytes pass, because an event is serialised once for many streams."""
    return lambda answer: answer if isinstance(answer, bytes) else serialize(answer)


def lane_of(method: str) -> Lane:
    """The lane of a method, by its whole name `/package.Service/Method`."""
    service, _, name = method.strip("/").rpartition("/")
    if service == _PEERS_SERVICE:
        return _LANES[name]
    return Lane.OPERATOR if service == _OPERATORS_SERVICE else Lane.HEALTH


async def _abort(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort returned")
