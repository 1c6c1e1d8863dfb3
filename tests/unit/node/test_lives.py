"""Peers that come back: whose connections are dropped, and who dials again. Real streams over sockets, no p2pd."""

from __future__ import annotations

import asyncio
import socket

import pytest

from node.overlay import host
from node.overlay.host import Incarnations
from protos.errors import NetworkError
from protos.identity import Identity, public_key_of


class Peer:
    """Its `Incarnations`, and what they did to its connections."""

    def __init__(self, world: dict[bytes, Peer]) -> None:
        self.identity = Identity.generate()
        self.world = world
        self.dropped: list[str] = []
        self.dialled: list[str] = []
        self.lives = Incarnations(self.open, self.drop, self.dial)
        world[self.identity.public_key] = self

    @property
    def id(self) -> str:
        return self.identity.peer_id

    async def drop(self, remote: str) -> None:
        self.dropped.append(remote)

    async def dial(self, remote: str) -> None:
        self.dialled.append(remote)

    async def open(self, remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if remote not in self.world:
            raise NetworkError("nobody is there")
        assert protocol == host.PROTOCOL
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=there)
        other = self.world[remote]

        async def answer() -> None:
            try:
                if await other.lives.answer(self.id, reader, writer):
                    other.dropped.append(self.id)
            finally:
                writer.close()

        self.answering = asyncio.create_task(answer())
        return await asyncio.open_connection(sock=here)


@pytest.fixture
def world() -> dict[bytes, Peer]:
    return {}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "REDIAL_SECONDS", 0.0)


async def test_peers_that_meet_for_the_first_time_drop_nothing(world: dict[bytes, Peer]) -> None:
    ada, bob = Peer(world), Peer(world)
    await ada.lives.meet({bob.id})
    await bob.lives.meet({ada.id})
    assert ada.dropped == bob.dropped == ada.dialled == bob.dialled == []


async def test_who_comes_back_is_dropped_and_dials_again(world: dict[bytes, Peer]) -> None:
    ada, bob = Peer(world), Peer(world)
    await bob.lives.meet({ada.id})
    bob.lives.begin()
    await bob.lives.meet({ada.id})
    assert ada.dropped == [bob.id]
    assert bob.dialled == [ada.id]
    assert bob.dropped == ada.dialled == []
    await bob.lives.meet({ada.id})  # the same life on the same connection says nothing
    assert ada.dropped == [bob.id]


async def test_a_peer_that_ended_its_connections_itself_is_not_dropped(world: dict[bytes, Peer]) -> None:
    ada, bob = Peer(world), Peer(world)
    await bob.lives.meet({ada.id})
    bob.lives.begin(again=True)
    await bob.lives.meet({ada.id})
    assert ada.dropped == bob.dropped == ada.dialled == bob.dialled == []


async def test_who_asks_somebody_that_came_back_drops_and_dials(world: dict[bytes, Peer]) -> None:
    ada, bob = Peer(world), Peer(world)
    await ada.lives.meet({bob.id})
    bob.lives.begin()
    await ada.lives.meet(set())  # the connection ended
    await ada.lives.meet({bob.id})
    assert ada.dropped == ada.dialled == [bob.id]
    assert bob.dropped == bob.dialled == []


async def test_peers_that_do_not_answer_are_left_alone(
    world: dict[bytes, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, gone = Peer(world), Identity.generate()
    await ada.lives.meet({gone.peer_id})
    assert ada.dropped == ada.dialled == []
    monkeypatch.setattr(host, "SECONDS_MAX", 0.05)
    silent = Peer(world)
    ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open_silent(remote: bytes, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        here, there = socket.socketpair()
        ends.append(await asyncio.open_connection(sock=there))
        return await asyncio.open_connection(sock=here)

    ada.lives = Incarnations(open_silent, ada.drop, ada.dial)
    await ada.lives.meet({silent.id})
    assert ada.dropped == ada.dialled == []
    assert await ends[0][0].read() != b""  # it was told
    ends[0][1].close()


async def test_a_stranger_makes_nobody_remember_more_than_the_limit(
    world: dict[bytes, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "KNOWN_MAX", 3)
    ada = Peer(world)
    others = [Peer(world) for _ in range(5)]
    for other in others:
        await other.lives.meet({ada.id})
        assert public_key_of(other.id) in world
    assert list(ada.lives._known) == [other.id for other in others[-3:]]
