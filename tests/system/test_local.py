"""`swarmentum.local` with real processes: it trains, its words and figures are the run's, it loses and gets peers, and nothing
of it outlives its program."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import swarmentum
from node.commands.processes import Processes
from tests.system.local_swarm import SURROUNDINGS, digests_by_step, processes_with, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, Any] = {
    "name": "cell",
    "model": {"factory": "tests.system.tiny:model"},
    "data": {"source": str(Path(os.__file__)), "context": 32},
    "clock": {"steps": 100_000, "batch_samples": 8, "min_peers": 1, "snapshot_every": 10},
}


@pytest.mark.nightly
@pytest.mark.long
def test_a_swarm_in_one_cell_loses_a_peer_gets_it_back_and_all_states_agree(tmp_path: Path) -> None:
    folder = tmp_path / "swarm"
    with swarmentum.local(peers=2, anchor=True, run=RUN, folder=folder) as swarm:
        assert swarm.peers == ("peer-0", "peer-1")
        swarm.wait(3, timeout=300)
        facts = swarm.status()
        assert (facts["name"], facts["phase"], facts["anchored"]) == ("cell", "open", True)
        with urllib.request.urlopen(swarm.page) as answer:
            assert answer.status == 200
        swarm.kill("peer-1")
        assert swarm.peers == ("peer-0",)
        left_at = swarm.steps("peer-1")[-1]["step"]
        swarm.wait(left_at + 3, timeout=300)
        assert swarm.add_peer("peer-1") == "peer-1"
        assert swarm.add_peer() == "peer-2"
        swarm.wait(swarm.steps("peer-0")[-1]["step"] + 5, timeout=300)
        assert swarm.peers == ("peer-0", "peer-1", "peer-2")
        wait_for("a vote of peer-2", lambda: [step for step in swarm.steps("peer-2") if step["accepted"]])
        found = swarm.verify()
        assert found.ok, found.reason
        assert found.run == facts["run"]
        run = swarmentum.read_run(swarm.link)
        assert (run.id, run.settings["clock"]["batch_samples"], len(run.peers)) == (facts["run"], 8, 3)
        digests = digests_by_step(*(swarm.steps(name) for name in (*swarm.peers, "anchor")))
        assert all(len(them) == 1 for them in digests.values())
        agreed = {step.step - 1: step.state_digest_before for step in run.steps if step.state_digest_before}
        assert agreed, "the log has no digest"
        assert all(digests[step] == {digest} for step, digest in agreed.items() if step in digests)
        with pytest.raises(
            TimeoutError, match=r"step 99999 was not reached within 0\.1 s: anchor is at step \d+, peer-0"
        ):
            swarm.wait(99_999, timeout=0.1)
        with pytest.raises(swarmentum.OperatorError, match="there is no 'bob' in this swarm; it has anchor, peer-0"):
            swarm.kill("bob")
        for name in swarm.peers:
            swarm.kill(name)
        with pytest.raises(swarmentum.OperatorError, match="no peer runs"):
            swarm.wait(99_999)
        lost = swarm._children[swarm.add_peer("peer-0")]
        lost.kill()
        lost.wait()
        with pytest.raises(swarmentum.SwarmentumError, match="peer-0 failed"):  # not that no peer runs
            swarm.wait(99_999)
    assert processes_with(str(folder)) == []
    assert (folder / "logs" / "peer-0.log").is_file()
    with pytest.raises(swarmentum.OperatorError, match="is closed"):
        swarm.status()
    swarm.close()


@pytest.mark.nightly
@pytest.mark.long
def test_a_run_that_ends_ends_the_wait() -> None:
    with swarmentum.local(peers=1, run=RUN | {"clock": {"steps": 3, "batch_samples": 2}}) as swarm:
        swarm.wait(timeout=300)
        assert swarm.peers == ()
        with pytest.raises(swarmentum.OperatorError, match="the run ended at step 3, before step 4"):
            swarm.wait(4)
        folder = swarm.folder
        assert swarm.verify().ok
    assert not folder.exists()


PROGRAM = f"""
import threading, time, swarmentum
made = []
thread = threading.Thread(target=lambda: made.append(swarmentum.local(peers=1, run={RUN!r})))
thread.start()
thread.join()
made[0].wait(1, timeout=300)
print(made[0].folder, flush=True)
"""


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("end", ["the program is killed", "the program ends"])
def test_nothing_outlives_its_program(end: str) -> None:
    """Another thread started the swarm, and ended long before the program: the swarm goes on until the program ends."""
    waits = "\ntime.sleep(600)" if end == "the program is killed" else ""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + waits], cwd=ROOT, env={**os.environ, **SURROUNDINGS}, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        folder = program.stdout.readline().strip()
        assert folder, "no swarm"
        if waits:
            assert len(processes_with(folder)) >= 3
            program.send_signal(signal.SIGKILL)
        assert program.wait(300) == (-signal.SIGKILL if waits else 0)
        wait_for("end of all processes", lambda: not processes_with(folder))
        assert Path(folder).exists() == bool(waits), "only a program that ends by itself can tidy up"
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peers": -1}, "peers=-1: a swarm on one machine has 0 (for peers of your own) to 32 peers"),
        ({"run": {"clock": {"steps": 0}}}, "run has wrong settings:\nclock.steps: "),
        ({"run": {"clock": {"stepps": 5}}}, "clock.stepps"),
        ({"run": {"optimizer": {"clip_norm": None}}}, "optimizer.clip_norm"),
        ({"run": "no-such-run.toml"}, "no-such-run.toml"),
        ({"folder": ROOT}, "is not empty"),
        (
            {"run": {"model": {"config": {"model_type": "llama", "bos_token_id": None}}}},
            "run has model.config.bos_token_id = None",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests have swarms of their own
    with pytest.raises(swarmentum.OperatorError) as error:
        swarmentum.local(**given)
    assert said in str(error.value)
    assert processes_with(str(tmp_path)) == []


def test_a_run_that_cannot_be_made_ends_with_the_words_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "run.toml"
    file.write_text('[model]\nfactory = "tests.system.nothing:here"\n')
    with pytest.raises(swarmentum.OperatorError, match=r"create did not start(.|\n)*tests\.system\.nothing"):
        swarmentum.local(peers=1, run=file)
    assert processes_with(str(tmp_path)) == []


def test_a_child_outlives_the_thread_that_asked_for_it_and_not_a_kill(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    made: list[subprocess.Popen[str]] = []
    thread = threading.Thread(target=lambda: made.append(processes.start("relay", "coordinator", "serve", "--json",
        "--home", str(tmp_path / "home"), "--listen", "127.0.0.1:0", "--web-listen", "none")))  # fmt: skip
    thread.start()
    thread.join()
    assert processes.ready("relay", made[0])["event"] == "serving"
    processes.kill(made[0])
    assert made[0].returncode == -signal.SIGKILL
    assert processes.ended() == []
    processes.close()
