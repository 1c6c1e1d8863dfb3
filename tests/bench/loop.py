"""Two real peers over a real coordinator on loopback: what a snapshot costs the step after it, and a late joiner's time.

Each size of `--params` is a swarm of processes of its own. Times are differences of the peers' own log times, so what is
compared comes from one run. A row with a tiny model and 4 peers says how many steps a second the loop itself allows.
"""

import argparse
import os
import statistics
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.system.local_swarm import TINY_MODEL, LocalSwarm, wait_for

WIDTHS = (256, 512, 768, 1024, 1536, 2048)
LAYERS_MAX = 16
WAIT_SECONDS_MAX = 900.0
PEERS = ("ada", "bob")
TINY_PEERS = ("ada", "bob", "cyd", "dan")
TINY_EVERY = 25
WARM_UP_STEPS = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, nargs="+", default=[25_000_000], help="sizes, about (default 25 million)")
    parser.add_argument("--every", type=int, default=8, help="steps from one snapshot to the next (default 8)")
    parser.add_argument("--snapshots", type=int, default=4, help="snapshots to look at (default 4)")
    parser.add_argument(
        "--tiny-steps", type=int, default=100, help="steps of the tiny model, 0: no such row (default 100)"
    )
    parser.add_argument(
        "--memory", choices=("full", "small", "host", "stream"), default="full", help="of both peers (default full)"
    )
    parser.add_argument("--no-join", action="store_true", help="without a late joiner")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = [_size(count, options) for count in options.params]
    found: dict[str, Any] = {"sizes": rows, "cores": os.cpu_count()}
    if options.tiny_steps:
        found["tiny"] = _tiny(options.tiny_steps)
    return found


def model_of(count: int) -> tuple[str, int]:
    """A Llama of about `count` parameters as `[model.config]`, and how many it has."""
    fits = [(abs(_parameters(w, n) - count), w, n) for w in WIDTHS for n in range(1, LAYERS_MAX + 1)]
    _, width, layers = min(fits)
    text = f"""
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = {width}
num_hidden_layers = {layers}
num_attention_heads = {width // 64}
num_key_value_heads = {width // 64}
intermediate_size = {_inner(width)}
max_position_embeddings = 64
tie_word_embeddings = true
"""
    return text, _parameters(width, layers)


def _inner(width: int) -> int:
    return width * 8 // 3 // 64 * 64


def _parameters(width: int, layers: int) -> int:
    return layers * (4 * width**2 + 3 * width * _inner(width) + 2 * width) + 257 * width


def run_toml(model: str, text: Path, every: int, peers: int) -> str:
    return f"""
name = "bench-loop"
{model}
[data]
source = "{text}"
context = 32
[clock]
steps = 100000
batch_samples = {2 * peers}
min_peers = {peers}
snapshot_every = {every}
[overlay]
bootstrap = [BOOTSTRAP]
"""


