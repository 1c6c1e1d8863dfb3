"""Memory and time a step of each size and mode of memory: two real peers and a coordinator, and what the planner says.

Each row is a swarm of processes of its own. `peak_bytes_per_param` is the larger peer's peak above a peer of a tiny model,
which has loaded the same libraries and compiled the same kernels. `planned_bytes_per_param` is
what `join` plans with (node/admission/fit.py).
"""

import argparse
import os
import statistics
import tempfile
import threading
import tomllib
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pynvml
import torch

from node.admission import fit
from node.config import PeerSettings
from protos.run_config import RunConfig
from tests.bench import loop
from tests.system.local_swarm import TINY_MODEL, LocalSwarm

MODES: Final = ("full", "small", "host", "stream")
WAIT_SECONDS_MAX: Final = 1800.0
LOOK_SECONDS: Final = 0.02


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, nargs="+", default=[25_000_000], help="sizes, about (default 25 million)")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES), help="`memory` of both peers")
    parser.add_argument("--micro-batch", type=int, default=8, help="of both peers, at most a step's 4 (default 8)")
    parser.add_argument("--every", type=int, default=8, help="steps from one snapshot to the next (default 8)")
    parser.add_argument(
        "--device", default="cpu", help="of both peers, such as cuda:0: the peak is the card's (default cpu)"
    )
    parser.add_argument("--snapshots", type=int, default=2, help="snapshots within the measured steps (default 2)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    for mode in options.modes:  # the first peer of a machine compiles the kernels, which takes memory, and keeps them
        _peak(mode, TINY_MODEL, options)
    empty = {mode: _peak(mode, TINY_MODEL, options)["peak_bytes"] for mode in options.modes}
    rows = [_row(count, mode, empty[mode], options) for count in options.params for mode in options.modes]
    return {"rows": rows, "empty_bytes": empty, "cores": os.cpu_count()}


def _row(count: int, mode: str, empty: int, options: argparse.Namespace) -> dict[str, Any]:
    model, parameters = loop.model_of(count)
    found = _peak(mode, model, options)
    above = (found["peak_bytes"] - empty) / parameters
    text = found.pop("run_toml")
    planned = planned_bytes(mode, text, options.device, options.micro_batch) / parameters
    return {
        "params": parameters,
        "mode": mode,
        "peak_bytes_per_param": round(above, 2),
        "planned_bytes_per_param": round(planned, 2),
        "planned_over_peak": round(planned / above, 3),
        **found,
    }


def planned_bytes(mode: str, run_toml: str, device: str, micro_batch: int = 8) -> float:
    """Bytes that the planner counts for a peer on a device: of a CPU, with copies for the disk."""
    config = RunConfig.model_validate(tomllib.loads(run_toml))
    own = {"memory": mode, "micro_batch": micro_batch}
    settings = PeerSettings.model_construct(**{**PeerSettings.model_construct().model_dump(), **own})
    model = fit.counted(config, settings)
    assert model is not None, "a Llama can be counted"
    need = model.need(config, memory=fit.memories_of(config, settings, torch.device(device))[0]).on(device)
    return need.memory(min(settings.micro_batch, config.clock.batch_samples))


def _peak(mode: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The larger peak of two peers that made some steps, snapshots and saved momenta; median seconds of a plain step."""
    card = Card(options.device) if options.device.startswith("cuda") else None
    own = {"MEMORY": mode, "DEVICE": options.device, "MICRO_BATCH": str(options.micro_batch)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalSwarm(folder, loop.run_toml(model, loop.text_in(folder), options.every, len(loop.PEERS))) as swarm:
            for peer in loop.PEERS:
                swarm.join(peer, environment={f"SWARMENTUM_{name}": value for name, value in own.items()})
            last = options.every * (options.snapshots + 1) - 1  # the momentum after the last snapshot is saved
            for peer in loop.PEERS:
                swarm.wait_step(peer, last, WAIT_SECONDS_MAX)
            main = max(loop.peak_bytes(swarm.processes[peer].child.pid) for peer in loop.PEERS)
            pids = [pid for peer in loop.PEERS for pid in loop.processes_of(swarm.processes[peer].child.pid)]
            peak = main if card is None else card.stop(pids)
            seconds = _plain_steps(swarm, options.every, last)
            left_out = sum(loop.left_out(swarm, peer) for peer in loop.PEERS)
            text = (folder / "run.toml").read_text()
    found = {"peak_bytes": peak, "main_bytes": main, "step_s": seconds, "snapshots_left_out": left_out}
    return {**found, "run_toml": text}


def _plain_steps(swarm: LocalSwarm, every: int, last: int) -> float:
    plain = []
    for peer in loop.PEERS:
        times = loop.times_of(swarm, peer)
        for before, step in pairwise(range(loop.WARM_UP_STEPS, last + 1)):
            if before % every and (before + every // 2) % every:
                plain.append(times[step] - times[before])
    return round(statistics.median(plain), 3)


class Card:
    """Watches how much of a card's memory each process has."""

    def __init__(self, device: str) -> None:
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(torch.device(device).index or 0)
        self._peaks: dict[int, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            for found in pynvml.nvmlDeviceGetComputeRunningProcesses(self._card):
                self._peaks[found.pid] = max(self._peaks.get(found.pid, 0), found.usedGpuMemory or 0)

    def stop(self, pids: Collection[int]) -> int:
        """The most bytes that one of these processes had."""
        self._stopped.set()
        self._thread.join()
        return max((self._peaks.get(pid, 0) for pid in pids), default=0)
