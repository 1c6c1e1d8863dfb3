"""An archive in a mirror is verified from there: over a real web server, after a break, and against a mirror that lies."""

import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from node import __main__ as command
from node.archive import files
from node.archive.verify import verify
from node.commands.copies import archive_at
from node.mirror import archive_copy
from node.mirror.archive_copy import INDEX, copy_to, fetch
from node.mirror.mirror_places import TEMPORARY
from protos.disk import DiskError
from protos.errors import NetworkError, OperatorError
from tests.system.web_folder import WebFolder
from tests.unit.archive.test_archive import Life
from tests.unit.memory_bucket import memory_bucket
from tests.unit.small_disk import fill, small_disk


def silent(done: int, of: int) -> None:
    assert 0 <= done <= of


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(archive_copy, "WAIT_SECONDS_MIN", 0.01)
    (tmp_path / "life").mkdir()
    made = Life(tmp_path / "life")
    made.steps(4)
    yield made
    made.recorder.close()


@pytest.fixture
def web(life: Life, tmp_path: Path) -> Iterator[WebFolder]:
    copy_to(life.archive, str(tmp_path / "mirror" / "run"), silent)
    made = WebFolder(tmp_path / "mirror")
    yield made
    made.close()


def told(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(command.app, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_the_commands_copy_an_archive_and_verify_it_from_an_address(life: Life, tmp_path: Path) -> None:
    said = told("mirror", life.folder, tmp_path / "mirror" / "run")
    assert said["bytes"] == sum(path.stat().st_size for path in life.archive.rglob("*") if path.is_file())
    server = WebFolder(tmp_path / "mirror")
    try:
        verdict = told("verify", f"{server.url}/run", "--into", tmp_path / "mine")
    finally:
        server.close()
    assert verdict["steps"] == 4
    assert verify(tmp_path / "mine", None, None).ok, "the copy stays"
    with pytest.raises(OperatorError, match="nothing is copied; leave --into out"):
        told("verify", life.folder, "--into", tmp_path / "mine")


def test_a_copy_that_broke_off_goes_on_where_it_was(web: WebFolder, tmp_path: Path) -> None:
    web.ends_at = 1000
    mine = tmp_path / "mine"
    with pytest.raises(NetworkError, match="log: "):
        fetch(f"{web.url}/run", mine, silent)
    web.ends_at = 1 << 60
    web.asked.clear()
    fetch(f"{web.url}/run", mine, silent)
    assert (f"/run/{files.segment_name(0)}/{files.LOG}", "bytes=1000-") in web.asked
    assert verify(mine, None, None).ok
    web.asked.clear()
    fetch(f"{web.url}/run", mine, silent)
    assert [path for path, _ in web.asked] == [f"/run/{INDEX}"]


def test_a_server_without_ranges_serves_an_archive_too(web: WebFolder, tmp_path: Path) -> None:
    web.ends_at = 1000
    with pytest.raises(NetworkError):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)
    web.ends_at, web.ranges = 1 << 60, False
    fetch(f"{web.url}/run", tmp_path / "mine", silent)
    assert verify(tmp_path / "mine", None, None).ok


def test_only_what_is_new_is_copied_again(life: Life, tmp_path: Path) -> None:
    place = tmp_path / "mirror" / "run"
    copy_to(life.archive, str(place), silent)
    state = place / files.segment_name(0) / files.STATE
    before = state.stat().st_ino, (place / files.segment_name(0) / files.LOG).stat().st_size
    life.steps(2)
    copy_to(life.archive, str(place), silent)
    after = state.stat().st_ino, (place / files.segment_name(0) / files.LOG).stat().st_size
    assert after[0] == before[0]
    assert after[1] > before[1]
    verdict = verify(place, None, None)
    assert verdict.ok
    assert verdict.steps == 6


def test_what_killed_copies_left_goes_after_a_day(life: Life, tmp_path: Path) -> None:
    """Each had left a file as large as a state, for ever."""
    target = tmp_path / "mirror"
    copy_to(life.archive, str(target), silent)
    folder = next(path for path in target.iterdir() if path.is_dir())
    (others := folder / f"{TEMPORARY}others").mkdir()  # as a file of another user, in a folder where all may write
    os.utime(others, (1, 1))
    old, young = folder / f"{TEMPORARY}old", folder / f"{TEMPORARY}young"
    for path in (old, young):
        path.write_bytes(b"half a state")
    os.utime(old, (1, 1))
    life.steps(2)
    copy_to(life.archive, str(target), silent)
    assert (old.exists(), young.exists()) == (False, True)
    assert verify(target, None, None).ok


def test_the_archive_of_another_run_is_not_overwritten(life: Life, tmp_path: Path) -> None:
    """Its genesis and first segments were replaced in silence, and the rest was left in the bucket without an index."""
    place = tmp_path / "mirror" / "run"
    copy_to(life.archive, str(place), silent)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    other = tmp_path / "other"
    shutil.copytree(life.archive, other)
    (other / files.GENESIS).write_bytes((other / files.GENESIS).read_bytes() + b"\n")
    with pytest.raises(
        OperatorError, match=r"the archive of run [0-9a-f]{16}\.\.\. is there, and .*: name another folder"
    ):
        copy_to(other, str(place), silent)
    assert before == {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_segments_that_a_full_archive_has_deleted_stay_in_the_copy(life: Life, tmp_path: Path) -> None:
    place, first = tmp_path / "mirror" / "run", life.archive / files.segment_name(0)
    later = life.archive / files.segment_name(1)
    shutil.copytree(first, later)  # the copy looks at names and hashes alone
    copy_to(life.archive, str(place), silent)
    shutil.rmtree(first)
    index = copy_to(life.archive, str(place), silent)
    names = {file.name for file in index.files}
    assert {f"{files.segment_name(step)}/{files.LOG}" for step in (0, 1)} <= names
    fetch(place.as_uri(), tmp_path / "mine", silent)
    assert (tmp_path / "mine" / files.segment_name(0) / files.LOG).is_file()
    (place / files.segment_name(0) / files.LOG).unlink()
    index = copy_to(life.archive, str(place), silent)
    assert {file.name.partition("/")[0] for file in index.files} == {"genesis", "layout.json", files.segment_name(1)}


def test_bytes_that_are_not_those_of_the_index_are_refused(web: WebFolder, tmp_path: Path) -> None:
    web.lies = {40}
    with pytest.raises(NetworkError, match="payloads: its bytes are not those that the index names"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)


def test_a_mirror_whose_index_fits_its_lie_convinces_nobody(web: WebFolder, life: Life, tmp_path: Path) -> None:
    folder = tmp_path / "mirror" / "run"
    payloads = folder / files.segment_name(0) / files.PAYLOADS
    data = bytearray(payloads.read_bytes())
    data[len(data) // 2] ^= 1
    payloads.write_bytes(data)
    index = json.loads((folder / INDEX).read_text())
    for entry in index["files"]:
        if entry["name"].endswith("payloads"):
            entry["sha256"] = files.sha256(bytes(data)).hex()
    (folder / INDEX).write_text(json.dumps(index))
    fetch(f"{web.url}/run", tmp_path / "mine", silent)
    assert not verify(tmp_path / "mine", None, None).ok


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "../../mine/.bashrc"}, "files.0.name: String should match"),
        ({"name": "/etc/passwd"}, "files.0.name: String should match"),
        ({"name": "0000000000000/log\n"}, "files.0.name: String should match"),
        ({"bytes": -1}, "files.0.bytes: Input should be greater than or equal to 0"),
        ({"sha256": "00"}, "files.0.sha256: String should match"),
        ({"bytes": 10**400}, "files.0.bytes: Input should be less than or equal to"),
        ({"name": "\u0660" * 13 + "/log"}, "files.0.name: String should match"),
        ({}, "names no whole archive: layout.json is not there"),
    ],
)
def test_an_index_that_no_archive_has_is_refused(
    web: WebFolder, tmp_path: Path, entry: dict[str, Any], said: str
) -> None:
    index = {"version": 1, "files": [{"name": "genesis", "bytes": 3, "sha256": "0" * 64} | entry]}
    (tmp_path / "mirror" / "run" / INDEX).write_text(json.dumps(index))
    with pytest.raises(OperatorError, match=said):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)
    assert list(tmp_path.rglob(".bashrc")) == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://example.org", "expected the address of a folder"),
        ("https://example.org/run", "nobody can write to a web address"),
        ("s3:///", "expected the address of a folder"),
        ("", "expected a folder, or its address"),
        ("ftp://example.org/run", "expected a folder, or its address"),
        ("file://tmp/run", "expected a folder, or its address"),
        ("s3://runs/one?version=3", "expected a folder, or its address"),
    ],
)
def test_a_place_that_takes_no_files_is_said(life: Life, address: str, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        copy_to(life.archive, address, silent)


def change_index(web: WebFolder, change: Callable[[list[dict[str, Any]]], list[Any]]) -> None:
    path = web.folder / "run" / INDEX
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "files": change(index["files"])}))


