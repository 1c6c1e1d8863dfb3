"""One swarm through a hard life: unlike peers, a late joiner, kill -9 of a peer and of the coordinator, hostile gossip.

All in real processes over gRPC and libp2p; after all of it no two replicas differ by a bit at any step.
"""

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from node.blobs.blobs import PROTOCOL, BlobServer, WireBytes, read_frame, write_frame
from node.overlay.dht import Discovery
from node.overlay.host import Host
from node.overlay.settings import OverlaySettings
from node.swarm.announcements import topic_of
from protos.envelope import Kind, seal, signed_bytes
from protos.identity import Identity, peer_id, verify
from protos.limits import GOSSIP_MESSAGE_BYTES_MAX
from protos.slices import hash_of
from protos.v1 import envelope_pb2, update_pb2
from tests.system.local_swarm import PATIENT, LocalSwarm, digests_by_step, processes_with, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "life",
    source="DATA",
    relay=True,
    # a peer that nobody hears for 30 s misses seven steps, and one that stands still for a moment one or two
    clock={"batch_samples": 48, "min_peers": 2, "snapshot_every": 20} | PATIENT | {"deadline_ms_min": 4000},
)
PEERS = ("ada", "bob", "cyd")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("life")
    with LocalSwarm(folder, RUN) as swarm:
        # unlike machines: other vote sizes, other precision of the forward pass, other thread counts
        swarm.join("ada", "--set", "metrics_listen=127.0.0.1:0", "--set", "vote_size=128", "--set", "archive=true")
        swarm.join("bob", "--set", "vote_size=16", "--set", "precision=bf16")
        swarm.join("cyd", "--set", "vote_size=64", "--threads", "2", "--set", "archive=true")
        for name in PEERS:
            swarm.wait_step(name, 10)
        yield swarm
    assert processes_with(str(folder)) == [], "something was left running"


def equal_so_far(swarm: LocalSwarm, *names: str) -> None:
    different = {s: d for s, d in digests_by_step(*(swarm.steps(name) for name in names)).items() if len(d) > 1}
    assert not different, f"replicas differ after steps {sorted(different)[:5]}"


def test_unlike_peers_hold_equal_states_and_all_count(swarm: LocalSwarm) -> None:
    equal_so_far(swarm, *PEERS)
    for name in PEERS:
        wait_for(f"vote of {name} that counts", lambda name=name: any(line["accepted"] for line in swarm.steps(name)))


def test_a_late_joiner_starts_from_a_snapshot_and_takes_part(swarm: LocalSwarm) -> None:
    swarm.wait_step("ada", 50)
    swarm.join("dot")
    wait_for("vote of dot", lambda: any(line["accepted"] for line in swarm.steps("dot")))
    steps = swarm.steps("dot")
    assert steps[0]["step"] >= 21, "it started from the initial state, not from an agreed snapshot"
    equal_so_far(swarm, *PEERS, "dot")
    assert swarm.status()["phase"] == "open"


def test_a_killed_peer_costs_the_others_at_most_two_steps_and_comes_back(swarm: LocalSwarm) -> None:
    identity = Identity.load_or_create(swarm.folder / "cyd" / "identity.key")
    swarm.processes["cyd"].kill()
    killed_at = max(swarm.last_step(name) for name in ("ada", "bob"))
    swarm.wait_step("ada", killed_at + 10)
    after = [line for line in swarm.steps("ada") if killed_at < line["step"] <= killed_at + 10]
    short = [line["step"] for line in after if not line["accepted"]]
    before, lives = sum(line["accepted"] for line in swarm.steps("cyd")), len(swarm.events("cyd", "taking part"))
    swarm.join("cyd", "--set", "archive=true")
    assert len(short) <= 2, f"ada's votes did not count in steps {short} after the kill: {after}"
    wait_for("vote of cyd", lambda: sum(line["accepted"] for line in swarm.steps("cyd")) > before)
    since = swarm.events("cyd", "taking part")[lives]["step"]
    counts = next(line["step"] for line in swarm.steps("cyd") if line["step"] >= since and line["accepted"])
    # the others' QUIC connections to its former life live on for 30 s: nothing may be sent into them
    assert counts - since <= 6, f"cyd took part from step {since} on, and was not heard before step {counts}"
    # who is a step behind for a moment is syncing
    wait_for(
        "cyd ready", lambda: (identity.peer_id, "ready") in {(p["id"], p["phase"]) for p in swarm.status()["peers"]}
    )
    equal_so_far(swarm, *PEERS)


def test_a_killed_coordinator_goes_on_at_the_same_step(swarm: LocalSwarm) -> None:
    port = swarm.serving["port"]
    for _ in range(3):
        swarm.processes["coordinator"].kill()
        at = max(swarm.last_step(name) for name in PEERS)
        swarm.serve(port)
        for name in PEERS:
            swarm.wait_step(name, at + 5)
    for name in PEERS:
        steps = [line["step"] for line in swarm.steps(name)]
        if name != "cyd":  # cyd was killed before: it may have replayed steps
            assert steps == list(range(steps[0], steps[-1] + 1)), f"{name} lost a step or applied one twice"
    entries: dict[int, set[str]] = {}
    for name in PEERS:
        for line in swarm.steps(name):
            entries.setdefault(line["step"], set()).add(line["entry"])
    assert all(len(hashes) == 1 for hashes in entries.values()), "two entries for one step"
    equal_so_far(swarm, *PEERS)


