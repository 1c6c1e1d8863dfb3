"""The coordinator as the process that people start: commands, exit codes, a clean stop, and kill -9 at every write."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.clock.effects import EntryCommitted
from coordinator.store.journal import Journal
from node.link.client import CoordinatorClient
from protos.envelope import Kind, seal
from protos.errors import NetworkError
from protos.identity import Identity
from protos.invite import Invite
from protos.log import Chain
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2, update_pb2
from tests.system.crashing_coordinator import KILLED
from tests.unit.coordinator.driver import LAYOUT, digest_of, sha, snapshot_at

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 240.0
"""For what comes at all; a busy machine is no failure."""
STEPS = 3
RUN_TOML = f"""name = "system"
[clock]
steps = {STEPS}
deadline_ms_min = 60000
min_peers = 2
batch_samples = 8
snapshot_every = 2
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMENTUM_")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "SWARMENTUM_COORDINATOR_WEB_LISTEN": "none"}


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the operator's command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments],
        cwd=cwd, env=environment(), capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip


@dataclass
class Process:
    """A coordinator that serves."""

    process: asyncio.subprocess.Process
    serving: dict[str, Any]

    @property
    def port(self) -> int:
        return int(self.serving["port"])

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), SECONDS_MAX)


async def start(home: Path, *flags: str, port: int = 0, module: tuple[str, ...] = ("coordinator",)) -> Process:
    """Start it and wait until it says that it serves; AssertionError with its words if it does not."""
    stderr = (home.parent / "stderr").open("ab")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *module, "serve", "--home", str(home), "--listen", f"127.0.0.1:{port}", "--json", *flags,
        cwd=home.parent, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    stderr.close()
    line = await asyncio.wait_for(process.stdout.readline(), SECONDS_MAX)
    assert line, (home.parent / "stderr").read_text()[-2000:]
    return Process(process, json.loads(line))


@asynccontextmanager
async def serving(home: Path, *flags: str, module: tuple[str, ...] = ("coordinator",)) -> AsyncIterator[Process]:
    """Serve, and stop at the end."""
    made = await start(home, *flags, module=module)
    try:
        yield made
    finally:
        if made.process.returncode is None:
            made.process.kill()
            await made.process.wait()


async def create(home: Path) -> Invite:
    """`run create` on the coordinator that serves `home`."""
    file = home.parent / "run.toml"
    file.write_text(RUN_TOML)
    done = await asyncio.to_thread(
        command, "run", "create", str(file), "--home", str(home), "--no-layout", "--json", cwd=home.parent
    )
    assert done.returncode == 0, done.stderr
    return Invite.parse(json.loads(done.stdout)["invite"])


