"""The gate that every gRPC call passes first: places by network address, a time limit for its request, bytes that parse.

gRPC hands a call with one request over only when the request is there, and a stranger need not send the request. So the gate
takes each such call as a stream of requests, and reads one within REQUEST_SECONDS_MAX. The wire shows no difference. Refuses
calls that find no place (`call_limits.py`). Decides nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from coordinator.serving.call_limits import Caller, CallSlot, Lane, Places
from coordinator.serving.metrics import Metrics
from protos.address import network_of, site
from protos.errors import Reason

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
