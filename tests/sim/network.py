"""The simulated network: messages that take time, get lost, come twice or late; connections that stall and break.

`Net` decides what happens to each message, from the seed; the rest stands for gRPC, libp2p's streams and gossip, and the
DHT, with the same interfaces and the same bytes on the wire. Knows nothing of the swarm.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from node.overlay.daemon import Ready
from node.overlay.host import Host, nothing_to_do
from node.overlay.links import STREAM_OPEN_SECONDS_MAX, StreamHandler
from node.overlay.pubsub import MessageHandler
from protos.errors import NetworkError, Refusal
from protos.identity import Identity, peer_id
from tests.sim.clock import VirtualLoop, context_of

COORDINATOR = "coordinator"
# A connection that carries nothing for this long is given up by both ends (keepalive).
BROKEN_SECONDS = 20.0
POLL_SECONDS = 0.5
PIPES_KEPT = 100000
# QUIC gives up a connection over which nothing comes.
IDLE_SECONDS = 30.0


@dataclass
class Weather:
    """How bad it is. `loss`, `twice`: probabilities; the rest in seconds."""

    delay: tuple[float, float] = (0.005, 0.05)
    loss: float = 0.0
    twice: float = 0.0
    jitter: float = 0.0


@dataclass
class Net:
    """Who reaches whom, and when a message arrives."""

    loop: VirtualLoop
    random: random.Random
    weather: Weather = field(default_factory=Weather)
    groups: dict[str, int] = field(default_factory=dict)
    alive: dict[str, int] = field(default_factory=dict)
    """Name -> number of its present life; 0: not running."""
    messages: int = 0

    def joined(self, one: str, other: str) -> bool:
        """Whether packets get through."""
        awake = not self.loop.asleep & {one, other}
        return awake and self.groups.get(one, 0) == self.groups.get(other, 0)

    def up(self, name: str) -> int:
        return self.alive.get(name, 0)

    def delay(self) -> float:
        self.messages += 1
        return self.random.uniform(*self.weather.delay) + self.random.uniform(0.0, self.weather.jitter)

    def delay_in_order(self) -> float:
        """Over a connection a lost packet is sent again: it takes longer."""
        again = 0.0
        while again < 3.0 and self.random.random() < self.weather.loss:
            again += self.random.uniform(0.2, 1.0)
        return self.delay() + again

    async def hop(self, one: str, other: str, seconds_max: float) -> None:
        """One message on a connection. TimeoutError if it does not get through in time."""
        left = seconds_max
        while not self.joined(one, other):
            if left <= 0:
                raise TimeoutError(f"{one} does not reach {other}")
            await asyncio.sleep(POLL_SECONDS)
            left -= POLL_SECONDS
        delay = self.delay_in_order()
        await asyncio.sleep(min(delay, max(left, 0.0)))
        if delay > left:
            raise TimeoutError(f"{one} does not reach {other} in time")


class Pipe:
    """One direction of a connection: bytes or messages in order; broken when it carries nothing for too long."""

    def __init__(
        self, net: Net, one: str, other: str, arrive: Callable[[Any], None], broken: Callable[[], None]
    ) -> None:
        self._net, self._ends = net, (one, other)
        self._lives = net.up(one), net.up(other)
        self._arrive, self._broken = arrive, broken
        self._waiting: deque[tuple[float, Any]] = deque()
        self._free_at, self._stalled = 0.0, 0.0
        self.open = True

    def send(self, message: Any) -> None:
        self._free_at = max(self._free_at, self._net.loop.now) + self._net.delay_in_order()
        self._waiting.append((self._free_at, message))
        if len(self._waiting) == 1:
            self._net.loop.call_later(self._free_at - self._net.loop.now, self._deliver, context=context_of(""))

    def _deliver(self) -> None:
        """The oldest message arrives, or waits for better times; those behind it wait too."""
        if not self.open:
            return
        if self._net.up(self._ends[1]) != self._lives[1] or self._stalled > BROKEN_SECONDS:
            self.close()
        elif not self._net.joined(*self._ends):
            self._stalled += POLL_SECONDS
            self._net.loop.call_later(POLL_SECONDS, self._deliver)
        else:
            self._stalled = 0.0
            self._arrive(self._waiting.popleft()[1])
            if self._waiting:
                self._net.loop.call_at(max(self._waiting[0][0], self._net.loop.now), self._deliver)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._broken()

    def give_up(self) -> None:
        """The other end notices that nothing comes any more."""
        self.open = False
        self._broken()


# ---- gRPC ------------------------------------------------------------------------------------------------------------


class CallError(grpc.RpcError):  # type: ignore[misc]
    """What a stub raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Context:
    """The servicer's side of a call."""

    def __init__(self, write: Callable[[Any], Awaitable[None]] | None = None) -> None:
        self._write = write

    def peer(self) -> str:
        """No network address."""
        return ""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise CallError(code, details)

    async def write(self, message: Any) -> None:
        assert self._write is not None
        await self._write(message)