def text_in(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    return text


def _size(count: int, options: argparse.Namespace) -> dict[str, Any]:
    model, parameters = model_of(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with LocalSwarm(folder, run_toml(model, text_in(folder), options.every, len(PEERS))) as swarm:
            for peer in PEERS:
                swarm.join(peer, environment={"SWARMENTUM_MEMORY": options.memory})
            last = (
                options.every * (options.snapshots + 2) - 1
            )  # the last snapshot is on the disk, the next is not begun
            for peer in PEERS:
                swarm.wait_step(peer, last, WAIT_SECONDS_MAX)
            row: dict[str, Any] = {"params": parameters, **_steps(swarm, options.every, last)}
            row |= _memory_and_disk(swarm, parameters)
            if not options.no_join:
                row |= _join(swarm, row["step_s_median"])
    return row


def times_of(swarm: LocalSwarm, peer: str) -> dict[int, float]:
    """When a peer had applied each step, in seconds."""
    return {e["step"]: _seconds(e) for e in swarm.events(peer, "step")}


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _steps(swarm: LocalSwarm, every: int, last: int) -> dict[str, Any]:
    """Seconds from a state to the next: after a snapshot's step, after one where the momentum is saved, and after any other."""
    plain, after, saved = [], [], []
    for peer in PEERS:
        times = times_of(swarm, peer)
        for before, step in pairwise(range(WARM_UP_STEPS, last + 1)):
            kind = after if before % every == 0 else saved if (before + every // 2) % every == 0 else plain
            kind.append(times[step] - times[before])
    plain_s, after_s = statistics.median(plain), statistics.median(after)
    waits = sum(len(swarm.events(peer, "waiting")) for peer in PEERS)
    return {
        "step_s_median": round(plain_s, 3),
        "step_s_p90": round(statistics.quantiles(plain, n=10)[-1], 3),
        "step_s_after_snapshot_median": round(after_s, 3),
        "step_s_after_snapshot_max": round(max(after), 3),
        "ratio_after_snapshot": round(after_s / plain_s, 3),
        "ratio_after_momentum": round(statistics.median(saved) / plain_s, 3),
        "steps_after_snapshots": len(after),
        "waiting_notices": waits,
        "snapshots_left_out": sum(left_out(swarm, peer) for peer in PEERS),
    }


def left_out(swarm: LocalSwarm, peer: str) -> int:
    """Snapshots that a peer did not write, because its disk was slower: they cost no time, so a ratio alone would flatter."""
    return swarm.processes[peer].log.read_text().count("leaving this snapshot out")


def _memory_and_disk(swarm: LocalSwarm, parameters: int) -> dict[str, Any]:
    """The largest of the peers: the most resident memory so far, and what it keeps but payloads."""
    peaks, disks = [], []
    for peer in PEERS:
        peaks.append(peak_bytes(swarm.processes[peer].child.pid))
        home = next((swarm.folder / peer / "runs").iterdir())
        kept = [path for path in home.rglob("*") if path.is_file() and path.parent.name != "payloads"]
        disks.append(sum(path.stat().st_size for path in kept))
    return {
        "peak_bytes": max(peaks),
        "peak_bytes_per_param": round(max(peaks) / parameters, 2),
        "disk_bytes_per_param": round(max(disks) / parameters, 2),
    }


def peak_bytes(pid: int) -> int:
    """Of the command, which the guard is the parent of, or is."""
    return max(processes_of(pid).values(), default=0)


def processes_of(pid: int) -> dict[int, int]:
    """A process and its children -> the most memory that each had."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if pid in (int(fields["Pid"]), int(fields["PPid"])):
            found[int(fields["Pid"])] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    return found


def _join(swarm: LocalSwarm, step_s: float) -> dict[str, Any]:
    """A peer that comes late: from its first byte of the state to the step in which it takes part."""
    swarm.join("late")

    def took_part() -> list[dict[str, Any]]:
        late = swarm.processes["late"]
        assert late.child.poll() is None, late.log.read_text()[-2000:]
        return swarm.events("late", "taking part")

    part = _seconds(wait_for("step of the late joiner", took_part, WAIT_SECONDS_MAX)[0])
    begun = _seconds(swarm.events("late", "loading snapshot")[0])
    started = _seconds(swarm.events("late", "run found")[0])
    meanwhile = [t for t in times_of(swarm, PEERS[0]).values() if begun <= t <= part]
    between = [b - a for a, b in pairwise(sorted(meanwhile))]
    return {
        "join_s": round(part - begun, 2),
        "join_with_build_s": round(part - started, 2),
        "join_steps_replayed": len(swarm.events("late", "step")),
        "ratio_step_while_joining": round(statistics.median(between) / step_s, 2) if between else None,
    }


def _tiny(steps: int) -> dict[str, Any]:
    """Steps a second of 4 peers, where computing is next to nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = run_toml(TINY_MODEL.replace("64", "32", 1), text_in(folder), TINY_EVERY, len(TINY_PEERS))
        with LocalSwarm(folder, run) as swarm:
            for peer in TINY_PEERS:
                swarm.join(peer)
            for peer in TINY_PEERS:
                swarm.wait_step(peer, TINY_EVERY + steps, WAIT_SECONDS_MAX)
            times = times_of(swarm, TINY_PEERS[0])
    seconds = times[TINY_EVERY + steps] - times[TINY_EVERY]
    return {"peers": len(TINY_PEERS), "steps": steps, "steps_per_second": round(steps / seconds, 2)}
