"""What the interop tests run against: a p2pd peer, a coordinator that says what a test wants, and the watch command.

Every wait is for a line or an answer, with a deadline.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from coordinator.store import home_files
from node.overlay.settings import OverlaySettings
from protos.envelope import Kind, seal
from protos.identity import Identity
from protos.invite import Invite
from protos.limits import ENTRIES_PAGE_MAX
from protos.log import FORMAT_VERSION, Contribution, Entry, SignedEntry, lr_to_bits, run_id_of, seal_entry
from protos.run_config import RunConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2, log_pb2, update_pb2

LINE_SECONDS_MAX = 300.0
LOOK_SECONDS = 0.05
ROOT = Path(__file__).resolve().parents[2]
Line = dict[str, Any]


class FakeCoordinator(rpc.CoordinatorServiceServicer):
    """Serves one run's facts and whatever `entries` holds. Counts the ListEntries calls."""

    def __init__(self, total_steps: int, operators: Sequence[Identity] = ()) -> None:
        keys = {"keys": [it.peer_id for it in operators]}
        config = RunConfig.model_validate({"name": "interop", "clock": {"steps": total_steps}, "operators": keys})
        self.identity = Identity.from_seed(bytes([1]) * 32)
        self.genesis = log_pb2.Genesis(
            format_version=FORMAT_VERSION,
            config_json=config.canonical_json(),
            coordinator_public_key=self.identity.public_key,
            nonce=bytes(16),
        )
        self.run_id = run_id_of(self.genesis)
        self.entries: list[SignedEntry] = []
        self.bootstrap: tuple[str, ...] = ()
        self.lists = 0
        self.end: envelope_pb2.SignedEnvelope | None = None

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:  # noqa: N802
        facts = pb.GetRunResponse(genesis=self.genesis, head_step=len(self.entries), bootstrap=self.bootstrap)
        if self.end is not None:
            facts.end.CopyFrom(self.end)
            facts.total_steps = len(self.entries)
        return facts

    async def ListEntries(self, request: pb.ListEntriesRequest, context: Any) -> pb.ListEntriesResponse:  # noqa: N802
        self.lists += 1
        page = self.entries[request.from_step - 1 :][:ENTRIES_PAGE_MAX]
        entries = [envelope_pb2.SignedEnvelope.FromString(signed.envelope) for signed in page]
        return pb.ListEntriesResponse(entries=entries, head_step=len(self.entries))

    @asynccontextmanager
    async def serve(self, home: Path) -> AsyncIterator[Invite]:
        """Over TLS with a pinned certificate, as the real one."""
        certificate = home_files.load_or_create(home)
        server = grpc.aio.server()
        rpc.add_CoordinatorServiceServicer_to_server(self, server)
        credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            yield self.invite(certificate.sha256, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    def invite(self, certificate_sha256: bytes, address: str, bootstrap: tuple[str, ...] = ()) -> Invite:
        return Invite(self.run_id, (address,), self.identity.public_key, certificate_sha256, bootstrap, "interop")


class Log:
    """Makes genuine entries and announcements of a run, in order."""

    def __init__(self, run_id: bytes, coordinator: Identity) -> None:
        self.run_id, self.coordinator = run_id, coordinator
        self.step, self.head = 0, run_id
        self.peers = sorted((Identity.from_seed(bytes([n]) * 32) for n in (7, 8, 9)), key=lambda who: who.public_key)

    def announcement(self, peer: Identity, **changes: Any) -> update_pb2.Announcement:
        """For the next step."""
        fields: dict[str, Any] = {
            "step": self.step + 1,
            "parent_hash": self.head,
            "payload_sha256": payload_sha256(self.step + 1, peer),
            "payload_bytes": 1000,
            "samples": 16,
            "tokens": 2048,
            "loss": 5.0 - 0.01 * (self.step + 1),
            "compute_ms": 40,
        }
        return update_pb2.Announcement(**(fields | changes))

    def announce(self, peer: Identity, **changes: Any) -> bytes:
        """The announcement as it is gossiped."""
        body = self.announcement(peer, **changes)
        return seal(peer, Kind.KIND_ANNOUNCEMENT, self.run_id, body).SerializeToString()

    def entry(self, **changes: Any) -> SignedEntry:
        """The next entry, without making it the head: every peer contributes what it announces."""
        step = self.step + 1
        fields: dict[str, Any] = {
            "step": step,
            "parent_hash": self.head,
            "contributions": tuple(
                Contribution(p.public_key, payload_sha256(step, p), 1000, 16, 2048, 5.0 - 0.01 * step)
                for p in self.peers
            ),
            "lr_bits": lr_to_bits(2e-3),
            "parent_state_digest": b"",
            "returned_samples": (),
            "next_sample": step * 48,
        }
        return seal_entry(self.coordinator, self.run_id, Entry(**(fields | changes)))

    def commit(self) -> SignedEntry:
        """The next entry, now the head."""
        signed = self.entry()
        self.step, self.head = signed.entry.step, signed.hash
        return signed


def payload_sha256(step: int, peer: Identity) -> bytes:
    return hashlib.sha256(peer.public_key + step.to_bytes(8, "big")).digest()


@asynccontextmanager
async def overlay_peer(home: Path, topic: str) -> AsyncIterator[Any]:
    """A go-libp2p peer (p2pd) on the run's topic, on loopback."""
    from node.overlay.host import Host

    path = home / "peer.key"
    host = Host(Identity.load_or_create(path), path, OverlaySettings(listen_host="127.0.0.1"))
    await host.start()
    try:
        await host.subscribe(topic, lambda _: None)
        yield host
    finally:
        await host.stop()


class Watching:
    """`swarmentum watch --json` in a process of its own, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[Line] = []
        self._listed: set[str] = set()
        self.stderr = asyncio.create_task(self._errors())

    async def _errors(self) -> str:
        return (await self.process.stderr.read()).decode()

    async def until(self, wanted: Callable[[Line], bool]) -> Line:
        """The next line for which `wanted` holds; AssertionError with everything said so far if it does not come."""
        try:
            async with asyncio.timeout(LINE_SECONDS_MAX):
                while raw := await self.process.stdout.readline():
                    line: Line = json.loads(raw)
                    self.lines.append(line)
                    if wanted(line):
                        return line
        except TimeoutError:
            raise AssertionError(f"no such line in {LINE_SECONDS_MAX} s; the last: {self.lines[-5:]}") from None
        raise AssertionError(f"it ended; the last: {self.lines[-5:]}; stderr: {await self.stderr}")

    async def entry(self, step: int) -> Line:
        return await self.until(lambda line: line["event"] == "entry" and line["step"] == step)

    async def overlay(self, host: Any, topic: str, restarts: int = 0) -> None:
        """Until the watcher knows the peer's subscription, and the peer the watcher's."""
        await self.until(lambda line: line["event"] == "overlay" and line["peers"] and line["restarts"] >= restarts)
        await self.listed(host, topic)

    async def listed(self, host: Any, topic: str) -> None:
        """Until the peer lists a subscriber that it did not list before: what it publishes earlier reaches nobody."""
        async with asyncio.timeout(LINE_SECONDS_MAX):
            while not (new := await host.subscribers(topic) - self._listed):
                await asyncio.sleep(LOOK_SECONDS)
        self._listed |= new

    async def all_of(self, *wanted: Callable[[Line], bool]) -> None:
        """Lines for which these hold, in whatever order they come."""
        missing = list(wanted)

        def last_one(line: Line) -> bool:
            missing[:] = [one for one in missing if not one(line)]
            return not missing

        await self.until(last_one)

    async def end(self) -> tuple[int, Line, str]:
        """Exit code, summary and stderr."""
        summary = await self.until(lambda line: line["event"] == "summary")
        async with asyncio.timeout(LINE_SECONDS_MAX):
            return await self.process.wait(), summary, await self.stderr

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


@asynccontextmanager
async def watching(link: str, *options: str) -> AsyncIterator[Watching]:
    """The command, ended with the test."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node", "watch", link, "--json", *options),
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    found = Watching(process)
    try:
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await found.stderr
