"""Whether a peer can be dialled, and its relays: conclusions from answers, and real daemons that dial back and change."""

import asyncio
from pathlib import Path

import pytest

from node.overlay import reach
from node.overlay.host import Host
from node.overlay.reach import PORTS_MAX, PROTOCOL, ReachAnswer, ReachState, Remote, ask_all, conclude, tcp_ports
from node.overlay.settings import OverlaySettings, hosts_of
from protos.errors import NetworkError
from protos.identity import Identity
from tests.unit.node.test_overlay import hosts

HOME = "84.1.2.3"
ME = "12D3KooWGRUbpBkUqRCYhqHTzQvMoUbWeRPHDbYJoCrxRFLwmZwv"


def told(ip: str, *ports: int, relays: bool = False, seen_at: str = HOME, round_trip: float = 0.1) -> ReachAnswer:
    return ReachAnswer(Remote(f"peer-{ip}", f"/ip4/{ip}/udp/4001/quic-v1", ip), round_trip, relays, seen_at, ports)


def test_all_that_were_asked_could_dial_it() -> None:
    found = conclude([told("11.0.0.1", 4001), told("12.0.0.1", 4001, 4002, relays=True)], ME)
    assert found.verdict is ReachState.PUBLIC
    assert found.addresses == (f"/ip4/{HOME}/tcp/4001/p2p/{ME}", f"/ip4/{HOME}/tcp/4002/p2p/{ME}")
    assert found.relays == ()


def test_nobody_could_dial_it_and_the_nearest_relays_come_first() -> None:
    far = told("11.0.0.1", relays=True, round_trip=0.3)
    near = told("12.0.0.1", relays=True, round_trip=0.02)
    found = conclude([far, told("13.0.0.1"), near], ME)
    assert found.verdict is ReachState.PRIVATE
    assert found.relays == (
        "/ip4/12.0.0.1/udp/4001/quic-v1/p2p/peer-12.0.0.1",
        "/ip4/11.0.0.1/udp/4001/quic-v1/p2p/peer-11.0.0.1",
    )


def test_a_liar_among_the_asked_costs_a_relay_and_no_address() -> None:
    found = conclude([told("11.0.0.1", 4001), told("66.0.0.1", relays=True)], ME)
    assert found.verdict is ReachState.PRIVATE
    assert found.addresses
    assert found.relays


def test_a_peer_that_is_dialled_over_ipv6_alone_takes_relays_for_peers_with_ipv4_alone() -> None:
    six = "2001:4860::7"
    alone = conclude([told("2001:4860::1", 4001, seen_at=six)], ME)
    assert (alone.verdict, alone.relays) == (ReachState.PUBLIC, ())
    with_relay = conclude([told("2001:4860::1", 4001, seen_at=six, relays=True)], ME)
    assert (with_relay.verdict, len(with_relay.relays)) == (ReachState.PRIVATE, 1)
    assert with_relay.addresses == (f"/ip6/{six}/tcp/4001/p2p/{ME}",), "and tells the address at which it was dialled"
    both = conclude([told("2001:4860::1", 4001, seen_at=six, relays=True), told("11.0.0.1", 4001)], ME)
    assert both.verdict is ReachState.PUBLIC


def test_answers_from_the_own_network_say_nothing_about_the_internet() -> None:
    near = told("192.168.1.7", 4001, relays=True, seen_at="192.168.1.2")
    assert conclude([near], ME).verdict is ReachState.UNKNOWN
    assert conclude([], ME).verdict is ReachState.UNKNOWN
    assert conclude([near, told("11.0.0.1")], ME).relays == (), "nobody outside reaches a relay at home"


def test_the_ports_of_own_direct_addresses() -> None:
    own = [
        "/ip4/192.168.1.2/tcp/4001/p2p/me",
        "/ip4/192.168.1.2/udp/4001/quic-v1/p2p/me",
        "/ip4/84.1.2.3/tcp/31000/p2p/me",
    ]
    circuit = "/ip4/11.0.0.1/tcp/4009/p2p/relay/p2p-circuit/p2p/me"
    assert tcp_ports([*own, circuit, "/ip4/192.168.1.2/tcp/22/p2p/me"]) == (4001, 31000)
    assert len(tcp_ports(f"/ip4/1.1.1.1/tcp/{port}/p2p/me" for port in range(2000, 2100))) == PORTS_MAX


