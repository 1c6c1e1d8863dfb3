"""A real swarm on loopback for tests: coordinator, relay and peers as the commands that a user runs, each a process.

Waits are on what the processes write, with deadlines; nothing sleeps for a fixed time and hopes.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from protos.invite import Invite
from tests.system import copied
from tests.system.copied import begin

T = TypeVar("T")
# Only what never comes is waited for so long: a busy machine is no failure, and a stalled one goes on
READY_SECONDS_MAX = 300.0
POLL_SECONDS = 0.05
# a run of these tests names a file of the machine that both sides are on
SURROUNDINGS = {
    **copied.SURROUNDINGS,
    "SWARMENTUM_ALLOW": "code,data",  # tests/system/tiny.py
    "SWARMENTUM_COORDINATOR_WEB_LISTEN": "none",  # only tests of the page start one
}

PLAIN_MODEL = """
[model]
factory = "tests.system.tiny:model"
"""
TINY_MODEL = """
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 128
max_position_embeddings = 64
tie_word_embeddings = true
"""

PATIENT = {"deadline_ms_min": 10000, "deadline_ms_max": 20000}
"""For `clock`: peers on a busy machine, or on one that stands still for a moment, are in time."""
IMPATIENT = {"deadline_ms_min": 1000, "deadline_ms_max": 20000}
"""The same, where a liar or a silent peer keeps the others waiting."""


def toml_of_run(
    name: str, model: str = PLAIN_MODEL, *, source: str = "", relay: bool = False, **sections: dict[str, object]
) -> str:
    """`run.toml` of a run that goes on and on. `LocalSwarm` puts in what DATA and BOOTSTRAP stand for.

    `relay`: the run has one. On loopback peers find each other by the coordinator, and a relay takes 2 s of a core to start.
    """
    data = ({"source": source} if source else {}) | sections.pop("data", {}) | {"context": 32}
    clock = {"steps": 100000} | sections.pop("clock", {})
    tables = [
        "\n".join([f"[{key}]", *(f"{setting} = {json.dumps(value)}" for setting, value in values.items())])
        for key, values in ({"data": data, "clock": clock} | sections).items()
    ]
    tables += ["[overlay]", "bootstrap = [BOOTSTRAP]"] if relay else []
    return "\n".join([f'name = "{name}"', model, *tables, ""])


def wait_for(what: str, look: Callable[[], T | None], seconds: float = READY_SECONDS_MAX) -> T:
    """The first thing that `look` finds; fails naming `what` after the deadline."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        select.select([], [], [], POLL_SECONDS)
    raise AssertionError(f"no {what} within {seconds} s")


def whole_lines(file: Path) -> list[str]:
    """Of a file that a program still writes: its last line may be half there."""
    said = file.read_bytes()
    return said[: said.rfind(b"\n") + 1].decode().splitlines()


class Process:
    """One command; its stderr is a log file, its stdout is read line by line."""

    def __init__(
        self, log: Path, *command: str, environment: dict[str, str] | None = None, inside: tuple[str, ...] = ()
    ) -> None:
        self.log = log
        self.child = begin(log, *command, environment={**SURROUNDINGS, **(environment or {})}, inside=inside)

    def first_json(self) -> dict[str, Any]:
        """The first line of stdout."""
        ready, _, _ = select.select([self.child.stdout], [], [], READY_SECONDS_MAX)
        line = self.child.stdout.readline() if ready else ""
        assert line, f"no first line; log:\n{self.log.read_text()[-3000:]}"
        values: dict[str, Any] = json.loads(line)
        return values

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """kill -9, and nothing else."""
        self.child.kill()
        self.child.wait(60)
        self.close()

    def finish(self, seconds: float = READY_SECONDS_MAX) -> tuple[int, dict[str, Any]]:
        """Exit code and the last JSON line of stdout."""
        assert self.child.stdout is not None
        out, _ = self.child.communicate(timeout=seconds)
        self.close()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        return self.child.returncode, json.loads(lines[-1]) if lines else {}

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(60)
        if self.child.stdout is not None:
            self.child.stdout.close()


def leave(*processes: Process) -> None:
    """Interrupt them all, and wait until they have left."""
    for process in processes:
        process.interrupt()
    for process in processes:
        process.finish()