@pytest.mark.nightly
def test_archives_prove_the_run_while_it_goes_on(swarm: LocalSwarm) -> None:
    """Ada's from the first step; that of cyd, who was killed and came back, from its newest gap on."""
    for name in ("ada", "cyd"):
        found = sorted((swarm.folder / name / "runs").glob("*/archive/[0-9]*"))
        begins = "0" if name == "ada" else found[-1].name
        command = ("verify", str(swarm.folder / name), "--from", begins, "--json")
        code, verdict = swarm.start(f"verify-{name}", "node", *command).finish()
        assert code == 0, verdict
        assert verdict["ok"] is True
        assert verdict["run"] == swarm.invite.run_id.hex()
        assert verdict["last_step"] == int(begins) + verdict["steps"]
        digests = {line["step"]: line["digest"] for line in swarm.steps("ada")}
        assert verdict["state_digest"]
        assert verdict["last_step"] in digests
        assert verdict["digests_checked"] >= verdict["steps"] - 2


def test_the_ledger_is_the_same_from_the_coordinator_and_from_an_archive(swarm: LocalSwarm) -> None:
    swarm.wait_step("ada", 121)
    _, archived = swarm.start("ledger-1", "node", "ledger", str(swarm.folder / "ada"), "--json").finish()
    code, asked = swarm.start("ledger-2", "node", "ledger", swarm.link, "--json").finish()
    assert code == 0
    assert asked["from_step"] == archived["from_step"] == 1
    assert asked["to_step"] >= archived["to_step"] > 100  # more than the newest snapshot alone
    before = {line["id"]: line["votes_accepted"] for line in archived["identities"]}
    after = {line["id"]: line["votes_accepted"] for line in asked["identities"]}
    assert before.keys() == after.keys()
    assert all(before[name] <= after[name] for name in before)
    accepted = sum(line["accepted"] for line in swarm.steps("ada") if line["step"] <= archived["to_step"])
    ada = Identity.load_or_create(swarm.folder / "ada" / "identity.key")
    assert before[peer_id(ada.public_key)] == accepted


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_peer_whose_neighbours_all_lie_gets_past_them_through_the_coordinator(swarm: LocalSwarm) -> None:
    """Eclipse: the invite that somebody passed on names liars only, who answer lookups and give wrong bytes for every hash."""
    asyncio.run(_eclipse(swarm))
    equal_so_far(swarm, *PEERS, "eve")
    swarm.processes["eve"].interrupt()
    assert swarm.processes["eve"].finish()[0] == 130


