"""The rivals: how the processes of each are started, what they wrote so far, when they are through, and the final model.

`WorkerRival` runs `worker.py` for each peer, `SwarmRival` the commands that a user of this project has. Adding a rival adds
an entry to `RIVALS`.
"""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from node.imports import no_progress_bar
from tests.bench.race import gloo_rivals, hivemind_rivals
from tests.bench.race.curves import Line
from tests.bench.race.task import ADAMW_BETAS, CONTEXT, WEIGHTS, Task
from tests.system.local_swarm import Process
from tests.system.netns import Internet
from tests.system.spread_swarm import SpreadSwarm

OTHERS_SECONDS_MAX: Final = 20.0
"""What rivals without lockstep get to end once rank 0 has."""
LAST_WORDS_CHARACTERS: Final = 600


class RivalError(Exception):
    """A rival ended before its time; the text has its last words."""


class Course(Protocol):
    """A rival that runs."""

    def lines(self) -> Sequence[Sequence[Line]]:
        """What each peer wrote so far; what all share is written once."""

    def through(self) -> bool:
        """Whether all have ended as they should. RivalError if one ended otherwise."""

    def model(self) -> nn.Module:
        """The final one."""

    def close(self) -> None:
        """End its processes."""


@dataclass(frozen=True)
class Rival:
    """An entry of the race."""

    title: str
    start: Callable[[Task, Internet], Course]
    settings: Mapping[str, Any]
    why: str
    """Where the settings come from."""


def names(task: Task) -> list[str]:
    """The places of the peers."""
    return [f"peer{rank}" for rank in range(task.peers)]


class WorkerRival:
    """`worker.py` in each namespace."""

    def __init__(self, name: str, task: Task, internet: Internet) -> None:
        self._task, self._folder = task, Path(task.folder)
        self._rank_0_ended: float | None = None
        self._processes: list[Process] = []
        file, first = task.write(), internet.public[names(task)[0]]
        try:
            for rank, place in enumerate(names(task)):
                words = (name, str(file), str(rank), internet.public[place], first)
                command = ("tests.bench.race.worker", *words)
                log = self._folder / f"{place}.log"
                self._processes.append(Process(log, *command, inside=internet.inside(place)))
        except BaseException:
            self.close()
            raise

    def lines(self) -> list[list[Line]]:
        return [read_lines(self._folder / f"{rank}.jsonl") for rank in range(self._task.peers)]

    def through(self) -> bool:
        codes = [process.child.poll() for process in self._processes]
        if codes[0] == 0 and self._rank_0_ended is None:
            self._rank_0_ended = time.monotonic()
        for place, code in zip(names(self._task), codes, strict=True):
            # what others that are not in lockstep do after rank 0 has left the weights is not counted
            if code and codes[0] != 0:
                raise RivalError(f"{place} ended with exit code {code}: {last_words(self._folder / f'{place}.log')}")
        patient = self._rank_0_ended is not None and time.monotonic() - self._rank_0_ended > OTHERS_SECONDS_MAX
        return patient or None not in codes

    def model(self) -> nn.Module:
        model = self._task.model()
        model.load_state_dict(torch.load(self._folder / WEIGHTS, weights_only=True))
        return model

    def close(self) -> None:
        for process in self._processes:
            process.close()


SWARM: Final = """
name = "race"
seed = {seed}
[model.config]
{model}
[data]
source = {data}
context = {context}
[optimizer]
{optimizer}
[clock]
steps = {steps}
batch_samples = {pool}
min_peers = {peers}
[overlay]
bootstrap = [BOOTSTRAP]
"""