class LocalSwarm:
    """A coordinator, a relay if the run names it, and peers by name."""

    HOST = "127.0.0.1"

    def __init__(self, folder: Path, run_toml: str, *create_flags: str) -> None:
        """`create_flags`: of `run create`, which otherwise leaves the layout to the first peers: that is seconds sooner."""
        self.folder = folder
        self.create_flags = create_flags or ("--no-layout",)
        self.processes: dict[str, Process] = {}
        try:
            self._start(run_toml)
        except BaseException:
            self.close()
            raise

    def _start(self, run_toml: str) -> None:
        folder = self.folder
        if "DATA" in run_toml:
            (folder / "text.txt").write_bytes(Path(os.__file__).read_bytes())
            run_toml = run_toml.replace("DATA", str(folder / "text.txt"))
        self.bootstrap: list[str] = []
        if "BOOTSTRAP" in run_toml:
            home = ("--home", str(folder / "relay"), "--listen", f"{self.HOST}:0")
            relay = self.start("relay", "node", "relay", *home, "--set", "reachability=auto", "--json")
            self.serve(port=0)
            self.bootstrap = relay.first_json()["addresses"]
            run_toml = run_toml.replace("BOOTSTRAP", json.dumps(self.bootstrap[0]))
        else:
            self.serve(port=0)
        file = folder / "run.toml"
        file.write_text(run_toml)
        create = self.start(
            "create", "coordinator", "run", "create", str(file), "--home", self.home, "--json", *self.create_flags
        )
        self.created = create.first_json()
        self.link: str = self.created["invite"]
        create.finish()
        self.invite = Invite.parse(self.link)

    @property
    def home(self) -> str:
        return str(self.folder / "coordinator")

    def inside(self, name: str) -> tuple[str, ...]:
        """What is put before the command of a process; nothing on loopback."""
        return ()

    def address(self, name: str) -> str:
        """Where a peer listens."""
        return self.HOST

    def surroundings(self, name: str) -> dict[str, str]:
        """Environment variables of a process by name, besides those that every process gets."""
        return {}

    def start(self, name: str, *command: str, environment: dict[str, str] | None = None) -> Process:
        inside, environment = self.inside(name), {**self.surroundings(name), **(environment or {})}
        process = Process(self.folder / f"{name}.log", *command, environment=environment, inside=inside)
        self.processes[name] = process
        return process

    def serve(self, port: int) -> None:
        """Start the coordinator (again)."""
        serve = self.start(
            "coordinator", "coordinator", "serve", "--home", self.home, "--listen", f"{self.HOST}:{port}", "--json"
        )
        self.serving = serve.first_json()

    def join(self, name: str, *flags: str, environment: dict[str, str] | None = None) -> Process:
        """A peer with a home of its own; the same name again is the same identity."""
        home = ("--home", str(self.folder / name), "--listen", f"{self.address(name)}:0", "--threads", "1")
        return self.start(name, "node", "join", self.link, *home, "--json", *flags, environment=environment)

    def anchor(self, name: str = "anchor", *, flags: tuple[str, ...] = ()) -> Process:
        """An anchor with a home of its own, by the link that `run create --anchor` printed."""
        home = ("--home", str(self.folder / name), "--listen", f"{self.address(name)}:0", "--threads", "1")
        return self.start(name, "node", "anchor", self.created["anchor"], *home, "--json", *flags)

    def operate(self, *command: str) -> dict[str, Any]:
        """One command of `swarmentum-coordinator`, and what it printed as JSON."""
        process = self.start("operate", "coordinator", *command, "--home", self.home, "--json")
        code, values = process.finish()
        assert code == 0, process.log.read_text()[-2000:]
        return values

    def steps(self, name: str) -> list[dict[str, Any]]:
        """What a peer wrote about its steps so far (whole lines)."""
        path = self.folder / name / "runs" / self.invite.run_id.hex()[:16] / "steps.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in whole_lines(path)]

    def warnings(self, name: str) -> list[str]:
        """The warnings in the log of a program of this swarm, with their reasons."""
        lines = whole_lines(self.folder / f"{name}.log")
        found = [json.loads(line) for line in lines if line.startswith("{") and "warning" in line]
        return [": ".join(filter(None, [line["event"], line.get("why")])) for line in found]

    def last_step(self, name: str) -> int:
        steps = self.steps(name)
        return int(steps[-1]["step"]) if steps else 0

    def wait_step(self, name: str, step: int, seconds: float = READY_SECONDS_MAX) -> None:
        """Until a peer has applied a step."""
        wait_for(f"step {step} of {name}", lambda: self.last_step(name) >= step, seconds)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Log lines of a process with this event."""
        lines = whole_lines(self.folder / f"{name}.log")
        values = [json.loads(line) for line in lines if line.startswith("{")]
        return [value for value in values if value.get("event") == event]

    def status(self) -> dict[str, Any]:
        status = self.start("status", "node", "status", self.link, "--json")
        code, values = status.finish()
        assert code == 0
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            if process.child.poll() is None:
                process.interrupt()
        for process in reversed(self.processes.values()):
            try:
                process.child.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            process.close()


def owner(swarm: LocalSwarm, name: str, command: str, *words: str, code: int = 0) -> dict[str, Any]:
    """What an owner's command prints."""
    process = swarm.start(f"{command}-{name}", "node", command, *words, "--home", str(swarm.folder / name), "--json")
    found, values = process.finish()
    assert found == code, process.log.read_text()[-2000:]
    return values


def digests_by_step(*peers: list[dict[str, Any]]) -> dict[int, set[str]]:
    """Every digest that was written for a step, by any peer."""
    found: dict[int, set[str]] = {}
    for steps in peers:
        for line in steps:
            found.setdefault(line["step"], set()).add(line["digest"])
    return found


def processes_with(text: str) -> list[str]:
    """Command lines of live processes that contain `text`."""
    lines = {it.pid: " ".join(it.info["cmdline"] or ()) for it in psutil.process_iter(["cmdline"])}
    return [line for pid, line in lines.items() if text in line and pid != os.getpid()]