class Channel:
    """A client's channel to the coordinator: the real stubs call these. `server` gives what answers now, or None."""

    def __init__(self, net: Net, me: str, server: Callable[[], Any]) -> None:
        self._net, self._me, self._server = net, me, server

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        name = path.rpartition("/")[2]

        async def call(request: Any, timeout: float) -> Any:
            data, net = request_serializer(request), self._net
            try:
                async with asyncio.timeout(timeout):
                    await net.hop(self._me, COORDINATOR, timeout)
                    server = self._server()
                    if server is None:
                        raise CallError(UNAVAILABLE, "connection refused")
                    response = await server.call(name, type(request).FromString(data))
                    await net.hop(COORDINATOR, self._me, timeout)
            except TimeoutError as error:
                raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error) or "deadline exceeded") from error
            return response_deserializer(response.SerializeToString())

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        name = path.rpartition("/")[2]
        return lambda request: _Stream(
            self._net,
            self._me,
            self._server,
            name,
            type(request).FromString(request_serializer(request)),
            response_deserializer,
        )

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """The call `Tell`: messages in order both ways."""
        return lambda: _Telling(self._net, self._me, self._server, response_deserializer)

    def unary(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...


class _Telling:
    """A stream of reports, and a stream of answers."""

    def __init__(self, net: Net, me: str, server: Callable[[], Any], deserializer: Any) -> None:
        self._net, self._me, self._server, self._deserializer = net, me, server, deserializer
        self._asked: asyncio.Queue[Any] = asyncio.Queue()
        self._came: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._up: Pipe | None = None
        self._down: Pipe | None = None
        self._task: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None

    async def write(self, request: Any) -> None:
        if self._error is not None:
            raise self._error
        if self._up is None:
            await self._open()
        assert self._up is not None
        self._up.send(type(request).FromString(request.SerializeToString()))

    async def _open(self) -> None:
        try:
            await self._net.hop(self._me, COORDINATOR, BROKEN_SECONDS)
        except TimeoutError as error:
            raise self._broke(str(error)) from error
        server = self._server()
        if server is None:
            raise self._broke("connection refused")
        self._up = Pipe(self._net, self._me, COORDINATOR, self._asked.put_nowait, self._broke)
        down = self._down = Pipe(self._net, COORDINATOR, self._me, self._came.put_nowait, self._broke)

        async def write(message: Any) -> None:
            down.send(message.SerializeToString())

        def ended(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, CallError), error
            down.send(CallError(UNAVAILABLE, "the server stopped") if task.cancelled() else error)

        self._task = server.spawn(server.service.Tell(self._requests(), Context(write)))
        self._task.add_done_callback(ended)

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield await self._asked.get()

    def _broke(self, why: str = "the connection broke") -> BaseException:
        self._error = CallError(UNAVAILABLE, why)
        self._came.put_nowait(self._error)
        return self._error

    async def read(self) -> Any:
        came = await self._came.get()
        if isinstance(came, BaseException):
            self._error = came
            raise came
        return None if came is None else self._deserializer(came)

    def cancel(self) -> None:
        for pipe in (self._up, self._down):
            if pipe is not None:
                pipe.open = False
        if self._task is not None:
            self._task.cancel()


class _Stream:
    """A server-streaming call."""

    def __init__(
        self, net: Net, me: str, server: Callable[[], Any], name: str, request: Any, deserializer: Any
    ) -> None:
        self._net, self._me, self._server = net, me, server
        self._name, self._request, self._deserializer = name, request, deserializer
        self._came: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._task: asyncio.Task[Any] | None = None

    def _broke(self) -> None:
        self._came.put_nowait(CallError(UNAVAILABLE, "the connection broke"))
        if self._task is not None:
            self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        net = self._net
        try:
            await net.hop(self._me, COORDINATOR, BROKEN_SECONDS)
        except TimeoutError as error:
            raise CallError(UNAVAILABLE, str(error)) from error
        server = self._server()
        if server is None:
            raise CallError(UNAVAILABLE, "connection refused")
        pipe = Pipe(net, COORDINATOR, self._me, self._came.put_nowait, self._broke)

        async def write(message: Any) -> None:
            pipe.send(message if isinstance(message, bytes) else message.SerializeToString())

        def ended(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            assert error is None or isinstance(error, CallError), error
            pipe.send(CallError(UNAVAILABLE, "the server stopped") if task.cancelled() else error)

        self._task = server.spawn(getattr(server.service, self._name)(self._request, Context(write)))
        self._task.add_done_callback(ended)
        watch = net.loop.create_task(self._watch(pipe))
        try:
            while (came := await self._came.get()) is not None:
                if isinstance(came, BaseException):
                    raise came
                yield self._deserializer(came)
        finally:
            watch.cancel()
            pipe.open = False
            self.cancel()

    async def _watch(self, pipe: Pipe) -> None:
        """Keepalive: a connection over which nothing gets is given up."""
        silent = 0.0
        while silent < BROKEN_SECONDS:
            await asyncio.sleep(5.0)
            silent = 0.0 if self._net.joined(self._me, COORDINATOR) else silent + 5.0
        pipe.close()

    def cancel(self) -> None:
        """The client hangs up; the server notices when it can."""
        if self._task is not None and not self._task.done():
            task = self._task
            self._net.loop.call_later(self._net.delay(), task.cancel)


# ---- libp2p ----------------------------------------------------------------------------------------------------------


class Overlay:
    """All hosts that are on the overlay now, and the DHT's records."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.hosts: dict[str, SimHost] = {}
        self.silent: set[bytes] = set()
        """Killed while others have QUIC connections to them: who asks them for a stream hears nothing."""
        self.records: dict[bytes, tuple[str, ...]] = {}

    def by_id(self, name: str) -> SimHost | None:
        return next((host for host in self.hosts.values() if host.peer_id == name), None)


class _Writer:
    """The writing end of a stream."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def write(self, data: bytes) -> None:
        self._pipe.send(bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self._pipe.send(None)

    @property
    def transport(self) -> _Writer:
        """What `abort` is called on."""
        return self

    def abort(self) -> None:
        self.close()


class SimHost(Host):
    """A peer's place on the simulated overlay: what `node.overlay.host.Host` offers, without p2pd."""

    def __init__(
        self,
        overlay: Overlay,
        name: str,
        identity: Identity,
        path: Path,
        settings: Any,
        refused: Callable[[Refusal], None],
    ) -> None:
        super().__init__(identity, path, settings, refused)
        self._overlay, self._net, self.name = overlay, overlay.net, name
        self.tasks: set[asyncio.Task[Any]] = set()
        self._handlers: dict[str, StreamHandler] = {}
        self._topics: dict[str, MessageHandler] = {}
        self.pipes: list[Pipe] = []
        self.two_faced: Callable[[bytes], bytes] | None = None
        """What a liar tells every other peer instead of a message."""
        self.lied_to: Callable[[bytes], None] = lambda said: None
        """Is told what somebody really heard."""

    async def start(self, bootstrap: tuple[str, ...] = (), restarted: Ready = nothing_to_do) -> None:
        self._overlay.hosts[self.name] = self
        self._overlay.silent.discard(self.identity.public_key)

    async def find_out(self) -> None:
        """Here everybody can dial everybody."""

    async def keep_reachable_forever(self) -> None:
        """See `find_out`."""

    async def stop(self) -> None:
        self.vanish()

    def vanish(self, *, silently: bool = False) -> None:
        """The process is gone; `silently`: nobody who is connected to it is told."""
        if self._overlay.hosts.get(self.name) is self:
            del self._overlay.hosts[self.name]
        if silently:
            self._overlay.silent.add(self.identity.public_key)
            mute = [pipe for pipe in self.pipes if pipe.open]
            for pipe in mute:
                pipe.open = False
            self._net.loop.call_later(IDLE_SECONDS, lambda: [pipe.give_up() for pipe in mute])
        for task in list(self.tasks):
            task.cancel()
        for pipe in self.pipes:
            if pipe.open:
                pipe.send(None)

    async def addresses(self) -> list[str]:
        return [f"/ip4/10.0.0.1/tcp/1/p2p/{self.peer_id}"]

    async def connected(self) -> dict[str, bool]:
        others = (host for host in self._overlay.hosts.values() if host is not self)
        return {host.peer_id: True for host in others if self._net.joined(self.name, host.name)}

    async def subscribers(self, topic: str) -> set[str]:
        here = await self.connected()
        return {host.peer_id for host in self._overlay.hosts.values() if host.peer_id in here and topic in host._topics}

    async def connect(self, addresses: list[str]) -> bool:
        other = self._overlay.by_id(addresses[0].rpartition("/p2p/")[2])
        await asyncio.sleep(self._net.delay())
        return other is not None and self._net.joined(self.name, other.name)

    async def meet(self) -> None:
        """A connection of the simulated overlay ends with the process."""

    async def dial_directly(self, remote: str, addresses: list[str]) -> bool:
        return True

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    async def subscribe(self, topic: str, handler: MessageHandler) -> None:
        self._topics[topic] = handler

    async def open(self, remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        other = self._overlay.by_id(peer_id(remote))
        try:
            if remote in self._overlay.silent:
                await asyncio.sleep(STREAM_OPEN_SECONDS_MAX)
                raise TimeoutError("nothing comes back")
            if other is None:
                await asyncio.sleep(self._net.delay())
                raise NetworkError(f"peer {peer_id(remote)} cannot be reached: nobody is there")
            await self._net.hop(self.name, other.name, STREAM_OPEN_SECONDS_MAX)
            if self._overlay.hosts.get(other.name) is not other:
                raise NetworkError(f"peer {peer_id(remote)} cannot be reached: it ended meanwhile")
        except TimeoutError as error:
            raise NetworkError(f"peer {peer_id(remote)} cannot be reached: {error}") from error
        here, there = asyncio.StreamReader(), asyncio.StreamReader()
        out = Pipe(self._net, self.name, other.name, _feeding(there), lambda: _end(there))
        back = Pipe(self._net, other.name, self.name, _feeding(here), lambda: _end(here))
        other.pipes = [*[pipe for pipe in other.pipes if pipe.open][-PIPES_KEPT:], back]
        self.pipes = [*[pipe for pipe in self.pipes if pipe.open][-PIPES_KEPT:], out]
        answer = other._answer(protocol, self.peer_id, there, _Writer(back))
        task = self._net.loop.create_task(answer, context=context_of(other.name))
        other.tasks.add(task)
        task.add_done_callback(other.tasks.discard)
        return here, _Writer(out)  # type: ignore[return-value]

    async def _answer(self, protocol: str, remote: str, reader: asyncio.StreamReader, writer: Any) -> None:
        try:
            await self._handlers[protocol](remote, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def publish(self, topic: str, data: bytes) -> None:
        """GossipSub delivers each message once to each peer, if at all; the weather may bring it twice."""
        weather, chance = self._net.weather, self._net.random
        other = data if self.two_faced is None else self.two_faced(data)
        faces = (data, other)
        for place, name in enumerate(sorted(self._overlay.hosts)):
            if name == self.name or not self._net.joined(self.name, name) or chance.random() < weather.loss:
                continue
            said = faces[place % 2]
            for _ in range(1 + (chance.random() < weather.twice)):
                self._net.loop.call_later(self._net.delay(), self._arrive, name, topic, said, context=context_of(""))
            if other != data:
                # who was told the one passes it on to those who were told the other
                self._net.loop.call_later(self._net.delay(), self._pass_on, name, topic, said, context=context_of(""))

    def _pass_on(self, by: str, topic: str, said: bytes) -> None:
        for name in sorted(self._overlay.hosts):
            if name not in (by, self.name) and self._net.joined(by, name):
                self._net.loop.call_later(self._net.delay(), self._arrive, name, topic, said, context=context_of(""))

    async def publish_to_each(self, topic: str, data: bytes) -> None:
        await self.publish(topic, data)

    def _arrive(self, name: str, topic: str, data: bytes) -> None:
        host = self._overlay.hosts.get(name)
        if host is not None and topic in host._topics:
            self.lied_to(data)
            self._net.loop.call_soon(host._topics[topic], data, context=context_of(name))


def _feeding(reader: asyncio.StreamReader) -> Callable[[bytes | None], None]:
    def feed(data: bytes | None) -> None:
        if data is None:
            _end(reader)
        elif not reader.at_eof() and not reader._eof:  # type: ignore[attr-defined]
            reader.feed_data(data)

    return feed


def _end(reader: asyncio.StreamReader) -> None:
    if not reader._eof:  # type: ignore[attr-defined]
        reader.feed_eof()


class SimDiscovery:
    """The DHT: who announced itself lately."""

    def __init__(self, overlay: Overlay, host: Host, run_id: bytes) -> None:
        self._overlay, self._host, self._run_id = overlay, host, run_id

    async def start(self, bootstrap: Sequence[str]) -> None: ...

    async def stop(self) -> None: ...

    def forget(self) -> None: ...

    async def announce(self, addresses: list[str]) -> bool:
        self._overlay.records[self._host.identity.public_key] = tuple(addresses)
        return True

    async def peers(self) -> dict[bytes, tuple[str, ...]]:
        return dict(self._overlay.records)
