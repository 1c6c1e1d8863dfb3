"""A swarm on this machine, for programs and notebooks: `swarmentum.local`. Each part is the command that a user runs.

Refuses to let a process outlive the object, the interpreter, or a kill of it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import ValidationError

from node.commands.processes import ANCHOR, COORDINATOR, LOOPBACK, OFFLINE, RELAY, LocalProcesses, Processes
from node.commands.status import as_values
from node.link.run_reader import read_facts
from protos import toml_file
from protos.disk import temporary_folder
from protos.errors import NetworkError, OperatorError
from protos.invite import Invite
from protos.process import usable_cores
from protos.run_config import RunConfig
from swarmentum._reading import in_own_loop, verify

if TYPE_CHECKING:
    from node.archive.verify import Verification

PEERS_MAX = 32
SAMPLES_A_PEER = 16
POLL_SECONDS = 0.1
PAGE_SECONDS_MAX = 30.0
PAGE_READY = "the web page of the runs is ready"


class TimedOutError(NetworkError, TimeoutError):
    """A swarm did not get to a step in time."""


class Local:
    """A swarm on this machine. It ends with `close`, with a `with` block, with the object, and with the interpreter.

    Processes have names: `coordinator`, `relay`, `anchor`, `peer-0`, `peer-1` and so on. `folder` has a log and a home of each.
    """

    def __init__(
        self, peers: int, *, anchor: bool, run: Mapping[str, Any] | str | os.PathLike[str] | None, folder: Path | None
    ) -> None:
        if not 0 <= peers <= PEERS_MAX:
            raise OperatorError(
                f"peers={peers}: a swarm on one machine has 0 (for peers of your own) to {PEERS_MAX} peers"
            )
        config, self._flags = _config(run, peers), () if run is None else ("--allow-code", "--allow-data")
        self._left_out = () if run is None else ("--set", "allow=left_out")
        self._environment = OFFLINE if run is None else {}
        self._threads = max(1, usable_cores() // max(peers, 1))
        self.folder, remove = _folder(folder)
        logs = self.folder / "logs"
        logs.mkdir()
        self._processes = Processes(logs)
        self._here = LocalProcesses(self._processes, self.folder)
        self._close = weakref.finalize(self, _end, self._processes, remove, os.getpid())
        self._children: dict[str, Popen[str]] = {}
        self._keeper = ""  # of the archive
        try:
            self._start(config, peers, anchor)
        except BaseException:
            self.close()
            raise

    def _start(self, config: RunConfig, peers: int, anchor: bool) -> None:
        allow_code = ("--allow-code",) if config.model.factory is not None else ()
        created = self._here.create(
            self.folder / "run.toml", lambda relay: _toml(config, relay), *allow_code, anchor=anchor, page=LOOPBACK
        )
        self.link: str = created["invite"]
        """The invite link. `swarmentum join` and `swarmentum.join` take it on this machine."""
        self._invite = Invite.parse(self.link)
        if anchor:
            self._children[ANCHOR] = self._here.anchor(created["anchor"], *self._flags, environment=self._environment)
        for _ in range(peers):
            self.add_peer()

    # ---- what is there -----------------------------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the peers whose processes run. An anchor is none of them."""
        return tuple(name for name, child in self._children.items() if name != ANCHOR and child.poll() is None)

    @property
    def page(self) -> str:
        """The URL of the web page of the run, which only this machine reaches. Raises NetworkError if it does not come up."""
        log = self.folder / "logs" / f"{COORDINATOR}.log"
        until = time.monotonic() + PAGE_SECONDS_MAX
        while time.monotonic() < until:
            self._check()
            for line in log.read_text().splitlines():
                if PAGE_READY in line and line.startswith("{"):
                    return str(json.loads(line)["url"])
            time.sleep(POLL_SECONDS)
        raise NetworkError(
            f"the coordinator served no page within {PAGE_SECONDS_MAX:.0f} s. The end of its log:\n"
            f"{self._processes.last_words(COORDINATOR)}"
        )

    def status(self) -> dict[str, Any]:
        """The facts of the run now, as `swarmentum status --json` prints them. Raises NetworkError."""
        self._check_open()
        facts, config = in_own_loop(read_facts(self._invite))
        return as_values(facts, config, self._invite.run_id)

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The steps that a peer or the anchor has applied: `step`, `loss`, `digest` and more of each, the oldest first."""
        self._named(name)
        return self._here.steps(name, self._invite.run_id)

    # ---- what can be done --------------------------------------------------------------------------------------------

    def add_peer(self, name: str = "") -> str:
        """Start one more peer, and return its name. The name of a killed peer: that identity comes back with its momentum."""
        self._check_open()
        name = name or next(free for n in range(PEERS_MAX + 1) if (free := f"peer-{n}") not in self._children)
        if (
            name in (ANCHOR, COORDINATOR, RELAY, "create", "logs")
            or not name.replace("-", "").replace("_", "").isalnum()
        ):
            raise OperatorError(f"{name!r} is no name for a peer: use letters, digits, - and _, such as 'ada'")
        if name in self._children and self._children[name].poll() is None:
            raise OperatorError(f"{name} runs already: kill it first, or choose another name")
        self._keeper = self._keeper or name
        archive = ("--set", "archive=true") if name == self._keeper else ()
        flags = (*self._flags, *self._left_out, *archive)
        self._children[name] = self._here.join(name, self.link, self._threads, *flags, environment=self._environment)
        return name

    def kill(self, name: str) -> None:
        """Kill a peer or the anchor with SIGKILL: it says no goodbye, as a machine that loses its power."""
        self._check_open()
        self._processes.kill(self._named(name))

    def wait(self, step: int | None = None, timeout: float | None = None) -> None:
        """Wait until each running peer has applied `step`; without a step, until all have finished the run.

        Raises TimeoutError after `timeout` seconds. Raises the error of a process that fails meanwhile, with its log's words.
        """
        self._check_open()
        until = None if timeout is None else time.monotonic() + timeout
        while not self._reached(step):
            self._check()
            if until is not None and time.monotonic() >= until:
                wanted = "the end of the run" if step is None else f"step {step}"
                raise TimedOutError(f"{wanted} was not reached within {timeout:g} s: {self._where()}")
            time.sleep(POLL_SECONDS)

    def verify(self) -> Verification:
        """Replay the archive that the first peer keeps, as `swarmentum.verify` does, up to its last whole step."""
        self._check_open()
        if not self._keeper:
            raise OperatorError("no peer of this swarm keeps an archive: it was started with peers=0")
        kept = self._here.run_folder(self._keeper, self._invite.run_id) / "archive"
        if not kept.is_dir():
            raise OperatorError("the archive has no step yet: call wait(1) first")
        made, remove = temporary_folder("swarmentum-verify-")
        try:
            shutil.copytree(kept, made / "archive")  # does not grow while it is read
            return verify(made / "archive", run_id=self._invite.run_id.hex())
        finally:
            remove()

    def close(self) -> None:
        """End all processes. A folder that nobody named is removed. Does nothing the second time."""
        self._close()

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._close.alive:
            return "<swarmentum.Local: closed>"
        return f"<swarmentum.Local: run {self._invite.run_id.hex()[:16]}, {', '.join(self.peers) or 'no peers'}, {self.folder}>"

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._close.alive:
            raise OperatorError("this swarm is closed: call swarmentum.local again")

    def _check(self) -> None:
        """Raises the error of a process that failed, or OperatorError if no peer is left."""
        self._check_open()
        if ended := self._processes.ended():
            raise self._processes.failure(ended[0])

    def _named(self, name: str) -> Popen[str]:
        if name not in self._children:
            raise OperatorError(f"there is no {name!r} in this swarm; it has {', '.join(self._children)}")
        return self._children[name]

    def _reached(self, step: int | None) -> bool:
        alive = self.peers
        if step is None:
            return not alive and any(child.returncode == 0 for child in self._children.values())
        if not alive and all(child.returncode != 0 for name, child in self._children.items() if name != ANCHOR):
            self._check()  # a peer that failed says why
            raise OperatorError(f"no peer runs, so step {step} cannot come: call add_peer")
        ended = [name for name, child in self._children.items() if name != ANCHOR and child.poll() == 0]
        if ended and (last := max(self._last(name) for name in ended)) < step:
            raise OperatorError(f"the run ended at step {last}, before step {step}")
        return all(self._last(name) >= step for name in alive)

    def _last(self, name: str) -> int:
        return self._here.last_step(name, self._invite.run_id)

    def _where(self) -> str:
        peers = ", ".join(f"{name} is at step {self._last(name)}" for name in self._children)
        try:
            facts = self.status()
        except NetworkError as error:
            return f"{peers}; the coordinator does not answer: {error}"
        return f"{peers}; the run is {facts['phase']}: {facts['reason']}"


def local(
    peers: int = 3,
    anchor: bool = False,
    run: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Local:
    """Start a swarm on this machine, and return while it trains.

    `run`: the settings of run.toml as a dict by section, or the path of such a file. Without it a small Llama learns from
    Python's standard library. Code and files that `run` names count as agreed to. `anchor`: start an anchor, too. `folder`: an
    empty folder for homes and logs, which stays; otherwise a temporary one. Raises OperatorError for wrong settings.
    """
    return Local(peers, anchor=anchor, run=run, folder=None if folder is None else Path(folder))


def _config(run: Mapping[str, Any] | str | os.PathLike[str] | None, peers: int) -> RunConfig:
    if run is None:
        clock = {"min_peers": max(1, min(2, peers)), "batch_samples": SAMPLES_A_PEER * max(peers, 1)}
        run = {"name": "local", "clock": clock}
    if not isinstance(run, Mapping):
        return toml_file.load(Path(run), RunConfig)
    try:
        config = RunConfig.model_validate(run)
    except ValidationError as error:
        raise OperatorError(f"run has wrong settings:\n{toml_file.describe(error)}") from error
    if name := _untold(config.model_dump(mode="json", exclude_unset=True, exclude_none=True), ""):
        raise OperatorError(f"run has {name} = None, which a run file cannot say: leave the key out")
    return config


def _toml(config: RunConfig, relay: str) -> str:
    """The settings that were given, with the relay as one more place to start from."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    overlay = values.setdefault("overlay", {})
    overlay["bootstrap"] = [*overlay.get("bootstrap", []), relay]
    return tomli_w.dumps(values)


def _untold(value: Any, name: str) -> str:
    """The name of the first None in a tree; empty if there is none."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, it in items if (found := _untold(it, f"{name}.{key}".lstrip(".")))), "")
    return name if value is None else ""


def _folder(folder: Path | None) -> tuple[Path, Callable[[], None]]:
    """The folder, and what removes it if nobody named it."""
    if folder is None:
        return temporary_folder("swarmentum-local-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorError(f"folder={str(folder)!r}: cannot be made: {error.strerror}") from error
    if any(folder.iterdir()):
        raise OperatorError(f"folder={str(folder)!r}: the folder is not empty; choose another one")
    return folder.resolve(), lambda: None


def _end(processes: Processes, remove: Callable[[], None], owner: int) -> None:
    """End what was started. A process that was forked from the owner ends nothing."""
    if os.getpid() != owner:
        return
    processes.close()
    remove()
