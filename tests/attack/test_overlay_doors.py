"""Attackers against real libp2p hosts: what a peer keeps for strangers, and serves them, is bounded."""

import asyncio
import time
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.utils import get_dht_time

from node.blobs import turns as audience_module
from node.blobs.blobs import PROTOCOL, Arrivals, BlobServer, Took, WireBytes, read_frame, write_frame
from node.blobs.turns import Audience
from node.overlay import dht
from node.overlay.connections import Connections
from node.overlay.dht import Discovery, _Records, run_key
from protos.identity import Identity
from protos.v1 import update_pb2
from tests.attack.attacks import dht_fill, snapshot_pulls, unread_streams
from tests.attack.hosts import strangers
from tests.unit.node.test_overlay import BLOB, NAME, RUN, fetching, hosts, until


class Nobody:
    """Neighbours of a peer whose run has no roster; `said` takes the events that are logged."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def wanted(self) -> set[str]:
        return set()

    async def known_addresses(self) -> list[str]:
        return []

    def moved(self, addresses: tuple[str, ...]) -> None: ...

    def log(self, event: str, **facts: object) -> None:
        self._said.append(event)


async def test_a_stranger_fills_neither_a_relays_dht_nor_a_peers(tmp_path: Path) -> None:
    """4,000 of 4,000 records for ten years were taken, and nothing bounded them. Honest peers find each other meanwhile."""
    async with hosts(tmp_path, 3) as (relay, ada, bob):
        bootstrap = (await relay.addresses())[:1]
        nodes = [Discovery(relay, None), Discovery(ada, RUN), Discovery(bob, RUN)]
        try:
            for index, node in enumerate(nodes):
                await node.start([] if index == 0 else bootstrap)
            assert await nodes[1].announce(await ada.addresses())
            attack = asyncio.ensure_future(dht_fill.fill([*bootstrap, *(await ada.addresses())[:1]], 5.0))
            await asyncio.sleep(3.0)
            assert await nodes[2].announce(await bob.addresses())
            found = await nodes[1].peers()
            assert bob.identity.public_key in found
            told = await attack
            at_relay, at_ada = (node._node.protocol.storage for node in nodes[:2])
            assert set(dict(at_ada.items())) <= {DHTID.generate(source=run_key(RUN))}, told
            assert len(at_relay) <= dht.RELAY_RUNS_MAX, told
            assert at_relay.records() <= 300, f"{at_relay.records()} records of one remote; {told}"
            last = get_dht_time() + dht.DHT_RECORD_SECONDS + 1
            assert all(until <= last for _, (_, until) in at_relay.items())
        finally:
            for node in nodes:
                await node.stop()


def test_records_are_bounded_whoever_signs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "DHT_RECORDS_MAX", 10)
    monkeypatch.setattr(dht, "DHT_RECORDS_A_RUN_MAX", 6)
    kept = _Records(runs_max=3)
    now = get_dht_time()
    keys = [DHTID.generate(source=run_key(bytes([n]) * 32)) for n in range(5)]
    for peer in range(8):
        kept.store_subkey(keys[0], f"peer-{peer}", b"record", now + 100 + peer)
    assert kept.records() == 6
    for key in keys:
        for peer in range(3):
            kept.store_subkey(key, f"other-{peer}", b"record", now + 1e9)
    assert len(kept) <= 3
    assert kept.records() <= 10
    assert not kept.store(keys[1], b"no dictionary", now + 10)


async def test_garbage_keeps_nobody_out(tmp_path: Path) -> None:
    """One string that is no address kept everybody out of a run: at the start, in the DHT, and later."""
    async with hosts(tmp_path, 2) as (ada, bob):
        garbage = ["junk", "/ip4/999.1.1.1/tcp/1/p2p/x", "", "/p2p/x", "/ip4/1.2.3.4/tcp/1/p2p/\x1b[31m"]
        own = await bob.addresses()
        bootstrap = (*garbage, *own)
        ada_again = type(ada)(ada.identity, tmp_path / "0.key", ada.settings)
        await ada.stop()
        await ada_again.start(bootstrap)
        node = Discovery(ada_again, RUN)
        try:
            await node.start(list(bootstrap))
            said: list[str] = []

            connections = Connections(ada_again, RUN, Nobody(said))
            await connections.connect_to([*garbage, *own])
            assert bob.identity.peer_id in await ada_again.connected()
            assert said.count("not an address") == len(garbage)
            stranger = Identity.generate().peer_id
            assert not await ada_again.connect([f"/ip4/1.2.3/tcp/1/p2p/{stranger}"])
        finally:
            await node.stop()
            await ada_again.stop()


async def test_streams_that_nobody_reads_hold_up_neither_members_nor_a_joiner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two strangers that asked and never read took all 64 serving slots: a run that made 141 steps in 15 s made 14 in 20 s."""
    monkeypatch.setattr(audience_module, "STRANGERS_STREAMS_MAX", 40)  # the attack's identities have 48 streams
    async with hosts(tmp_path, 3) as (server, member, joiner):
        wire = WireBytes()
        audience = Audience(frozenset({member.identity.peer_id}))
        await server.serve(PROTOCOL, BlobServer({NAME: BLOB}.get, wire, lambda refusal: None, audience).handle)
        attack = asyncio.ensure_future(unread_streams.hold(await server.addresses(), NAME, 12.0))
        try:
            await until(
                "the strangers' places are taken", lambda: len(audience) >= audience_module.STRANGERS_STREAMS_MAX, 40
            )
            took: dict[str, list[float]] = {}
            for name, host in (("member", member), ("joiner", joiner)):
                for _ in range(5):
                    began = time.monotonic()
                    async with fetching(host) as fetcher:
                        assert await fetcher.fetch(NAME, len(BLOB), [server.identity.public_key]) == BLOB
                    took.setdefault(name, []).append(time.monotonic() - began)
            assert max(took["member"]) < 3, took
            assert max(took["joiner"]) < 8, took
            assert len(audience) <= audience_module.STRANGERS_STREAMS_MAX + audience_module.STREAMS_A_PEER_MAX
        finally:
            told = await attack
        assert int(told.split()[0]) >= audience_module.STRANGERS_STREAMS_MAX, told


