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
from pathlib import Path
from typing import Any

from node.blobs.payloads import Payloads
from node.overlay.settings import OverlaySettings
from node.swarm.events import Committed, Event, Failed, Opened
from node.swarm.membership import About
from node.swarm.parts import build
from node.swarm.session import Session
from node.wire.codec import Update
from protos.identity import Identity
from protos.invite import Invite
from protos.v1 import update_pb2
from tests.bench.coordinator import Watch, coordinator_serving

SECONDS_MAX = 300.0
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
    clock = (
        f"steps = 100000\nmin_peers = {options.peers}\nmax_peers = {options.peers}\nbatch_samples = {4 * options.peers}\n"
        "deadline_ms_min = 3000000\ndeadline_ms_max = 3000000\nsnapshot_every = 1000000\n"
    )
    with coordinator_serving(clock, "--no-layout") as (served, invite), tempfile.TemporaryDirectory() as folder:
        watch = Watch(served.pid, int(invite.coordinators[0].rpartition(":")[2]))
        return asyncio.run(_measured(options, invite, Path(folder), watch))


async def _measured(options: argparse.Namespace, invite: Invite, folder: Path, watch: Watch) -> dict[str, Any]:
    peers = [Peer(number, invite, folder / str(number), options) for number in range(options.peers)]
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
            "overhead": round(1 - payload / total, 3),
            "coordinator_bytes_peer_step": round((after.coordinator - before.coordinator) / each),
            "idle_bytes_s_peer": round((end.overlay - idle.overlay) / options.idle_s / options.peers),
            "connections_min": min(here),
            "refused": {name: count for peer in peers for name, count in peer.session.counters.refused.items()},
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        await asyncio.gather(*(peer.session.stop(leaving=False) for peer in peers), return_exceptions=True)


class Sent:
    """Bytes so far: on the overlay, to and from the coordinator, and of payloads."""

    def __init__(self, overlay: int, coordinator: int, payload: int) -> None:
        self.overlay, self.coordinator, self.payload = overlay, coordinator, payload

    @staticmethod
    def now(watch: Watch, peers: list[Peer]) -> Sent:
        [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
        coordinator = sum(watch.sockets())
        return Sent(
            int(line.split()[9]) - coordinator, coordinator, sum(p.session.counters.wire.blob_sent for p in peers)
        )


class AnyDoor:
    """Takes every payload: what votes mean is not measured here."""

    bytes_max = 1 << 20

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Update:
        return Update(step, 128, b"")


class Peer:
    """The network side of one peer. It answers a tick with random bytes, after a pause, while it `publishes`."""

    def __init__(self, number: int, invite: Invite, folder: Path, options: argparse.Namespace) -> None:
        folder.mkdir()
        self._options, self._invite = options, invite
        identity = Identity.load_or_create(folder / "identity.key")
        # without relaying, which reads p2pd's figures over the same loopback interface
        overlay = OverlaySettings(listen_host="127.0.0.1", reachability="public", relay_for_others=False)
        self.session = Session(
            build(
                invite,
                identity,
                folder / "identity.key",
                overlay,
                AnyDoor(),
                lambda sha256: None,
                Payloads(folder / "payloads"),
                self._take,
            )
        )
        self.publishes, self.joined, self.addresses = True, False, list[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, bootstrap: list[str]) -> None:
        """Join, and have the initial state."""
        await self.session.connect()
        await self.session.start(bootstrap)
        await self.session.enter(About(LAYOUT, 1, "cpu"))
        await self.session.follow_from(0, self._invite.run_id)
        await self.session.applied(0, self._state(0))
        await self.session.stored(0, ROOT, 1000, kept=True)
        self.addresses, self.joined = await self.session.host.addresses(), True

    async def _take(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Committed):
            step = event.signed.entry.step
            await self.session.applied(step, self._state(step))
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
        await self.session.publish(os.urandom(self._options.payload_bytes), said)

    @staticmethod
    def _state(step: int) -> bytes:
        return hashlib.sha256(b"traffic state %d" % step).digest()
