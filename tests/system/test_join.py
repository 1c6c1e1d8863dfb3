"""`swarmentum.join` with real processes: a program's own model and loop beside a peer of the command, in one run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import swarmentum
from protos.identity import Identity
from tests.system import tiny, trainer_peer
from tests.system.local_swarm import (
    PATIENT,
    READY_SECONDS_MAX,
    SURROUNDINGS,
    digests_by_step,
    processes_with,
    wait_for,
    whole_lines,
)

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
TRAINERS = os.environ.get("SWARMENTUM_TEST_TRAINERS", "")
RUN: dict[str, Any] = {
    "name": "own",
    "model": {"factory": "tests.system.tiny:model"},
    "data": {"source": str(Path(os.__file__)), "context": 32},
    "clock": {"steps": 100_000, "batch_samples": 8, "min_peers": 1, "snapshot_every": 10} | PATIENT,
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[swarmentum.Local]:
    """One peer of the command, in a run whose model is other code than the program's."""
    folder = tmp_path_factory.mktemp("own") / "swarm"
    with swarmentum.local(peers=1, run=RUN, folder=folder) as made:
        made.wait(2, timeout=300)
        yield made
    assert processes_with(str(folder)) == []


class Program:
    """A program beside the swarm; its lines come as they are printed."""

    def __init__(self, swarm: swarmentum.Local, name: str, how: str) -> None:
        self.log = swarm.folder / "logs" / f"{name}.log"
        environment = {**os.environ, **SURROUNDINGS, "SWARMENTUM_ALLOW": ""}
        self._file = self.log.open("a")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.system.own_loop_peer", swarm.link, str(swarm.folder / name), how],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self._file, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append(line.strip())

    def rounds(self, count: int) -> None:
        """Until the program's loop has made so many rounds."""
        try:
            wait_for(f"round {count}", lambda: len(self.lines) >= count or self.child.poll() is not None)
            assert len(self.lines) >= count, self.log.read_text()[-3000:]
        except AssertionError:
            self.end(signal.SIGKILL)
            raise

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.child.send_signal(number)
        code = self.child.wait(READY_SECONDS_MAX)
        self._reader.join(10)
        self.child.stdout.close()
        self._file.close()
        return code


def steps_of(swarm: swarmentum.Local, name: str) -> list[dict[str, Any]]:
    from node.commands.processes import LocalProcesses, Processes
    from protos.invite import Invite

    return LocalProcesses(Processes(swarm.folder / "logs"), swarm.folder).steps(name, Invite.parse(swarm.link).run_id)


def test_both_hold_one_state_and_a_killed_program_comes_back_where_it_was(swarm: swarmentum.Local) -> None:
    first = Program(swarm, "ada", "on")
    first.rounds(25)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    killed_at = steps_of(swarm, "ada")[-1]["step"]
    wait_for("end of its p2pd", lambda: not processes_with(str(swarm.folder / "ada")))
    swarm.wait(killed_at + 3, timeout=300)
    again = Program(swarm, "ada", "on")
    again.rounds(5)
    swarm.wait(int(again.lines[-1]), timeout=300)
    assert again.end(signal.SIGINT) != 0  # KeyboardInterrupt, as in any program
    assert "momentum taken up again" in again.log.read_text()
    mine, theirs = steps_of(swarm, "ada"), swarm.steps("peer-0")
    digests = digests_by_step(mine, theirs)
    assert {len(them) for them in digests.values()} == {1}
    both = {line["step"] for line in mine} & {line["step"] for line in theirs}
    assert any(step > killed_at + 3 for step in both)
    assert len(both) >= 20
    accepted = [line["step"] for line in mine if line["accepted"]]
    assert sum(step <= killed_at for step in accepted) >= 20
    assert any(step > killed_at + 3 for step in accepted)
    run = swarmentum.read_run(swarm.link)
    assert len(run.peers) == 2, "the same home is the same identity"
    assert swarm.verify().ok


def test_a_loop_that_only_calls_step_votes_like_any_other(swarm: swarmentum.Local) -> None:
    program = Program(swarm, "eve", "optimizer")
    program.rounds(12)
    swarm.wait(int(program.lines[-1]), timeout=300)
    program.end(signal.SIGINT)
    mine, theirs = steps_of(swarm, "eve"), swarm.steps("peer-0")
    assert {len(them) for them in digests_by_step(mine, theirs).values()} == {1}
    assert sum(line["accepted"] for line in mine) >= 8
    eve = Identity.load_or_create(swarm.folder / "eve" / "identity.key").peer_id
    said = dict(line.split() for line in (swarm.folder / "eve" / "losses").read_text().splitlines())
    run = swarmentum.read_run(swarm.link)
    logged = {str(step.step): vote.loss for step in run.steps for vote in step.votes if vote.peer == eve}
    assert len(logged) >= 8
    assert all(loss == pytest.approx(float(said[step]), rel=1e-6) for step, loss in logged.items())


