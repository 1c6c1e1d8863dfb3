"""The sockets between a peer and its p2pd: where they are, who may write to them, and what happens if somebody deletes them."""

import asyncio
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from node.overlay import daemon
from node.overlay.settings import socket_folder
from protos.errors import OperatorError
from tests.unit.node.test_overlay import hosts, until


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Those that sockets have got; each is removed."""
    made: list[Path] = []
    monkeypatch.setattr(daemon, "socket_folder", lambda home: made.append(socket_folder(home)) or made[-1])
    return made


# hivemind leaves a connection open if p2pd ends within a call
@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")
async def test_deleted_sockets_come_back_and_peers_reach_each_other(tmp_path: Path, folders: list[Path]) -> None:
    """As a cleaner of /tmp does it: otherwise each call to p2pd fails for ever, and the run stands still."""
    with capture_logs() as logs:
        async with hosts(tmp_path, 2) as (ada, bob):
            (first, _) = folders
            assert len(list(first.iterdir())) == 2
            await asyncio.sleep(0)
            assert bob._daemon._seen, "from the start on: a cleaner may come at once"
            assert ada._daemon._seen
            shutil.rmtree(first)
            await until("the next start", lambda: ada.restarts == 1 and len(folders) == 3)

            async def dial(_: int) -> None:
                connected.append(await bob.connect(await ada.addresses() or ["/p2p/x"]))

            connected = [False]
            await until("a connection", lambda: connected[-1], work=dial)
    assert [line["event"] for line in logs if "sockets" in line["event"]] == [
        "the sockets of the libp2p daemon were deleted; ending it"
    ]
    assert not [folder for folder in folders if folder.exists()]


async def test_nobody_else_may_write_to_them_whatever_the_umask_is(tmp_path: Path, folders: list[Path]) -> None:
    before = os.umask(0)
    try:
        async with hosts(tmp_path, 1):
            assert folders[0].stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["missing", "x" * 80, "a b"])
def test_a_folder_that_takes_none_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    unfit = tmp_path / name
    if name != "missing":
        unfit.mkdir()
    monkeypatch.setenv("TMPDIR", str(unfit))
    made = socket_folder(tmp_path)
    try:
        assert not made.is_relative_to(unfit)
        assert name == "missing" or not list(unfit.iterdir())
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(made / "p2pd-0123456789a.sock"))
    finally:
        shutil.rmtree(made)


def test_where_none_does_the_error_names_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(OperatorError, match=r"name one by TMPDIR \(.*/var/tmp: Read-only file system; .*\)") as error:
        socket_folder(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_on_a_disk_that_has_become_read_only_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd was started there again and again, for ever."""
    anything: Any = None
    started = daemon.Daemon("id", tmp_path / "identity.key", anything, anything, anything)
    first = started._sockets()
    assert started._sockets() == first
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        second = started._sockets()
    assert second != first
    assert started._sockets() == second
    for folder in (first, second):
        shutil.rmtree(folder)
