"""Peers that are killed at bad moments, stop, starve or fill their disk: the run goes on, and no two replicas differ.

One swarm lives through it in order; the coordinator is never touched here (tests/system/test_failover.py, test_life.py).
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.archive import ledger
from protos.identity import Identity, peer_id
from tests.system.local_swarm import LocalSwarm, digests_by_step, processes_with, toml_of_run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

MANY = 100_000
FULL_DISK_MB = 2


def run_toml(folder: Path, *, steps: int = MANY, min_peers: int = 2, strict: bool = False) -> str:
    text = folder / "text.txt"
    text.write_bytes(Path(os.__file__).read_bytes())
    clock = {"steps": steps, "batch_samples": 16, "min_peers": min_peers, "snapshot_every": 5, "strict": strict}
    return toml_of_run("faults", source=str(text), clock=clock | {"deadline_ms_min": 1000, "deadline_ms_max": 10000})


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("faults")
    with LocalSwarm(folder, run_toml(folder)) as made:
        for name in ("ada", "bob"):
            made.join(name)
        for name in ("ada", "bob"):
            made.wait_step(name, 6)
        yield made
    assert processes_with(str(folder)) == [], "something was left running"


def all_equal(swarm: LocalSwarm, *names: str) -> None:
    different = {s: d for s, d in digests_by_step(*(swarm.steps(name) for name in names)).items() if len(d) > 1}
    assert not different, f"replicas differ after steps {sorted(different)[:5]}"


def accepted(swarm: LocalSwarm, name: str) -> int:
    return sum(line["accepted"] for line in swarm.steps(name))


def back_again(swarm: LocalSwarm, *names: str) -> None:
    """Join again with the same identity, and wait until its votes count."""
    before = {name: accepted(swarm, name) for name in names}
    for name in names:
        swarm.join(name)
    for name in names:
        wait_for(f"vote of {name} that counts", lambda name=name: accepted(swarm, name) > before[name])


def there(swarm: LocalSwarm, *names: str) -> None:
    """Each takes part, whatever the tests before did with it."""
    away = [name for name in names if name not in swarm.processes or swarm.processes[name].child.poll() is not None]
    if away:
        back_again(swarm, *away)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        pytest.param(lambda path: None, "does not exist", id="gone", marks=pytest.mark.nightly),
        pytest.param(lambda path: path.write_text("abc"), "tokens", id="truncated"),
        pytest.param(lambda path: path.mkdir(), "no utf-8 text", id="empty-folder", marks=pytest.mark.nightly),
    ],
)
def test_a_data_source_that_is_gone_or_cut_off_is_said_at_once(
    swarm: LocalSwarm, make: Callable[[Path], Any], word: str, tmp_path: Path
) -> None:
    make(tmp_path / "data")
    process = swarm.join("dan", "--data", str(tmp_path / "data"))
    code, _ = process.finish()
    told = process.log.read_text()
    assert code == 2, told[-2000:]
    assert word in told.splitlines()[-1].lower(), told[-2000:]
    assert "Traceback" not in told


@pytest.mark.long
def test_a_data_source_that_is_cut_off_meanwhile_ends_its_peer_with_a_clear_error(
    swarm: LocalSwarm, tmp_path: Path
) -> None:
    data = tmp_path / "text.txt"
    data.write_bytes((swarm.folder / "text.txt").read_bytes())
    process = swarm.join("fay", "--data", str(data))
    wait_for("vote of fay that counts", lambda: accepted(swarm, "fay") > 0)
    os.truncate(data, 100)
    code, _ = process.finish()
    told = process.log.read_text()
    assert code == 2, told[-2000:]
    assert "text.txt has become shorter since this peer began" in told.splitlines()[-1], told[-2000:]
    assert "Traceback" not in told
    all_equal(swarm, "ada", "bob", "fay")


@pytest.mark.long
def test_a_peer_whose_data_source_is_slow_gets_a_small_share_and_is_told(swarm: LocalSwarm) -> None:
    """As any slow peer: the others go on, and what it is given becomes what it can read in time."""
    home = ("--home", str(swarm.folder / "gil"), "--listen", "127.0.0.1:0", "--threads", "1")
    swarm.start("gil", "tests.system.slow_data", "0.25", "join", swarm.link, *home, "--json")
    wait_for("word that its source is slow", lambda: slow_source(swarm, "gil"))
    [told] = slow_source(swarm, "gil")
    assert told["reading_percent"] > 50
    before, counted = contributed(swarm), accepted(swarm, "gil")
    wait_for("votes of gil that count", lambda: accepted(swarm, "gil") > counted + 5)
    after = contributed(swarm)
    samples = {name: after[name] - before[name] for name in ("gil", "ada", "bob")}
    assert 0 < samples["gil"] < min(samples["ada"], samples["bob"]) / 2, samples
    swarm.processes["gil"].interrupt()
    code, summary = swarm.processes["gil"].finish()
    assert code == 130
    assert summary["reading_seconds"] > 1
    all_equal(swarm, "ada", "bob", "gil")


def contributed(swarm: LocalSwarm) -> dict[str, int]:
    """Samples by peer, as the log has them."""
    samples = {account.id: account.samples for account in ledger.of(swarm.link).accounts}
    keys = {name: Identity.load_or_create(swarm.folder / name / "identity.key") for name in ("ada", "bob", "gil")}
    return {name: samples.get(peer_id(key.public_key), 0) for name, key in keys.items()}


def slow_source(swarm: LocalSwarm, name: str) -> list[dict[str, Any]]:
    event = "the data source is slow: this peer gets fewer samples than it could compute; a local disk is faster"
    return swarm.events(name, event)


@pytest.mark.long
def test_with_too_few_peers_the_run_waits_and_goes_on_at_the_same_step(swarm: LocalSwarm) -> None:
    swarm.processes["bob"].kill()
    waiting = wait_for(
        "run that waits", lambda: (s := swarm.status())["phase"] != "finished" and "needed" in s["reason"] and s
    )
    step = waiting["step"]
    assert swarm.status()["step"] == step
    back_again(swarm, "bob")
    steps = [line["step"] for line in swarm.steps("ada")]
    assert steps[-1] > step
    assert steps == list(range(1, steps[-1] + 1)), "ada lost a step or applied one twice"
    all_equal(swarm, "ada", "bob")


@pytest.mark.parametrize(
    "event",
    [
        *(pytest.param(it, marks=pytest.mark.nightly) for it in ("run found", "model")),
        "loading snapshot",
        "taking part",
    ],
)
@pytest.mark.long
def test_killed_while_joining_it_comes_back_at_once(swarm: LocalSwarm, event: str) -> None:
    """The same identity again, while the coordinator may still believe in the life before."""
    before = len(swarm.events("cyd", event)) if (swarm.folder / "cyd.log").exists() else 0
    process = swarm.join("cyd")
    wait_for(f"{event!r} of cyd", lambda: len(swarm.events("cyd", event)) > before)
    process.kill()
    wait_for("end of what cyd started", lambda: not processes_with(str(swarm.folder / "cyd" / "identity.key")))
    if event == "taking part":
        back_again(swarm, "cyd")
        all_equal(swarm, "ada", "bob", "cyd")
        ready = _id(swarm, "cyd"), "ready"  # who is a step behind for a moment is syncing
        wait_for("cyd ready", lambda: ready in {(peer["id"], peer["phase"]) for peer in swarm.status()["peers"]})


def _id(swarm: LocalSwarm, name: str) -> str:
    from protos.identity import Identity

    return Identity.load_or_create(swarm.folder / name / "identity.key").peer_id


@pytest.mark.nightly
def test_killed_while_taking_snapshots(swarm: LocalSwarm) -> None:
    there(swarm, "cyd")
    for _ in range(3):
        at = swarm.last_step("cyd")
        due = at - at % 5 + 5
        swarm.wait_step("cyd", due)
        swarm.processes["cyd"].kill()  # it stores the snapshot of this step, or has just done so
        back_again(swarm, "cyd")
    all_equal(swarm, "ada", "bob", "cyd")
    pieces = next((swarm.folder / "cyd" / "runs").glob("*/pieces"))
    assert not list(pieces.glob(".incoming-*")), "half-written pieces were left"


@pytest.mark.long
def test_all_die_and_start_again_from_their_disks(swarm: LocalSwarm) -> None:
    names = ("ada", "bob", "cyd")
    there(swarm, *names)
    for name in names:
        swarm.processes[name].kill()
    step = swarm.status()["step"]
    back_again(swarm, *names)
    all_equal(swarm, *names)
    for name in names:
        assert swarm.events(name, "momentum taken up again"), f"{name} started with fresh momentum"
        first = next(line["step"] for line in reversed(swarm.steps(name)) if line["step"] <= step)
        assert first >= step - 10, f"{name} lost more than two snapshots"


@pytest.mark.nightly
def test_a_stopped_peer_is_waited_for_once_and_catches_up(swarm: LocalSwarm) -> None:
    there(swarm, "cyd")
    cyd = swarm.processes["cyd"].child
    cyd.send_signal(signal.SIGSTOP)
    at = swarm.last_step("ada")
    swarm.wait_step("ada", at + 8)
    behind = swarm.last_step("cyd")
    cyd.send_signal(signal.SIGCONT)
    swarm.wait_step("cyd", at + 9)
    before = accepted(swarm, "cyd")
    wait_for("vote of cyd that counts", lambda: accepted(swarm, "cyd") > before)
    assert behind <= at + 1
    all_equal(swarm, "ada", "bob", "cyd")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_MB}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs root to mount a small disk: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.long
def test_a_read_only_disk_is_a_clear_error(swarm: LocalSwarm, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    (swarm.folder / "eve").symlink_to(small_disk)
    process = swarm.join("eve")
    code, _ = process.finish()
    told = process.log.read_text()
    assert code == 2, told[-2000:]
    assert "Read-only file system" in told.splitlines()[-1]
    assert "Traceback" not in told


# ---- runs of their own -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_one_peer_alone_stopped_and_resumed_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    digests = []
    for name, stops in (("whole", ()), ("stopped", (4, 11))):
        folder = tmp_path / name
        folder.mkdir()
        with LocalSwarm(folder, run_toml(folder, steps=18, min_peers=1, strict=True)) as swarm:
            for step in stops:
                process = swarm.join("ada")
                swarm.wait_step("ada", step)
                process.interrupt()
                assert process.finish()[0] == 130
            code, summary = swarm.join("ada").finish()
            assert code == 0
            assert [line["step"] for line in swarm.steps("ada")][-1] == 18
            digests.append(summary["state_digest"])
    assert digests[0] == digests[1], "stopping and going on changed the weights"


@pytest.mark.nightly
def test_killed_while_exporting_it_exports_when_it_comes_back(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path, run_toml(tmp_path, steps=12, min_peers=2)) as swarm:
        swarm.join("bob")
        ada = swarm.join("ada", "--export", str(tmp_path / "model"))
        # a look that comes late finds the whole export: then the kill comes after it
        wait_for("export that has begun", lambda: [*tmp_path.glob(".model.new-*"), *tmp_path.glob("model")])
        ada.kill()
        assert swarm.processes["bob"].finish()[0] == 0
        code, summary = swarm.join("ada", "--export", str(tmp_path / "model")).finish()
        assert code == 0
        assert summary["step"] == 12
        assert (tmp_path / "model" / "model.safetensors").is_file()
        assert swarm.steps("bob")[-1]["step"] == 12
        all_equal(swarm, "ada", "bob")
