"""Wall clocks that are wrong, and that jump, as computers' clocks are: nothing that decides may go by them.

Debian's libfaketime gives each process a clock of its own. The Go daemon keeps the right one, as the machine's others would.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import LocalSwarm, wait_for
from tests.system.test_faults import accepted, all_equal, run_toml

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
pytestmark = [
    pytest.mark.system,
    pytest.mark.nightly,  # the library makes every look at a clock slow: steps take seconds
    pytest.mark.timeout(900),
    pytest.mark.skipif(LIBRARY is None, reason="needs Debian's package faketime (apt-get install faketime)"),
]
OFFSETS = {"coordinator": "+30s", "ada": "-30s", "bob": "+0s", "cyd": "+30s"}


class WrongClocks(LocalSwarm):
    """Each process reads its clock's error from a file, so that it can jump."""

    def inside(self, name: str) -> tuple[str, ...]:
        if name not in OFFSETS:
            return ()
        file = self.folder / f"{name}.clock"
        if not file.exists():
            file.write_text(OFFSETS[name])
        given = {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(file)}
        given |= {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        return ("env", *(f"{key}={value}" for key, value in given.items()))

    def jump(self, name: str, error: str) -> None:
        (self.folder / f"{name}.clock").write_text(error)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[WrongClocks]:
    with WrongClocks(tmp_path, run_toml(tmp_path)) as made:
        yield made


def test_clocks_that_are_off_and_jump_cost_no_step_and_no_vote(swarm: WrongClocks) -> None:
    names = ("ada", "bob", "cyd")
    for name in names:
        swarm.join(name)
    for name in names:
        wait_for(f"vote of {name} that counts", lambda name=name: accepted(swarm, name) > 0)
    ada, bob = swarm.events("ada", "model")[0], swarm.events("bob", "model")[0]
    assert ada["timestamp"] < bob["timestamp"][:19], "ada's clock is right: the test tests nothing"
    for name, error in (
        ("coordinator", "-1h"),
        ("ada", "+1h"),
        ("cyd", "-1d"),
        ("coordinator", "+1d"),
        ("ada", "-30s"),
    ):
        swarm.jump(name, error)
        at, before = swarm.last_step("bob"), {each: accepted(swarm, each) for each in names}
        for each in names:
            swarm.wait_step(each, at + 4)
            wait_for(
                f"vote of {each} that counts", lambda each=each, votes=before[each] + 2: accepted(swarm, each) >= votes
            )
    swarm.processes[
        "cyd"
    ].kill()  # it comes back with a clock that is a day behind the coordinator's, which is a day ahead
    counted = accepted(swarm, "cyd")
    swarm.join("cyd")
    wait_for("vote of cyd that counts", lambda: accepted(swarm, "cyd") > counted)
    steps = [line["step"] for line in swarm.steps("bob")]
    first = steps[0]  # a slow start loads a snapshot
    assert steps == list(range(first, first + len(steps))), "bob lost a step or applied one twice"
    all_equal(swarm, *names)
