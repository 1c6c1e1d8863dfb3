"""Streams, blobs, gossip and discovery between real libp2p daemons on loopback."""

import asyncio
import gc
import hashlib
import os
import re
import resource
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import MSGPackSerializer, get_dht_time
from structlog.testing import capture_logs

from node.blobs.blobs import PROTOCOL, BlobServer, WireBytes
from node.blobs.fetcher import BlobFetcher
from node.overlay import daemon as daemon_module
from node.overlay import links, p2pd, pubsub
from node.overlay.dht import Discovery, _OwnRecordsOnly, open_record, run_key
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings, check_port_free
from node.swarm.announcements import Topic
from node.swarm.runtime import View
from protos.envelope import Kind, seal
from protos.errors import NetworkError, OperatorError, Reason, Refusal
from protos.identity import Identity
from protos.v1 import update_pb2

RUN = b"r" * 32
BLOB = os.urandom(300_000)
NAME = hashlib.sha256(BLOB).digest()


@asynccontextmanager
async def hosts(
    folder: Path, count: int, refused: Callable[[Refusal], None] = lambda refusal: None
) -> AsyncIterator[list[Host]]:
    """Hosts that know the first; `refused` hears what the first refuses."""
    made: list[Host] = []
    try:
        for index in range(count):
            path = folder / f"{index}.key"
            bootstrap = tuple((await made[0].addresses())[:1]) if made else ()
            told = () if made else (refused,)
            host = Host(Identity.load_or_create(path), path, OverlaySettings("127.0.0.1", bootstrap=bootstrap), *told)
            await host.start()
            made.append(host)
        yield made
    finally:
        for host in made:
            await host.stop()


async def until(
    what: str, look: Callable[[], bool], seconds: float = 240.0, work: Callable[[int], Awaitable[None]] | None = None
) -> None:
    """Until `look` finds it; `work` is done again and again meanwhile."""
    times = 0
    async with asyncio.timeout(seconds):
        while not look():
            if work is not None:
                await work(times)
                times += 1
            await asyncio.sleep(0.02)
    assert look(), what


@asynccontextmanager
async def fetching(
    host: Host, wire: WireBytes | None = None, refused: list[Refusal] | None = None
) -> AsyncIterator[BlobFetcher]:
    fetcher = BlobFetcher(host, wire or WireBytes(), [].append if refused is None else refused.append)
    try:
        yield fetcher
    finally:
        fetcher.close()


async def serve(host: Host, lookup: Callable[[bytes], bytes | None]) -> WireBytes:
    wire = WireBytes()
    await host.serve(PROTOCOL, BlobServer(lookup, wire, lambda refusal: None).handle)
    return wire


async def test_a_blob_arrives_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (server, client), AsyncExitStack() as stack:
        served = await serve(server, {NAME: BLOB}.get)
        wire = WireBytes()
        fetcher = await stack.enter_async_context(fetching(client, wire))
        holders = [server.identity.public_key]
        got = await asyncio.gather(*(fetcher.fetch(NAME, len(BLOB), holders) for _ in range(5)))
        assert got == [BLOB] * 5
        assert wire.blob_received == len(BLOB)
        assert wire.received <= len(BLOB) * 1.01
        assert served.blob_sent == len(BLOB)
        with pytest.raises(NetworkError, match="does not hold it"):
            await fetcher.fetch(b"x" * 32, 10, holders)


async def test_more_pulls_than_a_connection_has_streams(tmp_path: Path) -> None:
    """p2pd over QUIC opens no stream any more after some 550 that were closed: streams are kept and used again."""
    async with hosts(tmp_path, 1) as (server,):
        path = tmp_path / "client.key"
        quic = tuple(address for address in await server.addresses() if "quic" in address)
        client = Host(Identity.load_or_create(path), path, OverlaySettings("127.0.0.1", bootstrap=quic))
        await client.start()
        try:
            small = b"small"
            name = hashlib.sha256(small).digest()
            await serve(server, {name: small}.get)
            async with fetching(client) as fetcher:
                for _ in range(1200):
                    assert await fetcher.fetch(name, len(small), [server.identity.public_key]) == small
        finally:
            await client.stop()


