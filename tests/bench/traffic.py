"""What the network sides of peers send: bytes a peer and step, how much of it is payload, and what an idle swarm sends.

Real sessions with p2pd each and a real coordinator, without models, in a network namespace of its own (`unshare --net`, as root
or with user namespaces): every byte on its loopback interface is theirs. What went to and from the coordinator is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.blobs.payloads import Payloads
from node.building import LateDoor
from node.optim.layout import CHUNK_ELEMENTS
from node.optim.votes.sums import SUMMED
from node.overlay.settings import OverlaySettings
from node.swarm.facts import Committed, Event, Failed, Opened
from node.swarm.membership import JoinFacts
from node.swarm.pulls import Pulls
from node.swarm.session import Session, build
from node.wire import UpdateDoor, encode
from protos.identity import Identity
from protos.invite import Invite
from protos.slices import Update
from protos.v1 import update_pb2
from tests.bench.coordinator import Watch, coordinator_serving

SECONDS_MAX = 300.0
ONE_IN = 16
INSIDE = "SWARMENTUM_BENCH_TRAFFIC"
LAYOUT, ROOT = (hashlib.sha256(name).digest() for name in (b"traffic layout", b"traffic root"))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="counted, after the first two")
    parser.add_argument("--payload-bytes", type=int, default=7000)
    parser.add_argument(
        "--pause-s", type=float, default=0.3, help="between a tick and a peer's votes, as a gradient takes"
    )
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument(
        "--aggregators", type=int, default=0, help="of each step (default 0: all payloads to everybody)"
    )
    parser.add_argument("--ranges", type=int, default=1, help="of the model, with aggregators (default 1)")
    parser.add_argument("--cap", type=int, default=2, help="of the sums (default 2)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if os.environ.get(INSIDE) != "1":
        flags = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in vars(options).items()
            if name not in ("command", "json")
        ]
        inner = [sys.executable, "-m", "tests.bench", "traffic", "--json", *flags]
        command = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inner]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, INSIDE: "1"})
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(number) for number in range(options.peers)]
        for home in homes:
            home.mkdir()
        named = [Identity.load_or_create(home / "identity.key").peer_id for home in homes]
        settings = (
            f"steps = 100000\nmin_peers = {options.peers}\nmax_peers = {options.peers}\n"
            f"batch_samples = {4 * options.peers}\naggregators = {options.aggregators}\n"
            f"ranges = {options.ranges}\n"
            "deadline_ms_min = 3000000\ndeadline_ms_max = 3000000\nsnapshot_every = 1000000\n"
            f'[optimizer]\nselection = "random"\none_in = {ONE_IN}\ncap = {options.cap}\n'
            f'[admission]\nmode = "allow_list"\nallowed = {json.dumps(named)}\n'
        )
        with coordinator_serving(settings, "--no-layout") as (served, invite):
            watch = Watch(served.pid, int(invite.coordinators[0].rpartition(":")[2]))
            return asyncio.run(_measured(options, invite, homes, watch))


async def _measured(options: argparse.Namespace, invite: Invite, homes: list[Path], watch: Watch) -> dict[str, Any]:
    peers = [Peer(invite, home, options) for home in homes]
    try:
        for peer in peers:
            await peer.begin([address for other in peers[:8] if other.joined for address in other.addresses])

        async def until(step: int) -> Sent:
            async with asyncio.timeout(SECONDS_MAX):
                while min(peer.session.committed_step for peer in peers) < step:
                    await asyncio.sleep(0.05)
            return Sent.now(watch, peers)

        before = await until(2)
        began_at, first = time.monotonic(), min(peer.session.committed_step for peer in peers)
        after = await until(first + options.steps)
        steps, seconds = min(peer.session.committed_step for peer in peers) - first, time.monotonic() - began_at
        for peer in peers:
            peer.publishes = False
        await asyncio.sleep(5)
        idle = Sent.now(watch, peers)
        await asyncio.sleep(options.idle_s)
        end = Sent.now(watch, peers)
        here = [len(await peer.session.host.connected()) for peer in peers]
        each = options.peers * steps
        total, payload = (after.overlay - before.overlay) / each, (after.payload - before.payload) / each
        return {
            "peers": options.peers,
            "payload_bytes": options.payload_bytes,
            "steps": steps,
            "steps_per_second": round(steps / seconds, 2),
            "overlay_bytes_peer_step": round(total),
            "payload_bytes_peer_step": round(payload),
            "payloads_peer_step": round(payload / peers[0].payload_bytes, 2),
            "payloads_down_most": round(_most_in_a_step(peers, range(first, first + steps)), 2),
            "cpu_ms_peer_step": round(1000 * (after.cpu - before.cpu) / each, 2),
            "overhead": round(1 - payload / total, 3),
            "coordinator_bytes_peer_step": round((after.coordinator - before.coordinator) / each),
            "idle_bytes_s_peer": round((end.overlay - idle.overlay) / options.idle_s / options.peers),
            "connections_min": min(here),
            "refused": {name: count for peer in peers for name, count in peer.session.counters.refused.items()},
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        await asyncio.gather(*(peer.session.stop(leaving=False) for peer in peers), return_exceptions=True)


def _most_in_a_step(peers: list[Peer], steps: range) -> float:
    """The most that came to one peer for one step, in payloads: of payloads, and of sums by their bytes."""
    return max(peer.came[step] for peer in peers for step in steps) / peers[0].payload_bytes


class Sent:
    """Bytes so far: on the overlay, to and from the coordinator, and of payloads and sums; CPU seconds of all peers."""

    def __init__(self, overlay: int, coordinator: int, payload: int, cpu: float) -> None:
        self.overlay, self.coordinator, self.payload, self.cpu = overlay, coordinator, payload, cpu

    @staticmethod
    def now(watch: Watch, peers: list[Peer]) -> Sent:
        [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
        coordinator = sum(watch.sockets())
        sent = sum(p.session.counters.wire.blob_sent for p in peers)
        return Sent(int(line.split()[9]) - coordinator, coordinator, sent, _cpu_seconds())


def _cpu_seconds() -> float:
    """Of this process, which has all peers, and of their daemons."""
    ticks, ours = 0, {str(os.getpid())}
    for _ in range(3):  # children, and theirs
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[1] in ours:
                    ours.add(stat.parent.name)
    for pid in ours:
        with suppress(OSError):
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Peer:
    """The network side of one peer. It answers a tick with random votes, after a pause, while it `publishes`."""

    def __init__(self, invite: Invite, folder: Path, options: argparse.Namespace) -> None:
        self._options, self._invite = options, invite
        self._votes_bytes = max(8 * options.payload_bytes * ONE_IN // CHUNK_ELEMENTS, 1) * CHUNK_ELEMENTS // ONE_IN // 8
        door = LateDoor()
        chunks = self._votes_bytes * 8 * ONE_IN // CHUNK_ELEMENTS
        self._chunks, self.came = chunks, Counter[int]()
        door.door = UpdateDoor(invite.run_id, LAYOUT, chunks, SUMMED, options.cap, options.ranges)
        self.payload_bytes = len(self._votes(1))
        identity = Identity.load_or_create(folder / "identity.key")
        # without relaying, which reads p2pd's figures over the same loopback interface
        overlay = OverlaySettings(listen_host="127.0.0.1", reachability="public", relay_for_others=False)
        self.session = Session(
            build(
                invite,
                identity,
                folder / "identity.key",
                overlay,
                door,
                lambda sha256: None,
                Payloads(folder / "payloads"),
                self._take,
            )
        )
        self._pulls = self.session.parts.push_server._keep.__self__  # type: ignore[attr-defined]
        self._pulls.keep = self.session.parts.push_server._keep = self._keep
        self.publishes, self.joined, self.addresses = True, False, list[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, bootstrap: list[str]) -> None:
        """Join, and have the initial state."""
        await self.session.connect()
        await self.session.start(bootstrap)
        await self.session.enter(JoinFacts(LAYOUT, 1, "cpu"))
        await self.session.follow_from(0, self._invite.run_id)
        outbox = self.session.parts.outbox
        outbox.add_applied(0, self._state(0))
        outbox.add_snapshot(0, ROOT, 1000, kept=True)
        self.addresses, self.joined = await self.session.host.addresses(), True

    async def _take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Committed):
            step = event.signed.entry.step
            self.session.parts.outbox.add_applied(step, self._state(step))
        elif isinstance(event, Opened) and event.ranges and self.publishes:
            task = asyncio.ensure_future(self._publish(event))
            self._tasks.add(task)
            task.add_done_callback(self._published)

    def _published(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # asyncio prints what went wrong

    async def _publish(self, opened: Opened) -> None:
        await asyncio.sleep(self._options.pause_s)
        tick = opened.tick
        said = update_pb2.Announcement(step=tick.step, parent_hash=tick.parent_hash, samples=4, tokens=400, loss=2.0)
        await self.session.publish(self._votes(tick.step), said)

    def _votes(self, step: int) -> bytes:
        update = Update(step, ONE_IN, os.urandom(self._votes_bytes))
        return encode(self._invite.run_id, LAYOUT, update, self._chunks, self._options.ranges)

    def _keep(self, step: int, sha256: bytes, data: bytes) -> None:
        self.came[step] += len(data)
        Pulls.keep(self._pulls, step, sha256, data)

    @staticmethod
    def _state(step: int) -> bytes:
        return hashlib.sha256(b"traffic state %d" % step).digest()
