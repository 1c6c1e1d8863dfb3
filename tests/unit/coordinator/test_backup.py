"""Backups: made while steps go on; a restored coordinator opens no step until its log is whole. Real gRPC, real journals."""

import asyncio
import json
import os
import shlex
import shutil
import sqlite3
import stat
import subprocess
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.config import CoordinatorSettings
from coordinator.serving.served_coordinator import serve
from coordinator.store import backup, checkpoint
from protos.console import lock_home
from protos.errors import OperatorError
from protos.v1 import log_pb2
from tests.unit.coordinator.serving import COORDINATOR, eventually, peers, served
from tests.unit.coordinator.test_service import WAITS, begin, one_step


def run(*arguments: str) -> str:
    done = CliRunner().invoke(command.app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


async def test_a_restored_coordinator_waits_for_the_entries_that_it_lacks(tmp_path: Path) -> None:
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "backup.tar"
    old.mkdir()
    async with served(old, WAITS) as here, peers(here, 2) as swarm:
        (old / "identity.key").write_bytes(COORDINATOR.to_libp2p())
        await begin(here, swarm)
        await one_step(swarm)
        about = backup.make(old, file)  # while the coordinator serves
        assert about.runs == {here.invite.run_id.hex(): 1}
        for _ in range(2):
            await one_step(swarm)
        entries = here.journal.entries(here.invite.run_id, 1, 9)
    assert len(entries) == 3
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    told = json.loads(run("restore", str(file), "--home", str(new), "--json"))
    assert told["runs"] == about.runs
    async with served(new, WAITS) as here, peers(here, 2) as swarm:
        for peer in swarm:  # two that have no newer entry
            await peer.join(from_step=1)
            await peer.ready(1)
        await eventually(lambda: "restored from a backup" in here.runtime.run.reason)
        opened = here.runtime.run.step  # step 2 was open when the backup was made
        tick = log_pb2.Tick(step=opened.tick.step, parent_hash=opened.tick.parent_hash)
        for peer in swarm:  # all that an entry needs: without the mark, a second entry 2 would be signed now
            assert await peer.contribute(tick, swarm) == []
        assert here.runtime.run.head_step == 1
        assert await swarm[0].client.offer(entries[1:], entries[2]) == 3
        assert here.runtime.run.step is None, "the operator has not said that this is all"

    assert json.loads(run("restore", "--go-on", "--home", str(new), "--json"))["held"] is False
    async with served(new, WAITS) as here, peers(here, 2) as swarm:
        assert here.journal.entries(here.invite.run_id, 1, 9) == entries
        for peer in swarm:
            await peer.join(from_step=3)
            await peer.ready(3)
        await one_step(swarm)
        assert here.runtime.run.head_step == 4
    with pytest.raises(OperatorError, match="is not held"):
        run("restore", "--go-on", "--home", str(new))


async def test_nothing_is_overwritten_and_foreign_files_are_refused(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "backup.tar"
    with pytest.raises(OperatorError, match="is no home of a coordinator"):
        backup.make(home, file)
    home.mkdir()
    async with served(home, WAITS):
        (home / "identity.key").write_bytes(COORDINATOR.to_libp2p())
        backup.make(home, file)
    before = file.read_bytes()
    with pytest.raises(OperatorError, match="is there already"):
        backup.make(home, file)
    with pytest.raises(OperatorError, match="holds a coordinator already"):
        backup.restore(file, home)
    assert file.read_bytes() == before

    (tmp_path / "text").write_text("no backup")
    with pytest.raises(OperatorError, match="cannot be written"):
        backup.make(home, tmp_path / "text" / "backup.tar")
    with pytest.raises(OperatorError, match=r"cannot be read as a backup, so it is none, or not whole: [^\n]+\Z"):
        backup.restore(tmp_path / "text", tmp_path / "other")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(OperatorError, match="did not write it"):
        backup.restore(tmp_path / "empty.tar", tmp_path / "other")
    (tmp_path / "half.tar").write_bytes(before[: len(before) // 2])
    with pytest.raises(OperatorError):
        backup.restore(tmp_path / "half.tar", tmp_path / "third")
    assert not (tmp_path / "third" / backup.JOURNAL).exists()
    assert list(tmp_path.glob("**/.*")) == [], "a temporary file was left"
    spaced = tmp_path / "Anna's home"
    commands = [line for line in run("restore", str(file), "--home", str(spaced)).splitlines() if "--home" in line]
    assert [shlex.split(line)[-1] for line in commands] == [str(spaced)] * 2, "a shell takes the printed commands"


def test_a_backup_is_not_restored_beside_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "restored", and `serve` read the database."""
    monkeypatch.setenv("SWARMENTUM_COORDINATOR_DATABASE", "postgresql://db.example/swarm")
    with pytest.raises(OperatorError, match="`serve` would not read the restored journal"):
        run("restore", str(tmp_path / "backup.tar"), "--home", str(tmp_path / "new"))


async def a_home(folder: Path) -> Path:
    """A coordinator's home, which nobody uses."""
    folder.mkdir()
    async with served(folder, WAITS):
        (folder / "identity.key").write_bytes(COORDINATOR.to_libp2p())
    return folder


@pytest.mark.parametrize("name", [*backup.KEYS, backup.JOURNAL])
async def test_a_flipped_bit_of_any_file_is_found_and_a_half_restored_home_is_restored_again(
    name: str, tmp_path: Path
) -> None:
    file, home = tmp_path / "backup.tar", tmp_path / "new"
    backup.make(await a_home(tmp_path / "old"), file)
    good = file.read_bytes()
    with tarfile.open(file) as archive:
        at = archive.getmember(name).offset_data + archive.getmember(name).size // 2
    file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(OperatorError, match=f"{name} in this backup is damaged"):
        backup.restore(file, home)
    with pytest.raises(OperatorError, match="is half restored"):
        await serve(CoordinatorSettings(home=home, listen="127.0.0.1:0", web_listen="none"), lambda serving: None)
    with pytest.raises(OperatorError, match="is half restored"):
        run("restore", "--go-on", "--home", str(home))
    file.write_bytes(good)
    backup.restore(file, home)
    assert (home / "identity.key").read_bytes() == COORDINATOR.to_libp2p()
    assert backup.is_held(home)
    with pytest.raises(OperatorError, match="holds a coordinator already"):
        backup.restore(file, home)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            "UPDATE records SET body = CAST(body || x'00' AS BLOB) WHERE step = 1 AND kind = 'entry'",
            "entry 1 .* not hold",
        ),
        ("DELETE FROM records WHERE step = 1 AND kind = 'entry'", "entry 1 .* does not hold .*step 2, expected 1"),
    ],
)
async def test_a_log_that_is_damaged_before_its_last_checkpoint_is_told(
    harm: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator serves as if it were whole: it reads only what follows the checkpoint."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_EVERY", 2)
    home = tmp_path / "home"
    home.mkdir()
    async with served(home, WAITS) as here, peers(here, 2) as swarm:
        (home / "identity.key").write_bytes(COORDINATOR.to_libp2p())
        await begin(here, swarm)
        for _ in range(3):
            await one_step(swarm)
        assert here.journal.checkpoints(here.invite.run_id)[0]
    backup.make(home, tmp_path / "whole.tar")
    with closing(sqlite3.connect(home / backup.JOURNAL)) as journal, journal:
        assert journal.execute(harm).rowcount == 1
    with pytest.raises(backup.DamagedJournalError, match=f"(?s)tar is written, and .* damaged: {says}"):
        backup.make(home, tmp_path / "damaged.tar")
    backup.restore(tmp_path / "damaged.tar", tmp_path / "again")
    with closing(sqlite3.connect(home / backup.JOURNAL)) as journal, journal:
        journal.execute("DELETE FROM checkpoints")
    with pytest.raises(backup.DamagedJournalError, match=r"damaged: run .* cannot be read"):
        backup.make(home, tmp_path / "unread.tar")


async def test_a_backup_ends_while_the_coordinator_writes_all_the_time(tmp_path: Path) -> None:
    home, file = await a_home(tmp_path / "home"), tmp_path / "backup.tar"
    with closing(sqlite3.connect(home / backup.JOURNAL)) as journal, journal:
        journal.execute("CREATE TABLE ballast (data BLOB)")
        journal.execute("INSERT INTO ballast VALUES (zeroblob(50000000))")
    stop, written = threading.Event(), list[int]()

    def write() -> None:
        with closing(sqlite3.connect(home / backup.JOURNAL)) as journal:
            while not stop.is_set():
                with journal:
                    journal.execute("INSERT INTO ballast VALUES (zeroblob(10))")
                written.append(1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        before = len(written)
        await asyncio.wait_for(asyncio.to_thread(backup.make, home, file), 240)
        assert len(written) > before, "the backup held the writer up"
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("end", backup.BESIDE)
@pytest.mark.parametrize("half", [False, True])
async def test_nothing_is_restored_beside_what_sqlite_would_replay_or_under_a_coordinator_that_starts(
    end: str, half: bool, tmp_path: Path
) -> None:
    """A -wal of another coordinator came to be the restored journal: after its SHA-256, and without a word."""
    file, home = tmp_path / "backup.tar", tmp_path / "new"
    backup.make(await a_home(tmp_path / "old"), file)
    home.mkdir()
    if half:
        (home / backup.HELD).touch()
    left = home / (backup.JOURNAL + end)
    left.touch()
    with pytest.raises(OperatorError, match=f"holds a coordinator already .{left.name}"):
        backup.restore(file, home)
    left.unlink()
    with lock_home(home, "coordinator"), pytest.raises(OperatorError, match="another coordinator is using it"):
        backup.restore(file, home)
    backup.restore(file, home)


def failure(work: Callable[[], object]) -> OperatorError | None:
    try:
        work()
    except OperatorError as error:
        return error
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("kilobytes", range(20, 200, 20))
async def test_a_full_disk_is_an_error_that_loses_nothing(kilobytes: int, tmp_path: Path) -> None:
    home, disk = await a_home(tmp_path / "home"), tmp_path / "disk"
    backup.make(home, tmp_path / "backup.tar")
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk here: {mounted.stderr.decode()}")
    try:
        for name, work in (
            ("backup", lambda: backup.make(home, disk / "backup.tar")),
            ("restore", lambda: backup.restore(tmp_path / "backup.tar", disk / "new")),
        ):
            error = failure(work)
            assert error is not None or kilobytes > 20
            if error is not None:
                assert "No space left" in str(error) or "full" in str(error), error
                left = [path.name for path in disk.rglob("*") if path.name.startswith(".") or "journal" in path.name]
                assert left == [], f"{name} left something behind"
            shutil.rmtree(disk / "new", ignore_errors=True)
            (disk / "backup.tar").unlink(missing_ok=True)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_backup_of_a_later_format_is_refused() -> None:
    newer = {"format": backup.FORMAT + 1, "version": "9.9", "another": "value"}
    with pytest.raises(OperatorError, match=r"run swarmentum 9\.9"):
        backup._about(json.dumps(newer).encode())