class SwarmRival:
    """Coordinator and relay at a place without a limit, a peer in each namespace; all as a user starts them."""

    def __init__(self, optimizer: str, task: Task, internet: Internet) -> None:
        self._task, self._folder, self._seen = task, Path(task.folder), list[Line]()
        config = {key: value for key, value in task.config().items() if value is not None}
        run = SWARM.format(
            seed=task.seed,
            model="\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items()),
            data=json.dumps(task.data or "stdlib"),
            context=CONTEXT,
            optimizer=optimizer,
            steps=task.steps,
            pool=task.batch * task.peers,
            peers=task.peers,
        )
        self._swarm = SpreadSwarm(self._folder, run, internet)
        self._stopped = False
        try:
            for place in names(task):
                export = ("--export", str(self._folder / "model")) if place == names(task)[0] else ()
                self._swarm.join(place, *export)
        except BaseException:
            self._swarm.close()
            raise

    def lines(self) -> list[list[Line]]:
        """An entry has the mean loss of all peers' own samples, so that one peer's record is enough."""
        now = time.monotonic()
        for step in self._swarm.steps(names(self._task)[0])[len(self._seen) :]:
            self._seen.append(Line(step["step"], step["loss"], step["tokens"] // CONTEXT, now))
        if not self._stopped and self._seen and now - self._seen[0].at > self._task.seconds:
            self._stopped = True
            for place in names(self._task):
                self._swarm.processes[place].interrupt()
        return [self._seen]

    def through(self) -> bool:
        codes = {place: self._swarm.processes[place].child.poll() for place in names(self._task)}
        for place, code in codes.items():
            if code and not (self._stopped and code in (130, -signal.SIGINT)):
                raise RivalError(f"{place} ended with exit code {code}: {last_words(self._folder / f'{place}.log')}")
        return None not in codes.values()

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        with no_progress_bar():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(self._folder / "model", dtype=torch.float32)
        return model

    def close(self) -> None:
        self._swarm.close()


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a peer."""
    text = path.read_text() if path.exists() else ""
    return [Line(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_words(log: Path) -> str:
    """The end of a process's log."""
    return log.read_text(errors="replace")[-LAST_WORDS_CHARACTERS:].strip() if log.exists() else "it wrote nothing"


def _worker(name: str) -> Callable[[Task, Internet], Course]:
    return lambda task, internet: WorkerRival(name, task, internet)


def _swarm(optimizer: str) -> Callable[[Task, Internet], Course]:
    return lambda task, internet: SwarmRival(optimizer, task, internet)


ADAMW: Final = {"optimizer": "AdamW", "betas": ADAMW_BETAS, "weight_decay": 0.0, "clip_norm": 1.0}
HIVEMIND: Final = {
    **ADAMW,
    "lr": hivemind_rivals.LR,
    "compression": "fp16",
    "matchmaking_time": hivemind_rivals.MATCHMAKING_SECONDS,
    "all_begin_together": True,
}
AVERAGING: Final = {
    **HIVEMIND,
    "average_state_every": hivemind_rivals.STATE_EPOCHS,
    "tracker": hivemind_rivals.TRACKER,
    "waits_for_others": True,
}
MUON: Final = 'lr = 4e-3\ngroup_size = 16\nbase = { name = "muon" }'
RIVALS: Final[Mapping[str, Rival]] = {
    "swarm": Rival("Swarmentum, default", _swarm(""), {}, "every setting is a run's default"),
    "swarm-muon": Rival(
        "Swarmentum, Muon, g = 16", _swarm(MUON), {"lr": 4e-3, "group_size": 16, "base": "muon"},
        "docs/benchmarks.md: the rate that was best on this text",
    ),
    "ddp": Rival(
        "DDP, AdamW, gloo", _worker("ddp"), {**ADAMW, "lr": gloo_rivals.DDP_LR},
        "DDP's defaults; rate and betas the best of the grid in docs/benchmarks.md",
    ),
    "diloco": Rival(
        "DiLoCo, gloo", _worker("diloco"),
        {**ADAMW, "lr": gloo_rivals.DILOCO_LR, "outer": "SGD", "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
        "arXiv 2311.08105: Nesterov SGD 0.7 / 0.9 outside; rounds scaled to a short run; inner rate from docs/benchmarks.md",
    ),
    "hivemind": Rival(
        "hivemind.Optimizer, each step", _worker("hivemind"), AVERAGING,
        "hivemind's configuration guide, quick start and albert example; offloaded optimizer, gradients averaged",
    ),
    "hivemind-local": Rival(
        "hivemind.Optimizer, local steps", _worker("hivemind-local"), {**HIVEMIND, "use_local_updates": True},
        "hivemind's quick start: local updates, parameters averaged in the background",
    ),
}  # fmt: skip