@pytest.mark.nightly
def test_a_program_that_gives_its_loss_checks_others_and_tells_held_out_losses(tmp_path: Path) -> None:
    run = RUN | {"trust": {"enabled": True}, "evaluation": {"every": 10}}
    run["clock"] = {**RUN["clock"], "min_peers": 3}
    with swarmentum.local(peers=2, run=run, folder=tmp_path / "swarm") as made:
        program = Program(made, "own", "checks")
        log = program.log

        def said(what: str) -> list[str]:
            assert program.child.poll() is None, log.read_text()[-3000:]
            return [line for line in whole_lines(log) if what in line]

        def both() -> list[tuple[float, float]]:
            """What it and another peer say of the same states."""
            mine = dict(re.findall(r"loss=([\d.]+).* step=(\d+)", line)[0][::-1] for line in said("held-out loss"))
            events = map(json.loads, whole_lines(made.folder / "logs" / "peer-0.log"))
            theirs = {str(event["step"]): event["loss"] for event in events if event["event"] == "held-out loss"}
            return [(float(mine[step]), theirs[step]) for step in mine.keys() & theirs.keys()]

        try:
            wait_for("checks", lambda: len(said("checked")) >= 3)
            found = wait_for("held-out losses of one state", both)
        finally:
            program.end(signal.SIGINT)
        assert all(mine == pytest.approx(theirs, rel=0.05) for mine, theirs in found), "it is the same text"
        assert swarmentum.read_run(made.link).exclusions == ()
        assert made.verify().ok