@pytest.mark.parametrize(
    "kept", [(), ("genesis",), ("genesis", "layout.json"), ("genesis", "layout.json", "manifest", "state.safetensors")]
)
def test_a_mirror_that_lost_its_files_is_not_covered_by_an_older_copy(
    web: WebFolder, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    fetch(f"{web.url}/run", tmp_path / "mine", silent)
    change_index(web, lambda entries: [it for it in entries if it["name"].rpartition("/")[2] in kept])
    with pytest.raises(OperatorError, match="names no whole archive"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)


def test_files_of_another_archive_in_the_folder_are_refused(web: WebFolder, tmp_path: Path) -> None:
    other = tmp_path / "mine" / files.segment_name(7)
    other.mkdir(parents=True)
    (other / files.LOG).touch()
    with pytest.raises(OperatorError, match="is not in the archive at that address"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)


@pytest.mark.parametrize("name", ["genesis", "genesis.part", files.segment_name(0)])
def test_links_in_the_folder_are_not_followed(web: WebFolder, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OperatorError, match="is no plain file or folder"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["genesis", "genesis.part"])
def test_a_pipe_in_the_folder_is_refused(web: WebFolder, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    os.mkfifo(tmp_path / "mine" / name)
    with pytest.raises(OperatorError, match="is no plain file or folder"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)


def test_a_file_in_place_of_the_folder_is_said(web: WebFolder, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(OperatorError, match=r"mine: .*exists; name another folder"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)


def test_who_reads_while_an_archive_grows_gets_what_the_index_names(life: Life, web: WebFolder, tmp_path: Path) -> None:
    before = (web.folder / "run" / INDEX).read_bytes()
    life.steps(2)
    copy_to(life.archive, str(web.folder / "run"), silent)
    (web.folder / "run" / INDEX).write_bytes(before)  # as while the second copy is under way
    fetch(f"{web.url}/run", tmp_path / "mine", silent)
    verdict = verify(tmp_path / "mine", None, None)
    assert verdict.ok
    assert verdict.steps == 4


def test_a_huge_index_of_nonsense_costs_little(web: WebFolder, tmp_path: Path) -> None:
    data = '{"version":1,"files":[' + ",".join(["1"] * 3_000_000) + "]}"
    (web.folder / "run" / INDEX).write_text(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OperatorError, match="is no index of an archive"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"


def test_what_is_missing_has_to_fit(web: WebFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {it["name"]: it["bytes"] for it in json.loads((web.folder / "run" / INDEX).read_text())["files"]}
    state = f"{files.segment_name(0)}/{files.STATE}"
    monkeypatch.setattr(archive_copy, "SPARE_BYTES", 0)
    (tmp_path / "mine" / files.segment_name(0)).mkdir(parents=True)
    (tmp_path / "mine" / state).touch()  # of another size: it comes whole
    free = sum(sizes.values()) - 1
    monkeypatch.setattr(archive_copy.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(OperatorError, match=r"GB more, and .* GB are free"):
        fetch(f"{web.url}/run", tmp_path / "mine", silent)
    part = tmp_path / "mine" / f"{state}.part"
    part.write_bytes((web.folder / "run" / state).read_bytes()[:5])
    fetch(f"{web.url}/run", tmp_path / "mine", silent)  # what broke off counts


@pytest.mark.parametrize("below", [".", "5", "..", "../"])
def test_a_copy_into_the_archive_itself_is_refused(life: Life, below: str) -> None:
    with pytest.raises(OperatorError, match="name a folder outside of it"):
        copy_to(life.archive, str(life.archive / below), silent)


def test_a_model_of_somebody_else_beside_the_copy_is_not_compared(
    web: WebFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp" / "model").mkdir(parents=True)
    (tmp_path / "tmp" / "model" / "model.safetensors").write_bytes(b"nonsense")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with archive_at(f"{web.url}/run", None) as folder:
        assert verify(folder, None, None).ok
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["model"]


@pytest.mark.parametrize("damage", ["no log", "no text", "deep"])
def test_a_damaged_archive_is_an_answer_and_no_traceback(life: Life, damage: str) -> None:
    if damage == "no log":
        (life.archive / files.segment_name(0) / files.LOG).unlink()
    else:
        (life.archive / files.LAYOUT).write_bytes(b"\xff" if damage == "no text" else b"[" * 200_000)
    verdict = verify(life.folder, None, None)
    assert not verdict.ok
    assert verdict.reason.startswith("the archive: ")


def test_a_bucket_keeps_an_archive(life: Life, tmp_path: Path) -> None:
    bucket = memory_bucket()
    copy_to(life.archive, f"{bucket}/run", silent)
    life.steps(2)
    copy_to(life.archive, f"{bucket}/run", silent)
    fetch(f"{bucket}/run", tmp_path / "mine", silent)
    verdict = verify(tmp_path / "mine", None, None)
    assert verdict.ok
    assert verdict.steps == 6


@pytest.mark.parametrize("asked", ["size", "cat_file", "open"])
def test_what_a_bucket_s_library_raises_is_said(life: Life, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    bucket = memory_bucket()
    copy_to(life.archive, f"{bucket}/run", silent)
    life.steps(1)

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError("AccessDenied")

    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), asked, denied)
    with pytest.raises(NetworkError, match="AccessDenied"):
        copy_to(life.archive, f"{bucket}/run", silent)


def test_a_full_disk_is_said_at_once_and_the_copy_goes_on(life: Life, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        filling = fill(disk)
        with pytest.raises(DiskError, match=r"no room is left\. Make room, and start again"):
            copy_to(life.archive, str(disk / "run"), silent)
        filling.unlink()
        copy_to(life.archive, str(disk / "run"), silent)
        assert verify(disk / "run", None, None).ok


def test_a_place_that_lets_nobody_write_is_said_at_once(life: Life, tmp_path: Path) -> None:
    """It was tried four times, and called unreachable."""
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory; name another place"):
        copy_to(life.archive, str(tmp_path / "file" / "run"), silent)
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(DiskError, match="Read-only file system; name another place"):
            copy_to(life.archive, str(disk / "run"), silent)


def test_a_disk_that_fills_up_during_a_download_is_said(
    web: WebFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_copy, "SPARE_BYTES", 0)
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        real = archive_copy.shutil.disk_usage(disk)
        filling = fill(disk)
        monkeypatch.setattr(archive_copy.shutil, "disk_usage", lambda _: real)  # another program was quicker
        (disk / "mine").mkdir()
        with pytest.raises(OperatorError, match=r"no room is left|No space left"):
            fetch(f"{web.url}/run", disk / "mine", silent)
        filling.unlink()
        fetch(f"{web.url}/run", disk / "mine", silent)
        assert verify(disk / "mine", None, None).ok
