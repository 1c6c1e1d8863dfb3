"""A run whose text is token shards on a web server: peers need no data of their own. Real processes, a real server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.data.build import Source, build
from node.data.tokenizer import ByteTokenizer
from tests.system.local_swarm import LocalSwarm, digests_by_step, toml_of_run, wait_for
from tests.system.web_folder import files_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RUN = toml_of_run(
    "shards",
    data={"source": "SOURCE", "sha256": "HASH", "mirrors": ["http://127.0.0.1:1/nobody"]},
    clock={"batch_samples": 8, "min_peers": 2, "snapshot_every": 20},
)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server that has a folder; its address, and the folder."""
    folder = tmp_path / "web"
    with files_of(folder) as url:
        yield f"{url}set", folder


@pytest.mark.long
def test_peers_train_on_shards_that_they_download_and_are_equal(tmp_path: Path, web: tuple[str, Path]) -> None:
    url, folder = web
    built = build(Source(json.__path__[0]), ByteTokenizer(), "bytes", folder / "set", shard_tokens=2048)
    assert built.shards > 10
    copy = shutil.copytree(folder / "set", tmp_path / "copy")
    for shard in (folder / "set").glob("*.bin"):
        shard.write_bytes(bytes(shard.stat().st_size))  # a mirror that lies
    with LocalSwarm(tmp_path, RUN.replace("SOURCE", url).replace("HASH", built.sha256)) as swarm:
        # 10 kB: a few shards, so that shards leave the disk
        swarm.join("ada", "--yes", environment={"SWARMENTUM_DISK_GB": "0.00001"})
        swarm.join("ben", "--data", str(copy))
        again = "training text: the download is tried again"
        wait_for("a lie that was found", lambda: len(swarm.events("ada", again)) >= 2)
        for shard in copy.glob("*.bin"):
            shutil.copy(shard, folder / "set" / shard.name)
        wait_for("votes of the peer that downloads", lambda: sum(it["accepted"] for it in swarm.steps("ada")) > 20)
        end = swarm.operate("run", "finish", "shards")["step"]
        for name in ("ada", "ben"):
            code, summary = swarm.processes[name].finish()
            assert (code, summary["step"]) == (0, end)
        assert all(len(found) == 1 for found in digests_by_step(swarm.steps("ada"), swarm.steps("ben")).values())
        cached = list((tmp_path / "ada" / "cache").glob("shards-*/*.bin"))
        assert 0 < len(cached) <= 5


@pytest.mark.nightly
def test_a_stranger_s_run_downloads_nothing_that_nobody_agreed_to(tmp_path: Path, web: tuple[str, Path]) -> None:
    url, folder = web
    built = build(Source(json.__path__[0]), ByteTokenizer(), "bytes", folder / "set", shard_tokens=2048)
    swarm = LocalSwarm(tmp_path, RUN.replace("SOURCE", url).replace("HASH", built.sha256))
    stranger = {"SWARMENTUM_ALLOW": "code"}
    try:
        for name, flags, code, why in (
            ("ada", (), 2, f"download training text from '{url}', 'http://127.0.0.1:1/nobody', and keep up to 10 GB"),
            ("ben", ("--yes",), 2, "127.0.0.1, an address of this machine or of a private network"),
            ("cay", ("--data", str(folder)), 2, "is none: name a copy of the set"),
        ):
            peer = swarm.join(name, *flags, environment=stranger)
            assert peer.finish()[0] == code, peer.log.read_text()[-2000:]
            assert why in peer.log.read_text()
    finally:
        swarm.close()
