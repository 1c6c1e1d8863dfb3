"""What waits survives a take-over: the line before a full run, and an order of operators. Real coordinators, kill -9."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.journal import Journal
from coordinator.store.wait_queues import WaitQueues
from node.link.client import CoordinatorClient
from protos.identity import Identity
from protos.invite import Invite
from protos.v1 import coordinator_pb2 as pb
from tests.system.local_swarm import Process, wait_for
from tests.system.postgres import Postgres, server_or_skip
from tests.unit.coordinator.driver import LAYOUT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
KEYS = ("identity.key", "tls.key", "tls.crt")
ADA, BOB, CAY = (Identity.from_seed(bytes([50 + n]) * 32) for n in range(3))
RUN = f"""
name = "waits"
[clock]
steps = 1000
max_peers = 1
[operators]
keys = ["{ADA.peer_id}", "{BOB.peer_id}", "{CAY.peer_id}"]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    yield from server_or_skip()


class TwoCoordinators:
    """`one` acts first; `two` has the same keys and database."""

    def __init__(self, folder: Path, server: Postgres) -> None:
        self.folder, self.url = folder, server.database()
        self.running: dict[str, Process] = {}

    def serve(self, name: str) -> None:
        words = ("--home", str(self.folder / name), "--database", self.url, "--listen", "127.0.0.1:0", "--json")
        self.running[name] = Process(self.folder / f"{name}.log", "coordinator", "serve", *words)
        self.running[name].first_json()

    def command(self, *words: str) -> dict[str, Any]:
        code, said = Process(self.folder / "command.log", "coordinator", *words, "--json").finish()
        assert code == 0, (self.folder / "command.log").read_text()
        return said

    def acts(self, name: str) -> bool:
        return "this coordinator acts" in (self.folder / f"{name}.log").read_text()

    def waiting(self) -> list[bytes]:
        """The line before the run, as the database has it."""
        journal = Journal(self.url, Identity.generate())
        try:
            return [key for body in journal.lines().values() for key in WaitQueues(0, {b"": body}).of(b"")]
        finally:
            journal.close()

    def close(self) -> None:
        for process in self.running.values():
            process.close()


@asynccontextmanager
async def client(invite: Invite, who: Identity) -> AsyncIterator[CoordinatorClient]:
    made = CoordinatorClient(invite, who)
    await made.connect()
    try:
        yield made
    finally:
        await made.close()


async def place(invite: Invite, who: Identity) -> int:
    async with client(invite, who) as made:
        return int((await made.wait_in_line()).place)


async def test_the_line_and_an_order_survive_a_take_over(tmp_path: Path, server: Postgres) -> None:
    both = TwoCoordinators(tmp_path, server)
    try:
        both.serve("one")
        (tmp_path / "two").mkdir()
        for name in KEYS:
            shutil.copy(tmp_path / "one" / name, tmp_path / "two" / name)
        both.serve("two")
        (tmp_path / "run.toml").write_text(RUN)
        home = ("--home", str(tmp_path / "one"))
        wait_for(
            "both addresses",
            lambda: len(json.loads((tmp_path / "one" / "serving.json").read_text())["coordinators"]) == 2,
        )
        made = both.command("run", "create", str(tmp_path / "run.toml"), "--no-layout", *home)
        invite = Invite.parse(made["invite"])
        assert len(invite.coordinators) == 2
        for name, who in (("ada", ADA), ("bob", BOB)):
            (tmp_path / name).write_bytes(who.to_libp2p())
        async with client(invite, ADA) as ada:
            await ada.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
            stream = ada.follow(0)
            await anext(stream)
            assert [await place(invite, who) for who in (BOB, CAY)] == [1, 2]
            given = both.command("run", "finish", made["invite"], "--reason", "enough", "--key", str(tmp_path / "ada"))
            assert (given["obeyed"], given["signed_by"]) == (False, [ADA.peer_id])
            assert await place(invite, BOB) == 1
            wait_for("the line in the database", lambda: both.waiting() == [BOB.public_key, CAY.public_key])
            both.running["one"].kill()
            wait_for("take-over", lambda: both.acts("two"))
        assert await place(invite, CAY) == 2, "Cay asks first, and Bob came first"
        assert await place(invite, BOB) == 1
        bob = ("--key", str(tmp_path / "bob"))
        assert both.command("order", "list", made["invite"], *bob) == given
        signed = both.command("order", "sign", made["invite"], given["order"][:8], "--yes", *bob)
        assert (signed["obeyed"], signed["signed_by"]) == (True, [ADA.peer_id, BOB.peer_id])
        async with client(invite, CAY) as reader:
            facts, _ = await reader.get_run()
        assert facts.phase == pb.Phase.PHASE_FINISHED
    finally:
        both.close()