@dataclass
class ScriptedPeer:
    """A peer that computes nothing: real signatures and calls, payloads that are hashes; comes back for ever."""

    number: int
    invite: Invite
    everyone: tuple[int, ...] = (0, 1)
    entries: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity = Identity.from_seed(bytes([50 + self.number]) * 32)
        self.chain = Chain(self.invite.run_id, self.invite.coordinator_public_key)
        self.client = CoordinatorClient(self.invite, self.identity)

    async def live(self) -> None:
        """Take part until the run is finished, whatever happens to the coordinator."""
        while True:
            try:
                await self.client.connect()
                await self.client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
                if await self._follow():
                    return
            except NetworkError:
                await asyncio.sleep(0.02)  # between two tries
            finally:
                await self.client.close()

    async def _follow(self) -> bool:
        told = False
        async for event in self.client.follow(self.chain.step):
            if event.HasField("entry"):
                data = event.entry.SerializeToString(deterministic=True)
                self.chain.extend(data)
                self.entries.append(data)
            if not event.HasField("entry") or told:
                told = True
                await self._tell(event)
            if event.notice.kind == pb.NoticeKind.NOTICE_KIND_FINISHED:
                return True
        return False

    async def _tell(self, event: pb.FollowResponse) -> None:
        step = self.chain.step
        fact = snapshot_at(step // 2 * 2)
        body = pb.ReportBody(
            applied=[pb.AppliedState(step=step, state_digest=digest_of(step))],
            snapshots=[pb.SnapshotRef(step=fact.step, root=fact.root, total_bytes=fact.total_bytes)],
        )
        if event.HasField("tick"):
            tick = log_pb2.Tick.FromString(event.tick.envelope.body)
            for number in self.everyone:
                key = Identity.from_seed(bytes([50 + number]) * 32).public_key
                body.holdings.add(step=tick.step, public_key=key, payload_sha256=sha(number, tick.step))
            announcement = update_pb2.Announcement(
                step=tick.step, parent_hash=tick.parent_hash, payload_sha256=sha(self.number, tick.step),
                payload_bytes=10, samples=4, tokens=512, loss=2.0, compute_ms=5,
            )  # fmt: skip
            sealed = seal(self.identity, Kind.KIND_ANNOUNCEMENT, self.invite.run_id, announcement)
            body.announcement.CopyFrom(sealed)
        await self.client.report(body)


def journalled(home: Path, invite: Invite) -> list[EntryCommitted]:
    """What the database says, once nobody serves it."""
    journal = Journal(Journal.sqlite_url(home), Identity.load_or_create(home / "identity.key"))
    try:
        return [record for record in journal.records(invite.run_id) if isinstance(record, EntryCommitted)]
    finally:
        journal.close()


@pytest.mark.long
@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.nightly)])
async def test_killed_at_every_write(tmp_path: Path, when: str) -> None:
    """Every life makes one record and dies: right after writing it, or right before writing the next one."""
    home = tmp_path / "home"
    first = await start(home)
    invite, port = await create(home), first.port
    first.process.kill()
    await first.ended()
    peers = [ScriptedPeer(number, invite) for number in range(2)]
    run = asyncio.gather(*(peer.live() for peer in peers))
    lives = 0
    write = "1" if when == "after" else "2"
    try:
        async with asyncio.timeout(2 * SECONDS_MAX):
            while not run.done():
                module = ("tests.system.crashing_coordinator", when, write)
                alive = await start(home, port=port, module=module)
                lives += 1
                ended = asyncio.get_running_loop().create_task(alive.ended())
                await asyncio.wait({ended, run}, return_when=asyncio.FIRST_COMPLETED)
                if run.done():
                    alive.process.send_signal(signal.SIGTERM)
                    assert await ended in (0, KILLED)
                else:
                    assert await ended == KILLED, (tmp_path / "stderr").read_text()[-2000:]
        await run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert lives > STEPS, "an entry and the tick after it are one write"
    entries = journalled(home, invite)
    assert [record.entry.step for record in entries] == list(range(1, STEPS + 1))
    for peer in peers:
        assert peer.chain.head == entries[-1].hash
        assert len(peer.entries) == STEPS
    assert all(len(record.entry.contributions) == 2 for record in entries), "a kill lost somebody's votes"


async def test_a_run_from_creation_to_its_end(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with serving(home, "--metrics-listen", "127.0.0.1:0") as coordinator:
        invite = await create(home)
        peers = [ScriptedPeer(number, invite) for number in range(2)]
        async with asyncio.timeout(SECONDS_MAX):
            await asyncio.gather(*(peer.live() for peer in peers))
        assert peers[0].entries == peers[1].entries
        listed = await asyncio.to_thread(command, "run", "list", "--home", str(home), "--json", cwd=tmp_path)
        assert listed.returncode == 0, listed.stderr
        row = json.loads(listed.stdout)
        assert (row["name"], row["phase"], row["step"], row["steps"]) == ("system", "finished", STEPS, STEPS)
        again = await asyncio.to_thread(command, "run", "invite", "system", "--home", str(home), cwd=tmp_path)
        assert Invite.parse(again.stdout) == invite
        lost = await asyncio.to_thread(command, "run", "invite", "nothing", "--home", str(home), cwd=tmp_path)
        assert lost.returncode == 2
        assert "0 runs are called 'nothing'" in lost.stderr
        url = coordinator.serving["metrics"]
        text = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=SECONDS_MAX)).read().decode()
        name = invite.run_id.hex()[:16]
        assert f'swarmentum_entries_total{{run="{name}"}} {STEPS}.0' in text
        assert f'swarmentum_head_step{{run="{name}"}} {STEPS}.0' in text
        for counter in ("swarmentum_refused_total", "swarmentum_resyncs_total", "swarmentum_step_seconds"):
            assert f"# HELP {counter.removesuffix('_total')}" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly_and_soon(tmp_path: Path, number: signal.Signals) -> None:
    home = tmp_path / "home"
    async with serving(home, "--reflection", module=("tests.system.patient_coordinator",)) as coordinator:
        invite = await create(home)
        peer = ScriptedPeer(0, invite)  # one of two: the stream stays open and the run waits
        living = asyncio.get_running_loop().create_task(peer.live())
        facts = CoordinatorClient(invite, None)
        await facts.connect()
        async with asyncio.timeout(SECONDS_MAX):
            while not any(p.phase == pb.PeerPhase.PEER_PHASE_READY for p in (await facts.get_run())[0].peers):
                await asyncio.sleep(0.01)
        await facts.close()
        coordinator.process.send_signal(number)
        assert await coordinator.ended() == 0, "and not when the patience with open calls is over"
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        assert not (home / "serving.json").exists()
    words = (tmp_path / "stderr").read_text()
    assert "Traceback" not in words, words[-2000:]
    assert "--reflection does nothing any more" in words


