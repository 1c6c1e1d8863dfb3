"""What a peer does about its connections in each round. No p2pd."""

import asyncio
from typing import Any

import pytest

from node.overlay import connections as module
from node.overlay.connections import Connections
from node.overlay.dht import Discovery


class Overlay:
    """A host whose p2pd connected everybody when it started, the DHT, and a run that lacks nobody."""

    def __init__(self) -> None:
        self.peer_id = "me"
        self.done: list[str] = []

    async def addresses(self) -> list[str]:
        return ["/ip4/127.0.0.1/tcp/1/p2p/me"]

    async def connected(self) -> dict[str, bool]:
        return {"ada": True}

    async def meet(self) -> None:
        self.done.append("meet")

    async def announce(self, addresses: list[str]) -> bool:
        self.done.append("announce")
        return True

    async def peers(self) -> dict[bytes, tuple[str, ...]]:
        self.done.append("look")
        return {}

    async def start(self, known: list[str]) -> None:
        self.done.append("start")

    def forget(self) -> None:
        self.done.append("forget")

    def wanted(self) -> set[str]:
        return set()

    def moved(self, addresses: tuple[str, ...]) -> None:
        pass

    def log(self, event: str, **facts: object) -> None:
        pass


async def rounds(overlay: Overlay, more: int) -> None:
    until = overlay.done.count("meet") + more
    async with asyncio.timeout(240):
        while overlay.done.count("meet") < until:
            await asyncio.sleep(0)


def made(overlay: Overlay) -> Connections:
    host: Any = overlay
    return Connections(host, bytes(32), overlay, lambda _host, _run: host)  # type: ignore[arg-type]


async def test_a_peer_tells_its_life_also_to_peers_that_it_need_not_look_for() -> None:
    """A peer came back, p2pd connected it at once, and nobody was lacking: the others sent into its former life for 15 s."""
    overlay = Overlay()
    running = asyncio.ensure_future(made(overlay).keep_forever())
    try:
        await rounds(overlay, 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "look" not in overlay.done


async def test_a_new_dht_learns_the_addresses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISCOVER_SECONDS", 0.0)
    overlay = Overlay()
    connections = made(overlay)
    running = asyncio.ensure_future(connections.keep_forever())
    try:
        await rounds(overlay, 3)
        assert overlay.done.count("announce") == 1, "the addresses are there, and they have not changed"
        await connections.restart([])
        await rounds(overlay, 3)
        assert overlay.done.count("announce") == 2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_round_while_the_new_dht_joins_the_others_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd had been restarted, and a round came before the new DHT node was there: the peer ended with a bug."""
    monkeypatch.setattr(module, "DISCOVER_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "DISCOVER_SECONDS", 0.0)
    overlay, joined = Overlay(), asyncio.Event()

    class Joining(Discovery):
        async def start(self, bootstrap: list[str]) -> None:
            await joined.wait()

    host: Any = overlay
    made_next: list[Any] = [host, Joining(host, bytes(32))]
    connections = Connections(host, bytes(32), overlay, lambda _host, _run: made_next.pop(0))  # type: ignore[arg-type]
    restarting = asyncio.ensure_future(connections.restart([]))
    await asyncio.sleep(0)  # the old DHT node is forgotten, and the new one joins
    running = asyncio.ensure_future(connections.keep_forever())
    try:
        await rounds(overlay, 3)
        assert not running.done()
        assert not restarting.done()
        assert "announce" not in overlay.done
        joined.set()
        await restarting
    finally:
        running.cancel()
        restarting.cancel()
        await asyncio.gather(running, restarting, return_exceptions=True)


class Behind(Overlay):
    """A run with one other peer, which is connected through a relay: it is behind a router, as this peer is."""

    peer_id = "1"
    other = "12D3KooWGRUbpBkUqRCYhqHTzQvMoUbWeRPHDbYJoCrxRFLwmZwv"

    def __init__(self, seen_by: int) -> None:
        super().__init__()
        self.peer_id = type(self).peer_id
        self.seen_by = seen_by

    async def connected(self) -> dict[str, bool]:
        return {self.other: False}

    async def places(self) -> set[str]:
        return {f"84.1.2.{number}" for number in range(self.seen_by)}

    async def punch(self, remote: str, addresses: list[str]) -> bool:
        self.done.append(f"punch {remote[-4:]}")
        return False


CIRCUIT = f"/ip4/84.1.2.0/tcp/4001/p2p/{Behind.other}/p2p-circuit/p2p/{Behind.other}"


async def punches(overlay: Behind, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "DIAL_DIRECTLY_SECONDS_MIN", 0.0)
    connections = made(overlay)
    for _ in range(10):
        await connections.connect_to([CIRCUIT])
    return sum(what.startswith("punch") for what in overlay.done)


async def test_a_relayed_connection_is_made_again_a_few_times_once_enough_others_have_seen_this_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await punches(Behind(module.OBSERVERS_MIN), monkeypatch) == module.PUNCHES_MAX
    assert await punches(Behind(module.OBSERVERS_MIN - 1), monkeypatch) == 0, "libp2p would not try"


async def test_one_of_two_peers_makes_the_connection_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Behind, "peer_id", "z")
    assert await punches(Behind(module.OBSERVERS_MIN), monkeypatch) == 0
