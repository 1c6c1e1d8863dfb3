"""`swarmentum watch` (py-libp2p) against go-libp2p peers: what it follows, what it refuses, what it survives."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from node.watch.watch_command import topic_of
from protos.envelope import Kind, seal
from protos.identity import Identity, peer_id
from protos.invite import Invite
from protos.limits import GOSSIP_MESSAGE_BYTES_MAX
from protos.orders import End, seal_end
from tests.interop.world import LINE_SECONDS_MAX, ROOT, FakeCoordinator, Log, Watching, overlay_peer, watching

# find_spec: libp2p and hivemind cannot be imported in one process
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(find_spec("libp2p") is None, reason="needs the extra: pip install -e '.[watch]'"),
    pytest.mark.skipif(find_spec("hivemind") is None, reason="needs the extra: pip install -e '.[node]'"),
]
TOTAL_STEPS = 100
MALFORMED_FRAME = bytes.fromhex("05ffffffffff")


class World:
    """A run with one overlay peer, and a log to gossip from."""

    def __init__(self, coordinator: FakeCoordinator, invite: Invite, host: Any) -> None:
        self.coordinator, self.invite, self.host = coordinator, invite, host
        self.log = Log(coordinator.run_id, coordinator.identity)
        self.topic = topic_of(coordinator.run_id)

    async def gossip(self, *messages: bytes) -> None:
        for message in messages:
            await self.host.publish(self.topic, message)

    async def step(self) -> None:
        """One step of the run: everyone announces, the entry follows; the coordinator lists it too."""
        await self.gossip(*(self.log.announce(peer) for peer in self.log.peers))
        await self.commit()

    async def commit(self) -> None:
        signed = self.log.commit()
        self.coordinator.entries.append(signed)
        await self.gossip(signed.envelope)


@asynccontextmanager
async def world(home: Path, total_steps: int = TOTAL_STEPS) -> AsyncIterator[World]:
    coordinator = FakeCoordinator(total_steps)
    async with coordinator.serve(home) as invite, overlay_peer(home, topic_of(coordinator.run_id)) as host:
        coordinator.bootstrap = tuple(await host.addresses())
        yield World(coordinator, invite, host)


def reason(name: str) -> Any:
    return lambda line: line["event"] == "refused" and line["reason"] == name


async def test_it_follows_a_run_to_its_end(tmp_path: Path) -> None:
    async with world(tmp_path, total_steps=4) as here, watching(here.invite.link()) as watch:
        await watch.overlay(here.host, here.topic)
        for step in (1, 2, 3):
            await here.step()
            line = await watch.entry(step)
            assert (line["source"], line["announced"], line["hash"]) == ("gossip", 3, here.log.head.hex())
            assert line["loss"] == pytest.approx(5.0 - 0.01 * step)
        await here.step()
        code, summary, _ = await watch.end()
    assert code == 0
    assert summary["why"] == "the run is finished"
    assert (summary["step"], summary["head"]) == (4, here.log.head.hex())
    assert (summary["entries_gossip"], summary["entries_coordinator"], summary["anchored_at"]) == (4, 0, None)
    assert summary["refused"] == {}
    assert {row["id"]: row["votes_accepted"] for row in summary["peers"]} == {p.peer_id: 4 for p in here.log.peers}
    announced = [line for line in watch.lines if line["event"] == "announcement"]
    assert len(announced) == summary["announcements"] == 12
    assert {line["peer"] for line in announced} == {peer_id(p.public_key) for p in here.log.peers}


async def test_it_ends_where_the_operator_ended_the_run_and_says_why(tmp_path: Path) -> None:
    async with world(tmp_path) as here, watching(here.invite.link()) as watch:
        await watch.overlay(here.host, here.topic)
        for step in (1, 2):
            await here.step()
            await watch.entry(step)
        end = End(2, here.log.head, "the loss is good enough")
        here.coordinator.end = seal_end(here.log.coordinator, here.invite.run_id, end)
        code, summary, _ = await watch.end()
    assert (code, summary["why"]) == (0, "the operator ended the run at step 2: the loss is good enough")
    assert (summary["step"], summary["steps"]) == (2, 2)


async def test_it_fetches_what_gossip_did_not_bring(tmp_path: Path) -> None:
    async with world(tmp_path) as here, watching(here.invite.link(), "--steps", "75") as watch:
        here.coordinator.entries += [here.log.commit() for _ in range(70)]  # before it joined: two pages
        await watch.all_of(
            lambda line: line["event"] == "overlay" and line["peers"] == 1,
            lambda line: line["event"] == "entry" and line["step"] == 70,
        )
        await watch.listed(here.host, here.topic)
        for _ in range(4):  # committed while gossip failed
            here.coordinator.entries.append(here.log.commit())
        await here.commit()
        code, summary, _ = await watch.end()
    steps = [line["step"] for line in watch.lines if line["event"] == "entry"]
    assert steps == list(range(1, 76))
    assert [line["source"] for line in watch.lines if line["event"] == "entry"][70:] == ["coordinator"] * 4 + ["gossip"]
    assert (code, summary["why"], summary["head"]) == (0, "75 steps were seen", here.log.head.hex())


async def test_it_refuses_hostile_bytes_each_with_its_reason(tmp_path: Path) -> None:
    async with world(tmp_path) as here, watching(here.invite.link()) as watch:
        log, peer = here.log, here.log.peers[0]
        await watch.overlay(here.host, here.topic)
        await here.step()
        await watch.entry(1)
        good = log.announce(peer)
        forged = log.entry().envelope
        other_run = seal(peer, Kind.KIND_ANNOUNCEMENT, bytes(32), log.announcement(peer)).SerializeToString()
        not_the_coordinator = Log(log.run_id, peer)
        not_the_coordinator.step, not_the_coordinator.head = log.step, log.head
        hostile = {
            "malformed": b"\xff" * 100,
            "too_large": bytes(GOSSIP_MESSAGE_BYTES_MAX + 1),
            "bad_signature": forged[:-1] + bytes([forged[-1] ^ 1]),
            "wrong_run": other_run,
            "unknown_signer": not_the_coordinator.entry().envelope,
            "wrong_kind": seal(peer, Kind.KIND_JOIN, log.run_id, log.announcement(peer)).SerializeToString(),
            "wrong_step": log.announce(peer, step=90),
            "wrong_parent": log.announce(peer, parent_hash=bytes(32)),
            "out_of_range": log.announce(peer, payload_bytes=1 << 40),
        }
        for name, data in hostile.items():
            await here.host.pubsub.publish_unchecked(here.topic, data)  # beyond what `publish` lets through
            await watch.until(reason(name))
        await here.gossip(good)
        await watch.until(lambda line: line["event"] == "announcement" and line["step"] == 2)
        await here.gossip(good, log.announce(peer, payload_sha256=bytes(32)))  # the same again is harmless
        await watch.until(reason("replayed"))
        await here.gossip(log.announce(log.peers[1], payload_sha256=bytes(32)))
        await watch.until(lambda line: line["event"] == "announcement" and line["step"] == 2)
        await here.commit()  # holds another payload of peers[1] than it announced
        await watch.until(reason("hash_mismatch"))
        await here.gossip(log.announce(log.peers[2], step=1))
        late = await watch.until(lambda line: line["event"] == "announcement" and line["step"] == 1 and line["late"])
        assert late["peer"] == log.peers[2].peer_id
        watch.interrupt()
        code, summary, _ = await watch.end()
    assert (code, summary["exit_code"], summary["why"]) == (130, 130, "interrupted")
    assert summary["refused"] == dict.fromkeys([*hostile, "replayed", "hash_mismatch"], 1)
    assert (summary["step"], summary["late"], summary["repeated"]) == (2, 1, 1)
    assert summary["overlay_restarts"] == 0


@pytest.mark.parametrize("when", ["known", "waiting", "parent"])
async def test_two_histories_signed_by_the_coordinator_end_it(tmp_path: Path, when: str) -> None:
    async with world(tmp_path) as here, watching(here.invite.link()) as watch:
        await watch.overlay(here.host, here.topic)
        await here.step()
        await watch.entry(1)
        if when == "known":
            rival = Log(here.log.run_id, here.log.coordinator).entry(next_sample=7)
            await here.gossip(rival.envelope)
        elif when == "waiting":
            here.log.commit()  # nobody hears of step 2
            await here.gossip(here.log.entry().envelope, here.log.entry(next_sample=7).envelope)
        else:
            await here.gossip(here.log.entry(parent_hash=bytes(32)).envelope)
        code, summary, stderr = await watch.end()
    assert (code, summary["exit_code"]) == (5, 5)
    assert "do not trust this run" in summary["why"]
    assert stderr.strip() == f"error: {summary['why']}"


async def test_it_survives_a_malformed_meshsub_frame(tmp_path: Path) -> None:
    from hivemind.p2p import PeerID

    async with world(tmp_path) as here, watching(here.invite.link()) as watch:
        await watch.overlay(here.host, here.topic)
        (remote,) = await here.host.connected()
        call = here.host.p2p.call_binary_stream_handler(PeerID.from_base58(remote), "/meshsub/1.1.0")
        _, reader, writer = await call
        writer.write(MALFORMED_FRAME)
        assert await reader.read() == b""  # it was read, and the stream closed
        writer.close()
        await here.step()
        assert (await watch.entry(1))["source"] == "gossip"
        watch.interrupt()
        code, summary, _ = await watch.end()
    assert (code, summary["overlay_restarts"], summary["refused"]) == (130, 0, {})


async def test_without_the_coordinator_it_starts_at_the_first_entry_that_it_hears(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        invite = replace(here.invite, coordinators=("127.0.0.1:1",), bootstrap=here.coordinator.bootstrap)
        async with watching(invite.link(), "--steps", "2") as watch:
            await watch.overlay(here.host, here.topic)
            for _ in range(5):
                here.log.commit()
            await here.commit()
            await here.commit()
            code, summary, _ = await watch.end()
    assert (code, summary["anchored_at"], summary["step"], summary["steps"]) == (0, 6, 7, None)


async def test_it_ends_when_the_time_is_over(tmp_path: Path) -> None:
    async with world(tmp_path) as here, watching(here.invite.link(), "--seconds", "0.5") as watch:
        code, summary, _ = await watch.end()
    assert (code, summary["why"]) == (0, "the time is over")


async def test_what_cannot_be_watched_is_said_with_its_exit_code(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(TOTAL_STEPS)
    async with coordinator.serve(tmp_path) as invite:
        nobody = replace(invite, coordinators=("127.0.0.1:1",))
        another = replace(invite, certificate_sha256=bytes(32))
        other_run = replace(invite, run_id=bytes(32))
        for wrong, expected in ((nobody, 3), (another, 4), (other_run, 4)):
            async with watching(wrong.link()) as watch:
                code, summary, stderr = await watch.end()
            assert (code, summary["exit_code"]) == (expected, expected)
            assert stderr.startswith("error: ")


async def test_it_watches_a_run_of_the_real_coordinator(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator"]
    serve = [*command, "serve", "--home", str(tmp_path), "--listen", "127.0.0.1:0", "--advertise", "127.0.0.1:1"]
    with subprocess.Popen(
        [*serve, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as served:
        try:
            port = json.loads(served.stdout.readline())["port"]
            (tmp_path / "run.toml").write_text("[clock]\nsteps = 3\n")
            create = [
                *command,
                "run",
                "create",
                str(tmp_path / "run.toml"),
                "--home",
                str(tmp_path),
                "--json",
                "--no-layout",
            ]
            made = subprocess.run(
                create, capture_output=True, text=True, check=True, timeout=LINE_SECONDS_MAX, cwd=ROOT
            )
            invite = Invite.parse(json.loads(made.stdout)["invite"])
            topic = topic_of(invite.run_id)
            async with overlay_peer(tmp_path / "overlay", topic) as host:
                here = replace(invite, coordinators=(f"127.0.0.1:{port}",), bootstrap=tuple(await host.addresses()))
                log = Log(invite.run_id, Identity.load_or_create(tmp_path / "identity.key"))
                async with watching(here.link()) as watch:
                    await watch.overlay(host, topic)
                    await _three_steps(host, topic, log, watch)
                    code, summary, _ = await watch.end()
        finally:
            served.terminate()
    assert (code, summary["why"], summary["steps"]) == (0, "the run is finished", 3)
    assert summary["head"] == log.head.hex()


async def _three_steps(host: Any, topic: str, log: Log, watch: Watching) -> None:
    for _ in range(3):
        for peer in log.peers:
            await host.publish(topic, log.announce(peer))
        await host.publish(topic, log.commit().envelope)


def test_the_topic_is_the_one_that_peers_use() -> None:
    from node.swarm.announcements import topic_of as topic_of_peers

    assert topic_of(bytes(range(32))) == topic_of_peers(bytes(range(32)))


def test_watch_imports_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys, node.watch.watch_command, node.watch.net\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'hivemind', 'numpy', 'libp2p', 'trio')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.strip() == "[]"
