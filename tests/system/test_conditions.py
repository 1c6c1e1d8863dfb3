"""The owner's conditions in a real swarm: `swarmentum set` pauses a peer, lets it go on, and survives a restart."""

import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.system.local_swarm import PLAIN_MODEL, TINY_MODEL, LocalSwarm, digests_by_step, owner, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture
def swarm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalSwarm]:
    model, samples = getattr(request, "param", (PLAIN_MODEL, 6))
    clock = {"batch_samples": samples, "min_peers": 1, "snapshot_every": 50}
    with LocalSwarm(tmp_path, toml_of_run("lent", model, source="DATA", clock=clock)) as swarm:
        yield swarm


@pytest.mark.long
def whys(swarm: LocalSwarm, name: str, event: str) -> list[str]:
    """The reasons of a peer's log lines with this event."""
    return [line["why"] for line in swarm.events(name, event)]


@pytest.mark.nightly
def test_hours_pause_a_peer_and_a_restart_keeps_what_set_changed(swarm: LocalSwarm) -> None:
    swarm.join("ada")
    swarm.join("eve", "--nice", "1")
    swarm.wait_step("eve", 5)
    day = f"{datetime.now().astimezone() + timedelta(days=3):%a}".lower()
    told = owner(swarm, "eve", "set", "hours", day)
    assert [(row["key"], row["value"], row["kept"]) for row in told["settings"]] == [("hours", day, True)]
    why = f"outside the hours {day}; goes on at {day} 00:00"
    paused = f"paused: {why}"
    wait_for("pause of eve", lambda: paused in whys(swarm, "eve", "paused"))
    paused_at = swarm.last_step("eve") + 2  # the step that was open may still have its votes
    swarm.wait_step("ada", paused_at + 10)
    swarm.wait_step("eve", paused_at + 10)
    assert not [s for s in swarm.steps("eve") if paused_at < s["step"] <= paused_at + 10 and s["accepted"]]
    told = owner(swarm, "eve", "me")
    assert (told["paused"], told["paused_by_owner"], told["held"]) == (True, False, why)
    assert owner(swarm, "eve", "resume")["held"] == why, "the owner's word does not end a condition's pause"

    owner(swarm, "eve", "leave")
    assert swarm.processes["eve"].finish()[0] == 0
    swarm.join("eve", "--hours", "mon-sun")
    kept = f"hours is {day}, as `swarmentum set` kept it in {swarm.folder / 'eve' / 'set.toml'}"
    wait_for("what the file says", lambda: kept in whys(swarm, "eve", "a setting is not as written"))
    wait_for("pause of eve again", lambda: whys(swarm, "eve", "paused").count(paused) == 2)

    owner(swarm, "eve", "set", "nice", "twenty", code=2)
    assert (
        "nice = 'twenty': expected is a whole number from 0 to 19, or off" in swarm.processes["set-eve"].log.read_text()
    )
    owner(swarm, "eve", "set", "hours", "default")
    at = swarm.last_step("eve")
    wait_for("votes of eve", lambda: [s for s in swarm.steps("eve") if s["step"] > at and s["accepted"]])
    told = owner(swarm, "eve", "set")
    assert {row["key"]: row["shown"] for row in told["settings"]}["hours"] == "mon-sun"
    assert not [row for row in told["settings"] if row["kept"]]
    digests = digests_by_step(swarm.steps("ada"), swarm.steps("eve"))
    assert all(len(found) == 1 for found in digests.values())


@pytest.mark.nightly
def test_a_month_that_is_used_up_pauses_the_peer_and_is_counted_across_a_restart(swarm: LocalSwarm) -> None:
    swarm.join("ada")
    swarm.join("eve")
    swarm.wait_step("eve", 10)
    swarm.wait_step("ada", 1)  # from now on eve serves nothing, not even the state
    owner(swarm, "eve", "set", "upload_gb", "0.00001")
    wait_for("the pause", lambda: owner(swarm, "eve", "me")["paused"])
    told = owner(swarm, "eve", "me")
    assert told["held"].startswith("the upload of this month is used up: ")
    assert told["month"]["up"] > 10_000
    at = swarm.last_step("eve")
    swarm.wait_step("eve", at + 5)  # it follows the log, and serves nothing: the others have the votes

    owner(swarm, "eve", "leave")
    assert swarm.processes["eve"].finish()[0] == 0
    swarm.join("eve")
    wait_for("the pause from the start on", lambda: swarm.events("eve", "paused from the start on"))
    wait_for(
        "eve in the run",
        lambda: "paused: " + whys(swarm, "eve", "paused from the start on")[0] in whys(swarm, "eve", "paused"),
    )
    assert owner(swarm, "eve", "me")["month"]["up"] >= told["month"]["up"]
    at = swarm.last_step("eve")
    owner(swarm, "eve", "set", "upload_gb", "off")
    wait_for("votes of eve", lambda: [s for s in swarm.steps("eve") if s["step"] > at and s["accepted"]])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the time of a thread from Linux")
@pytest.mark.nightly
@pytest.mark.parametrize("swarm", [(TINY_MODEL, 600)], indirect=True, ids=["a model that computes"])
def test_a_duty_cycle_bounds_the_time_of_the_training_thread(swarm: LocalSwarm) -> None:
    pid = swarm.join("ada", "--set", "micro_batch=8").child.pid
    swarm.wait_step("ada", 2)
    owner(swarm, "ada", "set", "duty_cycle", "0.3")
    at = swarm.last_step("ada")
    swarm.wait_step("ada", at + 2)

    def cpu_seconds() -> float:
        numbers = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    before, began = cpu_seconds(), time.monotonic()
    wait_for("three seconds of its work", lambda: cpu_seconds() - before >= 3.0)
    part = (cpu_seconds() - before) / (time.monotonic() - began)
    print(f"duty_cycle = 0.3: the training thread ran {part:.3f} of the time")
    assert part < 0.33


@pytest.mark.nightly
def test_a_download_that_is_used_up_loads_nothing_until_there_is_room_again(swarm: LocalSwarm) -> None:
    swarm.join("ada")
    swarm.join("eve")
    swarm.wait_step("eve", 10)
    owner(swarm, "eve", "set", "download_gb", "0.00001")
    wait_for("the pause", lambda: owner(swarm, "eve", "me")["held"].startswith("the download of this month is used up"))
    at, before = swarm.last_step("ada"), owner(swarm, "eve", "me")["month"]["down"]
    swarm.wait_step("ada", at + 20)
    assert swarm.last_step("eve") < at + 20
    assert owner(swarm, "eve", "me")["month"]["down"] - before < 20_000, "a handful of votes that were on their way"
    at = swarm.last_step("ada")
    owner(swarm, "eve", "set", "download_gb", "default")
    wait_for("votes of eve", lambda: [s for s in swarm.steps("eve") if s["step"] > at and s["accepted"]])
    digests = digests_by_step(swarm.steps("ada"), swarm.steps("eve"))
    assert all(len(found) == 1 for found in digests.values())