async def test_strangers_do_not_say_how_fast_a_peers_votes_arrive(tmp_path: Path) -> None:
    """Identities are free: three of them said a minute, and the typical puller was theirs. Votes would have got smaller."""
    arrivals = Arrivals()
    async with hosts(tmp_path, 2) as (server, member):
        audience = Audience(frozenset({member.identity.peer_id}))
        blobs = BlobServer({NAME: BLOB}.get, WireBytes(), lambda refusal: None, audience, arrivals)
        await server.serve(PROTOCOL, blobs.handle)
        async with strangers(3, await server.addresses()) as liars:
            for host, took in ((member, 20), *((liar, 60_000) for liar in liars)):
                reader, writer = await host.open(server.identity.public_key, PROTOCOL)
                for previous_ms in (0, took, took):
                    request = update_pb2.BlobRequest(sha256=NAME, previous_ms=previous_ms)
                    await write_frame(writer, request.SerializeToString())
                    await read_frame(reader)
                    await asyncio.wait_for(reader.readexactly(len(BLOB)), 240)
                writer.close()
    assert arrivals.took(NAME) == Took(20, 20)


async def test_strangers_that_read_all_the_time_leave_a_joiner_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten strangers with 16 streams each waited for their turn in all 128 places: of ten pulls of a joiner none ended well."""
    monkeypatch.setattr(audience_module, "STRANGERS_STREAMS_MAX", 40)
    async with hosts(tmp_path, 2) as (server, joiner):
        audience = Audience(frozenset({"nobody"}))
        await server.serve(PROTOCOL, BlobServer({NAME: BLOB}.get, WireBytes(), lambda refusal: None, audience).handle)
        async with strangers(3, await server.addresses()) as greedy:
            attack = [
                asyncio.ensure_future(snapshot_pulls.pull_again(host, server.identity.public_key, NAME))
                for host in greedy
                for _ in range(audience_module.STREAMS_A_STRANGER_MAX)
            ]
            try:
                await until(
                    "the strangers' places are taken",
                    lambda: len(audience) >= audience_module.STRANGERS_STREAMS_MAX,
                    40,
                )
                for _ in range(5):
                    async with fetching(joiner) as fetcher:
                        assert await fetcher.fetch(NAME, len(BLOB), [server.identity.public_key]) == BLOB
            finally:
                for stream in attack:
                    stream.cancel()
                await asyncio.gather(*attack, return_exceptions=True)
