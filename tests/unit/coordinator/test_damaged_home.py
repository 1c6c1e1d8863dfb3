"""A coordinator's home in which something is damaged or gone: named, with what to do; one bad run keeps no other down."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from coordinator.clock.events import Reported
from coordinator.config import CoordinatorSettings
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.serving.served_coordinator import serve
from coordinator.store import home_files
from coordinator.store.checkpoint import FoldedRuns
from coordinator.store.home_files import KnownRuns
from coordinator.store.journal import Journal
from protos.errors import OperatorError
from protos.log import run_id_of
from protos.run_config import RunConfig
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import Harness, config, digest_of, key, snapshot_at
from tests.unit.coordinator.serving import COORDINATOR


@pytest.mark.parametrize("name", ["tls.key", "tls.crt"])
@pytest.mark.parametrize("content", [b"", b"junk", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_certificate_that_is_none_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    home_files.load_or_create(tmp_path)
    (tmp_path / name).chmod(0o600)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OperatorError, match=rf"{name} holds no .* Restore tls.key and tls.crt .* delete both"):
        home_files.load_or_create(tmp_path)


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    home_files.load_or_create(tmp_path / "a")
    home_files.load_or_create(tmp_path / "b")
    (tmp_path / "b" / "tls.key").replace(tmp_path / "a" / "tls.key")
    with pytest.raises(OperatorError, match="is not the key of"):
        home_files.load_or_create(tmp_path / "a")


def made(journal: Journal, name: str) -> bytes:
    """A run with a few records."""
    harness = Harness(config())
    harness.comes(0)
    harness.feed(Reported(key(0), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    genesis = log_pb2.Genesis(
        config_json=harness.settings.model_copy(update={"name": name}).canonical_json(),
        coordinator_public_key=COORDINATOR.public_key,
    )
    run_id = run_id_of(genesis)
    journal.create_run(run_id, genesis)
    for record in harness.journal:
        journal.append(run_id, record)
    assert harness.journal
    return run_id


def test_a_genesis_that_cannot_be_read_keeps_no_other_run_down(tmp_path: Path) -> None:
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    good, bad = made(journal, "good"), made(journal, "bad")
    with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
        database.execute("UPDATE runs SET genesis = x'ffff' WHERE run_id = ?", (bad,))
    database.close()
    replay = FoldedRuns(journal)
    replay.catch_up()
    assert [folded.run.run_id for folded in replay.runs()] == [good]
    assert "configuration" in replay.left_out[bad]
    journal.close()


@pytest.mark.parametrize("damage", ["UPDATE records SET body = x'00ff'", "UPDATE records SET kind = 'newer'"])
def test_a_run_that_cannot_be_read_keeps_no_other_down(tmp_path: Path, damage: str) -> None:
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    good, bad = made(journal, "good"), made(journal, "bad")
    with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
        database.execute(f"{damage} WHERE run_id = ? AND number = 0", (bad,))
    database.close()
    replay = FoldedRuns(journal)
    for _ in range(2):
        replay.catch_up()
        assert [folded.run.run_id for folded in replay.runs()] == [good]
    assert replay.left_out[bad].startswith("at record 0: ")

    async def served() -> Hub:
        hub = Hub(journal, COORDINATOR, Metrics())
        hub.restore()
        await hub.stop()
        return hub

    hub = asyncio.run(served())
    assert set(hub.runs) == {good}
    assert set(hub.left_out) == {bad}
    hub.close()


def test_a_run_of_a_newer_version_keeps_no_other_down(tmp_path: Path) -> None:
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    good = made(journal, "good")
    text = RunConfig().canonical_json().replace('"seed"', '"seeds"')
    journal.create_run(b"n" * 32, log_pb2.Genesis(config_json=text))
    replay = FoldedRuns(journal)
    replay.catch_up()
    assert [folded.run.run_id for folded in replay.runs()] == [good]
    assert "seeds" in replay.left_out[b"n" * 32]
    journal.close()


async def start(home: Path) -> None:
    def ready(_serving: Any) -> None:
        raise InterruptedError("it serves")

    await serve(CoordinatorSettings(home=home, listen="127.0.0.1:0", web_listen="none"), ready)


async def test_a_journal_that_lacks_runs_of_this_home_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        await start(tmp_path)
    KnownRuns(tmp_path).add(b"r" * 32, "the run")
    for file in tmp_path.glob("journal.sqlite3*"):
        file.unlink()
    lacks = r"journal.sqlite3 does not have 1 of the runs .*the run \(7272.*Restore it.*delete .*runs.json"
    with pytest.raises(OperatorError, match=lacks):
        await start(tmp_path)
    (tmp_path / "runs.json").unlink()
    with pytest.raises(InterruptedError):
        await start(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[", b"[" * 100_000, b"[]", b'{"a": 1}', b"\xff"])
def test_a_damaged_list_of_runs_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "runs.json").write_bytes(content)
    with pytest.raises(OperatorError, match="delete it, it is written again"):
        KnownRuns(tmp_path)