async def _eclipse(swarm: LocalSwarm) -> None:

    async def lie(_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_frame(reader)
            await write_frame(writer, update_pb2.BlobResponse(found=True, total_bytes=1 << 20).SerializeToString())

    liars, lookups, known = list[Host](), list[Discovery](), list[str]()
    try:
        for number in range(3):
            key = swarm.folder / f"liar{number}" / "identity.key"
            bootstrap = tuple(known)
            host = Host(Identity.load_or_create(key), key, OverlaySettings("127.0.0.1", bootstrap=bootstrap))
            await host.start()
            liars.append(host)
            known += await host.addresses()
            await host.serve(PROTOCOL, lie)
            lookups.append(Discovery(host, swarm.invite.run_id))
            await lookups[-1].start(list(bootstrap))
            assert number == 0 or await lookups[-1].announce(await host.addresses())
        link = replace(swarm.invite, bootstrap=tuple(known)).link()
        home = ("--home", str(swarm.folder / "eve"), "--listen", "127.0.0.1:0", "--threads", "1", "--json")
        swarm.start("eve", "node", "join", link, *home)
        await asyncio.to_thread(
            wait_for, "vote of eve that counts", lambda: any(line["accepted"] for line in swarm.steps("eve"))
        )
        names = {liar.peer_id[-8:] for liar in liars}
        await asyncio.to_thread(  # otherwise the test tests nothing
            wait_for,
            "connection of eve to a liar",
            lambda: any(names & set(seen["direct"]) for seen in swarm.events("eve", "connections")),
        )
    finally:
        for node in lookups:
            await node.stop()
        for host in liars:
            await host.stop()


# hivemind leaves the sockets of streams that it was still taking in to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hostile_gossip_is_refused_by_reason_and_disturbs_nobody(swarm: LocalSwarm) -> None:
    url = wait_for("metrics address", lambda: _metrics_url(swarm))
    before = swarm.last_step("ada")
    wanted = {"malformed", "wrong_kind", "wrong_run", "bad_signature", "wrong_step", "replayed", "out_of_range"}
    wanted |= {"unknown_signer", "too_large"}
    asyncio.run(_attack(swarm, url, wanted))
    swarm.wait_step("ada", before + 10)
    swarm.wait_step("bob", before + 10)
    equal_so_far(swarm, *PEERS)
    for name in PEERS:
        assert swarm.processes[name].child.poll() is None


def test_ctrl_c_leaves_cleanly_and_the_others_go_on(swarm: LocalSwarm) -> None:
    bob = swarm.processes["bob"]
    bob.interrupt()
    code, summary = bob.finish()
    assert code == 130
    assert summary["steps_applied"] > 0
    assert processes_with(str(swarm.folder / "bob")) == []
    at = swarm.last_step("ada")
    swarm.wait_step("ada", at + 5)
    here = {peer["id"]: peer["phase"] for peer in swarm.status()["peers"]}
    assert here[summary["id"]] == "absent"


def _metrics_url(swarm: LocalSwarm) -> str | None:
    events = swarm.events("ada", "metrics")
    return events[0]["url"] if events else None


def _refused(url: str) -> set[str]:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return {line.split('"')[1] for line in text.splitlines() if line.startswith("swarmentum_refused_total{")}


async def _attack(swarm: LocalSwarm, url: str, wanted: set[str]) -> None:
    """A stranger on the overlay with a valid identity says everything that it should not, until each was counted."""
    folder = swarm.folder / "mallory"
    mallory = Identity.load_or_create(folder / "identity.key")
    overlay = OverlaySettings(listen_host="127.0.0.1", bootstrap=tuple(swarm.bootstrap[:1]))
    host = Host(mallory, folder / "identity.key", overlay)
    blobs: dict[bytes, bytes] = {}
    topic = topic_of(swarm.invite.run_id)
    echoes: set[asyncio.Task[None]] = set()
    played: set[bytes] = set()

    def play_again(message: bytes) -> None:
        """At once, while its step is open: as it was, and with another signature; once, or it would be a flood."""
        if message in played or len(played) > 200:
            return
        played.add(message)
        for again in _forged(message, mallory):
            echoes.add(asyncio.get_running_loop().create_task(host.publish(topic, again)))

    await host.start()
    try:
        await host.serve(PROTOCOL, BlobServer(blobs.get, WireBytes(), lambda refusal: None).handle)
        await host.subscribe(topic, play_again)
        for addresses in await _peer_addresses(swarm):
            await host.connect(addresses)
        for _ in range(120):
            if wanted <= await asyncio.to_thread(_refused, url):
                return
            for message in _hostile(mallory, swarm, blobs):
                await host.publish(topic, message)
            await asyncio.sleep(0.25)
        missing = wanted - await asyncio.to_thread(_refused, url)
        raise AssertionError(f"never refused for: {sorted(missing)}")
    finally:
        await asyncio.gather(*echoes, return_exceptions=True)
        await host.stop()


def _forged(message: bytes, mallory: Identity) -> list[bytes]:
    try:
        envelope = envelope_pb2.SignedEnvelope.FromString(message)
    except DecodeError:
        return []
    if (
        envelope.kind != Kind.KIND_ANNOUNCEMENT
        or envelope.public_key == mallory.public_key
        or len(envelope.signature) != 64
    ):
        return []
    if not verify(
        envelope.public_key,
        envelope.signature,
        signed_bytes(envelope.kind, envelope.run_id, envelope.public_key, envelope.body),
    ):
        return []  # our own forgery comes back
    envelope.signature = bytes([envelope.signature[0] ^ 1]) + envelope.signature[1:]
    return [message, envelope.SerializeToString()]


async def _peer_addresses(swarm: LocalSwarm) -> list[list[str]]:
    from node.link.client import CoordinatorClient

    client = CoordinatorClient(swarm.invite, None)
    await client.connect()
    facts, _ = await client.get_run()
    await client.close()
    by_peer: dict[str, list[str]] = {}
    for address in facts.bootstrap:
        by_peer.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return list(by_peer.values())


def _hostile(mallory: Identity, swarm: LocalSwarm, blobs: dict[bytes, bytes]) -> list[bytes]:
    run_id, step = swarm.invite.run_id, swarm.last_step("ada")

    def announce(at: int, payload: bytes, size: int | None = None, run: bytes = run_id) -> bytes:
        body = update_pb2.Announcement(
            step=at,
            parent_hash=bytes(32),
            payload_sha256=hash_of(payload),
            payload_bytes=len(payload) if size is None else size,
        )
        blobs[hash_of(payload)] = payload
        return seal(mallory, Kind.KIND_ANNOUNCEMENT, run, body).SerializeToString()

    return [
        os.urandom(64),
        announce(step + 1, b"x")[:-20],
        announce(step + 1, b"x", run=bytes(32)),
        announce(step + 1, b"x", size=1 << 40),
        announce(step + 1000, b"x"),
        *(announce(step + ahead, b"x") for ahead in range(1, 5)),
        seal(mallory, Kind.KIND_PEER_RECORD, run_id, update_pb2.PeerRecord()).SerializeToString(),
        bytes(GOSSIP_MESSAGE_BYTES_MAX // 2),
        envelope_pb2.SignedEnvelope(
            kind=Kind.KIND_ANNOUNCEMENT, run_id=run_id, body=bytes(100_000)
        ).SerializeToString(),
    ]
