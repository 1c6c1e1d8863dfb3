"""Local ports that lead p2pd through an HTTP proxy: for which addresses, and what they pass on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from node.overlay import tunnels
from node.overlay.tunnels import HERE, Tunnels
from protos.identity import Identity
from tests.unit.connect_proxy import connect_proxy, speaks_first
from tests.waiting import free_port, until

PEER = Identity.generate().peer_id
FIRST = b"\x13/multistream/1.0.0\n"


class Log:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **facts: Any) -> None:
        self.told.append((event, facts))

    warning = info


def at(port: int) -> str:
    return f"/ip4/{HERE}/tcp/{port}/p2p/{PEER}"


@contextmanager
def network(monkeypatch: pytest.MonkeyPatch, *behind: int) -> Iterator[Any]:
    """The proxy of the environment, which leads to a server where these ports are named."""
    with connect_proxy() as proxy, speaks_first(FIRST) as server:
        proxy.leads.update({f"{HERE}:{port}": server for port in behind})
        monkeypatch.setenv("https_proxy", proxy.url)
        yield proxy


@pytest.fixture(autouse=True)
def _no_bypass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def ways(log: Log) -> AsyncIterator[Tunnels]:
    made = Tunnels(log)
    yield made
    await made.close()


def test_without_a_proxy_every_address_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("https_proxy", raising=False)
    addresses = [at(free_port()), "/ip4/127.0.0.1/udp/9/quic-v1/p2p/" + PEER, "no address"]
    assert asyncio.run(Tunnels(Log()).ways(addresses)) == addresses


async def test_only_what_the_proxy_alone_reaches_goes_through_it(
    ways: Tunnels, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, refused, beyond = free_port(), free_port(), f"/p2p-circuit/p2p/{Identity.generate().peer_id}"
    with network(monkeypatch, behind) as proxy, socket.create_server((HERE, 0)) as open_here:
        direct = int(open_here.getsockname()[1])
        proxy.leads[f"{HERE}:{direct}"] = proxy.leads[f"{HERE}:{behind}"]
        addresses = [at(direct), at(behind), at(refused), f"/ip4/{HERE}/udp/{behind}/quic-v1/p2p/{PEER}"]
        *found, circuit = await ways.ways([*addresses, at(behind) + beyond])
        assert circuit == found[1] + beyond, "its relay would be dialled directly"
        assert [found[0], *found[2:]] == [addresses[0], *addresses[2:]]
        assert found[1] not in addresses
        local = found[1].rpartition("/p2p/")[0]
        assert ways.real(local) == f"/ip4/{HERE}/tcp/{behind}"
        assert ways.real(f"/ip4/{HERE}/tcp/{direct}") == f"/ip4/{HERE}/tcp/{direct}"
        facts = {"proxy": f"127.0.0.1:{proxy.port}", "addresses": [addresses[1]]}
        assert log.told == [("these peers are reached through the HTTP proxy", facts)]
        assert await ways.ways(addresses) == found, "each start of p2pd dials the same port"
        assert len(log.told) == 1
        reader, writer = await asyncio.open_connection(HERE, int(local.split("/")[4]))
        writer.write(b"x" * 200_000)
        assert await reader.readexactly(len(FIRST)) == FIRST
        assert await reader.readexactly(200_000) == b"x" * 200_000
        await ways.close()
        assert await reader.read(1) == b"", "the connection outlived its tunnel"
        writer.close()
        with pytest.raises(OSError, match=r"\[Errno"):
            await asyncio.open_connection(HERE, int(local.split("/")[4]))


async def test_a_network_that_opens_needs_no_proxy_any_more(ways: Tunnels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop comes home: its next p2pd dials directly, although the environment still names the proxy."""
    behind = free_port()
    with network(monkeypatch, behind) as proxy:
        assert await ways.ways([at(behind)]) != [at(behind)]
        proxy.leads.clear()
        with socket.create_server((HERE, behind)):
            assert await ways.ways([at(behind)]) == [at(behind)]


async def test_a_tunnel_whose_proxy_is_gone_says_so_and_ends_the_connection(
    ways: Tunnels, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = free_port()
    with network(monkeypatch, behind) as proxy:
        [local] = await ways.ways([at(behind)])
        proxy.leads.clear()
        reader, writer = await asyncio.open_connection(HERE, int(local.split("/")[4]))
        assert await reader.read(1) == b""
        writer.close()
        event, facts = log.told[-1]
        assert event == "the HTTP proxy does not connect"
        assert "403 Forbidden" in facts["why"]


async def test_the_number_of_tunnels_and_connections_is_bounded(
    ways: Tunnels, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port() for _ in range(tunnels.TUNNELS_MAX + 2)]
    with network(monkeypatch, *ports):
        found = await ways.ways([at(port) for port in ports])
        new = [address for address in found if address not in map(at, ports)]
        assert len(new) == tunnels.TUNNELS_MAX
        [left] = [facts["addresses"] for event, facts in log.told if "has no way" in event]
        assert len(left) == 2
        assert set(left) < set(found), "who runs the peer is told of each"
        monkeypatch.setattr(tunnels, "CONNECTIONS_MAX", 1)
        streams = []
        for _ in range(2):
            streams.append(await asyncio.open_connection(HERE, int(new[0].split("/")[4])))
            heard = await streams[-1][0].read(1)
            assert heard == (FIRST[:1] if len(streams) == 1 else b"")
        for _, writer in streams:
            writer.close()


async def test_a_silent_proxy_takes_no_threads_of_others(ways: Tunnels, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 connections to one tunnel kept aggregation and publication waiting for 50 s; connections counted once they led on."""
    monkeypatch.setattr(tunnels, "CONNECT_SECONDS_MAX", 3600.0)
    behind = free_port()
    with network(monkeypatch, behind) as proxy:
        [local] = await ways.ways([at(behind)])
        proxy.silent = True
        streams = [await asyncio.open_connection(HERE, int(local.split("/")[4])) for _ in range(60)]
        ended = [asyncio.ensure_future(reader.read(1)) for reader, _ in streams]
        await until(lambda: sum(it.done() for it in ended) >= 60 - tunnels.CONNECTIONS_MAX)
        await asyncio.to_thread(int)
        assert sum(it.done() for it in ended) == 60 - tunnels.CONNECTIONS_MAX, "the others wait for the proxy"
        for _, writer in streams:
            writer.close()
        await asyncio.gather(*ended)
