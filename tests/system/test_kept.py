"""Homes that released versions wrote: the coordinator opens the journal, the peer goes on, and `verify` holds."""

import tarfile
from pathlib import Path

import pytest

from protos.invite import Invite
from tests.kept.make import KEPT, STEPS
from tests.system.local_swarm import LocalSwarm, digests_by_step, processes_with

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
FILES = sorted(KEPT.glob("*.tar.gz"))


class Again(LocalSwarm):
    """The swarm of a file: the coordinator's home is there already, and so is the run."""

    def _start(self, run_toml: str) -> None:
        self.serve(port=0)
        self.created = self.operate("run", "invite", "kept")
        self.link = self.created["invite"]
        self.invite = Invite.parse(self.link)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".tar.gz"))
def test_a_run_goes_on_where_an_older_version_left_it(file: Path, tmp_path: Path) -> None:
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    swarm = Again(tmp_path, "")
    try:
        before = swarm.steps("ada")
        assert len(before) >= STEPS
        peer = swarm.join("ada", "--set", "archive=true")
        swarm.wait_step("ada", STEPS + 8)
        assert swarm.events("ada", "momentum taken up again"), "the saved momentum was not read"
        assert not swarm.events("ada", "starting with fresh momentum: the saved one cannot be used")
        peer.interrupt()
        assert peer.finish()[0] == 130
        digests = digests_by_step(swarm.steps("ada"))  # those after the last snapshot were computed by both versions
        assert list(digests) == list(range(1, len(digests) + 1)), "a step is lost"
        assert all(len(found) == 1 for found in digests.values()), "the two versions computed different states"
        folder = next((tmp_path / "ada" / "runs").iterdir()) / "archive"
        verify = swarm.start("verify", "node", "verify", str(folder), "--json")
        code, told = verify.finish()
        assert code == 0, verify.log.read_text()[-2000:]
        assert (told["ok"], told["last_step"]) == (True, len(digests)), told
    finally:
        swarm.close()
    assert processes_with(str(tmp_path)) == []


def test_the_present_version_is_among_them() -> None:
    """A release keeps what it writes: `python -m tests.kept.make`."""
    from protos.version import software_version

    assert KEPT / f"{software_version()}.tar.gz" in FILES