@pytest.mark.nightly
@pytest.mark.skipif(not TRAINERS, reason="SWARMENTUM_TEST_TRAINERS names no Python with accelerate (make nightly does)")
def test_a_trainer_of_hugging_face_is_a_peer(tmp_path: Path) -> None:
    config = {"model_type": "llama", **trainer_peer.SMALL}
    run = {**RUN, "model": {"config": config}, "clock": {**RUN["clock"], "steps": 20, "min_peers": 2}}
    with swarmentum.local(peers=1, run=run, folder=tmp_path / "swarm") as made:
        command = [TRAINERS, "-m", "tests.system.trainer_peer", made.link, str(tmp_path / "trainer")]
        surroundings = {**os.environ, **SURROUNDINGS, "PYTHONPATH": f"{ROOT}:{ROOT / 'node' / 'front'}"}
        done = subprocess.run(
            command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert int(done.stdout.splitlines()[-1]) >= 15
        assert made.verify().ok


@pytest.mark.nightly
@pytest.mark.skipif(not TRAINERS, reason="SWARMENTUM_TEST_TRAINERS names no Python with torchtitan (make nightly does)")
def test_torchtitan_is_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model in a built-in peer, too: both hold one state."""
    monkeypatch.setenv("SWARMENTUM_TEST_TITAN", str(tmp_path / "titan"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'node' / 'front'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = [str(ROOT / "tests" / "system" / "titan_peer.py")]
    subprocess.run([TRAINERS, *script, "prepare"], cwd=ROOT, check=True, timeout=300)
    torchrun = [TRAINERS, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    code = (
        "import subprocess, sys, swarmentum\n"
        "clock = {'steps': 15, 'batch_samples': 8, 'min_peers': 2}\n"
        "run = {'model': {'factory': 'tests.system.titan_peer:model'}, 'clock': clock, 'data': {'context': 32}}\n"
        "with swarmentum.local(peers=1, run=run, folder=sys.argv[1]) as made:\n"
        "    subprocess.run([*sys.argv[3:], made.link, sys.argv[2]], check=True)\n"
        "    assert made.verify().ok\n"
    )
    words = [TRAINERS, "-c", code, str(tmp_path / "swarm"), str(tmp_path / "home"), *torchrun, *script]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split("votes ")[1].split()[0]) >= 12


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["leaves", "ends"])
def test_a_program_that_leaves_saves_its_momentum(swarm: swarmentum.Local, how: str) -> None:
    """With `close`, and when the program ends without it."""
    program = Program(swarm, f"bob-{how}", how)
    program.rounds(3)
    assert program.end() == 0, program.log.read_text()[-3000:]
    [folder] = (swarm.folder / f"bob-{how}" / "runs").iterdir()
    assert (folder / "private.pt").stat().st_size > 0
    assert "Traceback" not in program.log.read_text()
    if how == "leaves":
        assert 2 <= int(program.lines[-1]) <= 3
    again = Program(swarm, f"bob-{how}", how)
    again.rounds(3)
    assert again.end() == 0
    assert "momentum taken up again" in again.log.read_text()


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.hidden = nn.Linear(128, 65)
        self.head = nn.Linear(65, 256)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"allow_code": True},
            r"layout \w{16}, and the run's have \w{16}: hidden\.weight \(65, 128\) stands where the run has",
        ),
        ({}, r"layout \w{16}, and the run's have \w{16}\. Names, shapes, their order"),
        ({"allow_data": False}, "join with --allow-data"),
        ({"groupsize": 8}, "groupsize"),
        ({"device": "cpu"}, "device: the model that you give, and your loop, decide this"),
    ],
)
def test_what_does_not_fit_the_run_is_said_in_words(
    swarm: swarmentum.Local, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    words: dict[str, Any] = {"home": tmp_path, "listen": "127.0.0.1:0", "allow_data": True} | given
    with pytest.raises(swarmentum.OperatorError, match=said):
        swarmentum.join(swarm.link, Wider(), **words)


def test_two_peers_of_one_thread_are_refused_and_of_two_threads_are_not(
    swarm: swarmentum.Local, tmp_path: Path
) -> None:
    """`contribute` of the one would wait for a step that waits for the other."""
    words: dict[str, Any] = {"listen": "127.0.0.1:0", "allow_data": True, "allow_code": True}
    with (
        swarmentum.join(swarm.link, tiny.model(), home=tmp_path / "a", **words) as one,
        swarmentum.join(swarm.link, tiny.model(), home=tmp_path / "b", **words) as other,
    ):
        next(iter(one))
        with pytest.raises(
            swarmentum.OperatorError, match="run each in a thread of its own, or close the other one first"
        ):
            next(iter(other))
        shares = list[object]()
        elsewhere = threading.Thread(target=lambda: shares.append(next(iter(other))))
        elsewhere.start()
        elsewhere.join(240)
        assert len(shares) == 1
        one.close()
        next(iter(other))


def test_a_peer_ends_with_its_object_and_the_same_home_joins_again(swarm: swarmentum.Local, tmp_path: Path) -> None:
    """As where a cell of a notebook runs twice: the thread kept the peer and its home for ever, and the run waited for it."""
    words: dict[str, Any] = {"home": tmp_path, "listen": "127.0.0.1:0", "allow_data": True, "allow_code": True}
    peer = swarmentum.join(swarm.link, tiny.model(), **words)
    next(iter(peer))
    with pytest.raises(
        swarmentum.OperatorError, match=r"an earlier peer of this program is using it: call its close\(\)"
    ):
        swarmentum.join(swarm.link, tiny.model(), **words)
    del peer
    optimizer = swarmentum.join(swarm.link, tiny.model(), **words).optimizer()
    assert not optimizer.finished, "the optimizer keeps its peer"


def test_a_program_that_loads_other_weights_keeps_its_momentum(swarm: swarmentum.Local, tmp_path: Path) -> None:
    """As a trainer with load_best_model_at_end does, as its last act. The peer ended as by a mistake of its own."""
    words: dict[str, Any] = {"home": tmp_path, "listen": "127.0.0.1:0", "allow_data": True, "allow_code": True}
    model = tiny.model()
    peer = swarmentum.join(swarm.link, model, **words)
    next(iter(peer))
    [private] = [folder / "private.pt" for folder in (tmp_path / "runs").iterdir()]
    private.unlink(missing_ok=True)
    with pytest.raises(swarmentum.OperatorError, match="load no other weights"), peer:
        model.load_state_dict(tiny.model().state_dict())
    assert private.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(("example", "falls"), [("own_loop", 0.3), ("own_gpt", 0.3), ("own_vit", 0.3)])
def test_an_example_of_the_docs_trains(example: str, falls: float, tmp_path: Path) -> None:
    code = (ROOT / "docs" / "examples" / f"{example}.py").read_text()
    assert len(code.splitlines()) <= 50
    (tmp_path / f"{example}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, f"{example}.py"], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) >= 25
    assert losses[-1] < losses[0] - falls