async def test_an_unreachable_holder_is_asked_last(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (server, client):
        await serve(server, {NAME: BLOB}.get)
        gone = Identity.generate().public_key
        async with fetching(client) as fetcher:
            assert await fetcher.fetch(NAME, len(BLOB), [gone, server.identity.public_key]) == BLOB
            assert fetcher._in_order([gone, server.identity.public_key]) == [server.identity.public_key, gone]


async def test_hostile_requests_are_counted_and_the_server_goes_on(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (server, client):
        refused: list[Refusal] = []
        server_side = BlobServer({NAME: BLOB}.get, WireBytes(), refused.append)
        await server.serve(PROTOCOL, server_side.handle)
        for frame in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03\xff\xff\xff", b"\x00\x00\x00\x00"):
            reader, writer = await client.open(server.identity.public_key, PROTOCOL)
            writer.write(frame)
            await writer.drain()
            assert await asyncio.wait_for(reader.read(), 240) == b""
            writer.close()
        reasons = [refusal.reason for refusal in refused]
        assert reasons == [Reason.TOO_LARGE, Reason.MALFORMED, Reason.MALFORMED]
        async with fetching(client) as fetcher:
            assert await fetcher.fetch(NAME, len(BLOB), [server.identity.public_key]) == BLOB


async def test_a_call_that_is_cancelled_closes_its_connection_to_the_daemon(tmp_path: Path) -> None:
    """hivemind's own did not: the garbage collector told it, in a test or in a notebook that makes warnings errors."""
    async with hosts(tmp_path, 1) as [ada]:
        daemon = psutil.Process(ada.p2p._child.pid)
        daemon.suspend()
        await until("it stands still", lambda: daemon.status() == psutil.STATUS_STOPPED)
        try:
            where = [f"/ip4/127.0.0.1/tcp/9/p2p/{ada.peer_id}"]
            calls = [ada.addresses(), ada.connected(), ada.places(), ada.connect(where), ada.punch(ada.peer_id, where)]
            calls.append(ada.serve("/nobody/1", ada._on_life))
            waiting = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0.3)
            assert [task for task in waiting if task.done()] == []
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            daemon.resume()
        del waiting, calls, task
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            gc.collect()
        assert not found


async def test_a_daemon_that_stands_still_is_told_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind waited for ever, for its answer and for its end."""
    monkeypatch.setattr(links, "STREAM_OPEN_SECONDS_MAX", 0.2)
    monkeypatch.setattr(p2pd, "END_SECONDS_MAX", 0.2)
    async with asyncio.timeout(240), hosts(tmp_path, 1) as [ada]:
        standing = psutil.Process(ada.p2p._child.pid)
        standing.suspend()
        await until("it stands still", lambda: standing.status() == psutil.STATUS_STOPPED)
        with pytest.raises(NetworkError, match="takes no streams of /nobody/1: it stands still"):
            await ada.serve("/nobody/1", ada._on_life)
    assert not standing.is_running()


async def test_a_daemon_that_stands_still_in_a_run_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer only heard that gossip failed, and its votes came to nobody."""
    monkeypatch.setattr(daemon_module, "ASKED_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(daemon_module, "STANDING_SECONDS", 5.0)
    with capture_logs() as logs:
        async with asyncio.timeout(240), hosts(tmp_path, 1) as [ada]:
            standing = psutil.Process(ada.p2p._child.pid)
            standing.suspend()
            await until("it is ended, and the next one starts", lambda: ada.restarts >= 1)
    assert not standing.is_running()
    assert "the libp2p daemon stands still; ending it" in [line["event"] for line in logs]


async def test_a_daemon_that_dies_is_told_with_the_last_words_of_go(tmp_path: Path) -> None:
    """A container or a batch job may allow so few threads that p2pd ends; a full machine kills it."""
    back, path = asyncio.Event(), tmp_path / "ada.key"

    async def restarted() -> None:
        back.set()

    with capture_logs() as logs:
        ada = Host(Identity.load_or_create(path), path, OverlaySettings("127.0.0.1"))
        await ada.start(restarted=restarted)
        try:
            resource.prlimit(ada.p2p._child.pid, resource.RLIMIT_AS, (1, 1))  # Go gets no thread and no memory any more
            calls = [asyncio.ensure_future(ada.connected()) for _ in range(200)]
            await asyncio.wait_for(back.wait(), 240)
            await asyncio.gather(*calls)
            ada.p2p._child.kill()
            await until("a third start", lambda: ada.restarts == 2)
        finally:
            await ada.stop()
    first, second = [line["why"] for line in logs if line["event"].startswith("the libp2p daemon died")]
    assert re.match("runtime: .*(memory|thread)|fatal error: ", first), first
    assert second.startswith("it was killed, by this peer or by the system")


async def test_the_last_words_of_a_daemon_that_ends_while_it_starts_are_waited_for_and_a_cancelled_start_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has told its id by then, so that what failed is the connection to it."""
    monkeypatch.setattr(p2pd, "LAST_WORDS_SECONDS_MAX", 60.0)
    words = "sh", "-c", "echo Peer ID: 1; sleep 0.2; echo runtime: no thread; exit 2"
    with pytest.raises(P2PDaemonError, match=r"^runtime: no thread$"):
        await p2pd.Process.started(folder=tmp_path, prefix=words)
    with capture_logs() as logs:
        start = asyncio.ensure_future(
            p2pd.Process.started(folder=tmp_path, prefix=("sh", "-c", "echo runtime: slow; exec sleep 600"))
        )
        await until("its words", lambda: any(line.get("line") == "runtime: slow" for line in logs))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await p2pd.Process().shutdown()  # of a start that fails first: its error was replaced by an AttributeError


async def test_a_killed_daemon_comes_back_with_its_identity_streams_and_gossip(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (ada, bob):
        heard: list[bytes] = []
        await serve(ada, {NAME: BLOB}.get)
        await ada.subscribe("topic", heard.append)
        await bob.subscribe("topic", lambda message: None)
        discovery = Discovery(ada, RUN)
        await discovery.start([])
        ada.p2p._child.kill()
        await until("the daemon came back", lambda: ada.restarts == 1 and ada.p2p._child.returncode is None)
        async with asyncio.timeout(240):
            while not await bob.connect(await ada.addresses() or ["/p2p/x"]):
                await asyncio.sleep(0.05)
        assert ada.p2p.peer_id.to_base58() == ada.identity.peer_id
        async with asyncio.timeout(240):  # hivemind waits for ever for an answer of the dead daemon
            await discovery.stop()
        async with fetching(bob) as fetcher:
            assert await fetcher.fetch(NAME, len(BLOB), [ada.identity.public_key]) == BLOB
        async with asyncio.timeout(240):
            while not heard:
                await bob.publish("topic", b"hello")
                await asyncio.sleep(0.1)
        assert set(heard) == {b"hello"}


async def test_a_flood_of_gossip_is_cut_and_members_are_heard_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers share one allowance; what is over it costs no signature check."""
    monkeypatch.setattr(pubsub, "ORIGIN_MESSAGES_MAX", 20)
    monkeypatch.setattr(pubsub, "ORIGIN_MESSAGE_MS", 1e6)
    refused: list[Refusal] = []
    async with hosts(tmp_path, 3, refused.append) as (ada, bob, mallory):
        heard: list[bytes] = []
        ada.expect([bob.identity.public_key])
        await ada.subscribe("topic", heard.append)
        for other in (bob, mallory):
            await other.subscribe("topic", lambda message: None)
            await other.connect(await ada.addresses())
        await until("the flood is cut", lambda: bool(refused), work=lambda n: mallory.publish("topic", b"m%d" % n))
        await until("bob is heard", lambda: b"bob" in heard, work=lambda n: bob.publish("topic", b"bob"))
        assert len([message for message in heard if message.startswith(b"m")]) == 20
        assert {refusal.reason for refusal in refused} == {Reason.TOO_MANY}
        assert mallory.identity.public_key.hex()[-16:] in refused[0].detail


async def test_subscribers_are_the_peers_of_a_topic_and_no_relay(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as (relay, ada, bob):
        for host in (ada, bob):
            await host.subscribe("run", lambda data: None)
        for host in (ada, bob):
            assert await host.connect(await relay.addresses())
        assert await ada.connect(await bob.addresses())
        async with asyncio.timeout(240):
            while await ada.subscribers("run") != {bob.identity.peer_id}:
                await asyncio.sleep(0.05)
        assert relay.identity.peer_id in await ada.connected()
        assert await ada.subscribers("another run") == set()
        topic = Topic(ada, RUN, View(RUN, ada.identity.public_key), mock.Mock())
        assert await topic.neighbours() == set(), "nobody listens to that run"


async def test_peers_find_each_other_through_a_relay_and_forged_records_are_refused(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as (relay, ada, bob):
        bootstrap = (await relay.addresses())[:1]
        nodes = [Discovery(relay, None), Discovery(ada, RUN), Discovery(bob, RUN)]
        try:
            for index, node in enumerate(nodes):
                await node.start([] if index == 0 else bootstrap)
            assert await nodes[1].announce(await ada.addresses())
            assert await nodes[2].peers() == {ada.identity.public_key: tuple(await ada.addresses())}
        finally:
            for node in nodes:
                await node.stop()

    def validates(
        signer: Identity, subkey: str, key: str = run_key(RUN), seconds: float = 240.0, serves: bytes | None = None
    ) -> bool:
        record = update_pb2.PeerRecord(addresses=[f"/ip4/1.2.3.4/tcp/1/p2p/{signer.peer_id}"])
        value = seal(signer, Kind.KIND_PEER_RECORD, RUN, record).SerializeToString()
        at, until = DHTID.generate(source=key).to_bytes(), get_dht_time() + seconds
        packed = DHTRecord(at, MSGPackSerializer.dumps(subkey), MSGPackSerializer.dumps(value), until)
        return _OwnRecordsOnly(serves).validate(packed)

    mallory = Identity.generate()
    assert validates(mallory, mallory.peer_id)
    assert validates(mallory, mallory.peer_id, serves=RUN)
    assert not validates(mallory, ada.identity.peer_id)
    assert not validates(mallory, mallory.peer_id, "invented"), "a key that is not the run's"
    assert not validates(mallory, mallory.peer_id, run_key(b"o" * 32)), "the key of another run"
    assert not validates(mallory, mallory.peer_id, serves=b"o" * 32), "a run that this peer is not in"
    assert not validates(mallory, mallory.peer_id, seconds=3600), "for longer than records live"
    assert not validates(mallory, mallory.peer_id, seconds=float("nan"))
    assert not _OwnRecordsOnly().validate(DHTRecord(b"key", b"\xc1", b"\xc1", 1.0))


def test_a_record_can_only_name_its_signers_addresses() -> None:
    ada, bob = Identity.generate(), Identity.generate()
    record = update_pb2.PeerRecord(addresses=[f"/ip4/1.2.3.4/tcp/1/p2p/{bob.peer_id}"])
    with pytest.raises(Refusal, match="not the signer's"):
        open_record(seal(ada, Kind.KIND_PEER_RECORD, RUN, record).SerializeToString(), RUN)


async def test_a_busy_port_is_an_error_that_names_it() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OperatorError, match=str(port)):
        check_port_free("127.0.0.1", port)
    server.close()
    await server.wait_closed()


async def test_what_p2pd_prints_does_not_reach_people(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It said `[ERROR] ... error accepting connection: use of closed network connection` of a sound peer at each start."""
    from structlog.testing import capture_logs

    with capture_logs() as logs:
        async with hosts(tmp_path, 2) as (ada, bob):
            assert await bob.connect(await ada.addresses())
            await bob._daemon.change(reachability="private")
            ada.p2p._log_p2pd_message(
                '{"level":"error","ts":"2026-11-25T17:00:00.000Z","logger":"p2pd","caller":"daemon.go:198","msg":"error '
                'accepting connection","error":"use of closed network connection"}'
            )
    out, err = capfd.readouterr()
    assert "libp2p" not in out + err
    assert "closed network connection" not in out + err
    told = [line for line in logs if line["event"] == "p2pd says"]
    assert told
    assert {line["log_level"] for line in told} == {"debug"}