async def remotes(host: Host, count: int) -> list[Remote]:
    async with asyncio.timeout(240):
        while len(found := await host._links.remotes()) < count:
            await asyncio.sleep(0.02)
    return found


async def test_a_real_peer_dials_back_and_tells_only_of_libp2p_peers(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (ada, bob):
        other = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with other:
            (port,) = tcp_ports(await bob.addresses())
            taken = other.sockets[0].getsockname()[1]
            answers = await ask_all(bob.open, await remotes(bob, 1), [port, taken, 1023])
        assert [(it.remote.peer, it.seen_at, it.ports, it.relays) for it in answers] == [
            (ada.peer_id, "127.0.0.1", (port,), False)
        ]


async def test_a_caller_that_asks_too_often_or_wrongly_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "ANSWERS_EACH_MS", 1e9)  # a slow machine needs its time for eight questions
    async with hosts(tmp_path, 2) as (ada, bob):
        there = await remotes(bob, 1)
        for request in (b"", bytes([255]) + bytes(510), bytes([4, 1])):
            reader, writer = await bob.open(ada.identity.public_key, PROTOCOL)
            writer.write(request)
            writer.write_eof()
            async with asyncio.timeout(240):
                assert await reader.read() == b""
            writer.close()
        answers = [await ask_all(bob.open, there, ()) for _ in range(8)]
        assert answers[0]
        assert not answers[-1], "the eighth question within a moment was answered"


def ports_of(addresses: list[str]) -> set[str]:
    return {address.split("/")[4] for address in addresses}


async def test_a_peer_listens_at_every_address_with_one_port(tmp_path: Path) -> None:
    host = Host(Identity.load_or_create(tmp_path / "key"), tmp_path / "key", OverlaySettings())
    try:
        await host.start()
        seen = await host.p2p.get_visible_maddrs(latest=True)
        found = {tuple(str(address).split("/")[1:4:2]) for address in seen}
        families = {("ip4", "tcp"), ("ip4", "udp")}
        if "::" in hosts_of("*"):
            families |= {("ip6", "tcp"), ("ip6", "udp")}
        assert found == families
        assert len(ports_of(list(map(str, seen)))) == 1
    finally:
        await host.stop()


async def test_a_daemon_changes_its_settings_and_the_streams_stay(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (ada, bob):
        assert not ada.finder.relays_for_others
        before, ports = ada.p2p._child.pid, ports_of(await ada.addresses())
        assert len(ports) == 1, "TCP and UDP have one number"
        await ada._daemon.change(reachability="public")
        assert ada.p2p._child.pid != before
        assert ports_of(await ada.addresses()) == ports, "others have dialled it there"
        assert ada.restarts == 0, "a wanted change is no failure"
        assert ada.finder.relays_for_others
        answers: list[ReachAnswer] = []
        async with asyncio.timeout(240):  # the connection to the old daemon has to end first
            while not answers:
                await bob.connect(await ada.addresses())
                answers = await ask_all(bob.open, await remotes(bob, 1), ())
                await asyncio.sleep(0.5)  # answers have a rate, and the daemons need the processor
        assert answers[0].relays
        ada.p2p._child.kill()
        async with asyncio.timeout(240):
            while ada.restarts == 0:
                await asyncio.sleep(0.02)
        assert ada.finder.relays_for_others, "it comes back with the new settings"
        assert {str(ada._daemon.settings.listen_port)} == ports


async def test_a_person_who_says_how_the_peer_is_reached_is_believed(tmp_path: Path) -> None:
    assert OverlaySettings().finds_out
    for settings in (
        OverlaySettings(reachability="private"),
        OverlaySettings(announce=("/ip4/84.1.2.3/tcp/4001",)),
        OverlaySettings(relays=("/ip4/11.0.0.1/tcp/4001/p2p/x",)),
        OverlaySettings("127.0.0.1"),
    ):
        assert not settings.finds_out
    path = tmp_path / "key"
    host = Host(Identity.load_or_create(path), path, OverlaySettings("127.0.0.1", reachability="public"))
    await host.find_out()
    assert host.finder.finding.verdict is ReachState.UNKNOWN


async def test_a_daemon_that_does_not_come_back_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts(tmp_path, 1) as (ada,):
        monkeypatch.setattr("node.overlay.daemon.CHANGE_SECONDS_MAX", 1.0)
        with pytest.raises(NetworkError, match="did not start again"):
            await ada._daemon.change(reachability="private", relays=("/ip4/127.0.0.1/tcp/9/p2p/" + ada.peer_id,))