@pytest.mark.long
async def test_exit_codes(tmp_path: Path) -> None:
    home, bad = tmp_path / "home", tmp_path / "bad.toml"
    bad.write_text("name = 'x'\n[clock]  # the clock\nmin_peers = 2\nsteps = 0\n")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = 'x'\nsteps = = 2\n")
    calls: dict[str, tuple[str, ...]] = {}
    async with serving(home) as coordinator:
        port = str(coordinator.port)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            metrics = f"127.0.0.1:{taken.getsockname()[1]}"
            calls = {
                "bad value": ("run", "create", str(bad), "--home", str(home)),
                "bad toml": ("run", "create", str(broken), "--home", str(home)),
                "no file": ("run", "create", str(tmp_path / "none.toml"), "--home", str(home)),
                "home in use": ("serve", "--home", str(home), "--listen", "127.0.0.1:0"),
                "port in use": ("serve", "--home", str(tmp_path / "h2"), "--listen", f"127.0.0.1:{port}"),
                "port of metrics in use": (
                    "serve", "--home", str(tmp_path / "h3"), "--listen", "127.0.0.1:0", "--metrics-listen", metrics
                ),
                "no port": ("serve", "--home", str(tmp_path / "h4"), "--listen", "127.0.0.1:99999"),
                "no server": ("run", "list", "--home", str(tmp_path / "h5")),
                "no such flag": ("serve", "--nonsense"),
            }  # fmt: skip
            done = {name: await asyncio.to_thread(command, *call, cwd=tmp_path) for name, call in calls.items()}
        codes = {name: call.returncode for name, call in done.items()}
        assert codes == dict.fromkeys(calls, 2), {n: d.stderr[-500:] for n, d in done.items() if d.returncode != 2}
        assert f"{bad}:4: clock.steps" in done["bad value"].stderr
        assert f"{broken}:2: is not TOML" in done["bad toml"].stderr
        assert "another coordinator is using it" in done["home in use"].stderr
        assert "Traceback" not in "".join(call.stderr for call in done.values())
        coordinator.process.kill()
        await coordinator.ended()
    gone = await asyncio.to_thread(command, "run", "list", "--home", str(home), cwd=tmp_path)
    assert gone.returncode == 3, "killed: serving.json is there, nobody answers"
    assert "still running" in gone.stderr


@pytest.mark.netns
def test_an_invite_of_a_machine_with_ipv6_alone_names_its_address() -> None:
    """It named 127.0.0.1: nobody else could join."""
    network = "ip link set lo up && ip -6 addr add 2001:db8:7::1/128 dev lo && ip -6 route add default dev lo"
    asks = "from coordinator.serving.served_coordinator import own_address; print(own_address())"
    told = ["unshare", "--net", "sh", "-c", f'{network} && exec "$@"', "sh", sys.executable, "-c", asks]
    assert subprocess.run(told, check=True, capture_output=True, text=True).stdout == "2001:db8:7::1\n"


async def test_invites_name_all_addresses_of_a_coordinator_and_a_peer_takes_one_that_answers(tmp_path: Path) -> None:
    """A DNS name, IPv6 and IPv4, and one that nobody resolves: a peer has one of them, another peer another one."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as found:
        port = found.getsockname()[1]
    good = (f"localhost:{port}", f"[::1]:{port}", f"127.0.0.1:{port}")
    named = (f"coordinator.invalid:{port}", *good)
    flags = ("--listen", f"[::]:{port}", "--advertise", ",".join(named))
    async with serving(tmp_path / "home", *flags):
        invite = await create(tmp_path / "home")
        assert invite.coordinators == named
        for addresses in (named, *((address,) for address in good)):
            client = CoordinatorClient(replace(invite, coordinators=addresses), Identity.generate())
            await asyncio.wait_for(client.connect(), SECONDS_MAX)
            _facts, config = await client.get_run()
            assert config.name == "system"
            await client.close()
    for wrong in ("a:1,", "a:1 b:2", "a:1,b", ",".join(["a:1"] * 5)):
        done = await asyncio.to_thread(
            command, "serve", "--home", str(tmp_path / "other"), "--advertise", wrong, cwd=tmp_path
        )
        assert done.returncode == 2, wrong
        assert "advertise" in done.stderr
