"""One coordinator with many peers: CPU and bytes a step, and the time from the last needed report to the entry.

`swarmentum-coordinator serve` runs in a process of its own, its peers in others (tests/bench/crowd.py): real gRPC over TLS,
each peer with its own identity, connection and session, each stream's first report signed (ADR 57). A step has two reports a
peer, as in steps that take less than the 0.3 s for which a digest waits (node/swarm/outbox.py): its announcement with the
digest of its last state, and that it holds all payloads. CPU and bytes are those of steps in which all tell at once. The
clock's overhead is measured in the steps between those: all but the deciding report are in, then that one is sent, and each
peer notes when the entry comes.
All peers have one network address here, so the coordinator's limit on joins from one address is lifted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protos.calls import fetch_certificate
from protos.identity import Identity
from protos.invite import Invite
from tests.bench.crowd import seed_of, serve_commands

HERTZ = os.sysconf("SC_CLK_TCK")
STOP_SECONDS_MAX = 20
LIFTED = (
    "import coordinator.serving.sessions as s; s.ADDRESS_CHALLENGES_MAX = 10**6; s.ADDRESS_CHALLENGE_MS = 1\n"
    "import coordinator.serving.call_limits as p; from dataclasses import replace\n"
    "p.LIMITS = {k: replace(v, burst=10**6) for k, v in p.LIMITS.items()}\n"
    "from coordinator.__main__ import app; app()"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=9, help="the first is not counted")
    parser.add_argument("--processes", type=int, default=2, help="that the peers are spread over")
    parser.add_argument("--aggregators", type=int, default=0, help="clock.aggregators: three of the peers add votes up")
    parser.add_argument("--three-reports", action="store_true", help="digests are told in reports of their own")
    parser.add_argument("--profile", type=Path, default=None, help="cProfile statistics of the coordinator, for pstats")
    parser.add_argument("--join-only", action="store_true", help="only how many are admitted")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    clock = (
        f"steps = 100000\nmin_peers = {options.peers}\nmax_peers = {options.peers}\n"
        f"batch_samples = {max(options.peers, 64)}\ndeadline_ms_min = 3000000\ndeadline_ms_max = 3000000\n"
        "snapshot_every = 1000000\n"
    )
    if options.aggregators:
        listed = [Identity.from_seed(seed_of(number)).peer_id for number in range(options.peers)]
        clock += f'aggregators = {options.aggregators}\n[optimizer]\nselection = "random"\none_in = 16\n'
        clock += f'[admission]\nmode = "allow_list"\nallowed = {json.dumps(listed)}\n'
    serving = coordinator_serving(clock, profile=options.profile)
    with serving as (served, invite), _crowds(options, invite) as crowds:
        watch = Watch(served.pid, int(invite.coordinators[0].rpartition(":")[2]))
        cpu = watch.cpu()
        joined = crowds.all("join")
        found = {
            "peers": options.peers,
            "admitted": sum(it["admitted"] for it in joined),
            "join_cpu_s": round(watch.cpu() - cpu, 2),
            "rss_joined_mb": watch.rss_mb(),
        }
        if found["admitted"] < options.peers:
            found["refused"] = [why for it in joined for why in it["refused"]][:2]
        if options.join_only or "refused" in found:
            return found
        crowds.all("ready")
        steps = [
            _step(number, crowds, watch, options.peers, options.three_reports, bool(options.aggregators))
            for number in range(1, options.steps + 1)
        ][1:]
        idle = watch.cpu()
        time.sleep(2)
        natural = [step for step in steps if step["natural"]]
        kept_back = [step for step in steps if not step["natural"]]
        lags = [lag for step in kept_back for lag in step["lags_ms"]]
        if kept_back:  # a step with aggregators has no last report that decides
            first = statistics.median(min(step["lags_ms"]) for step in kept_back)
            found |= {
                "clock_overhead_ms_p50": round(statistics.median(lags), 1),
                "clock_overhead_ms_first": round(first, 1),
                "clock_overhead_ms_p99": round(_quantile(lags, 0.99), 1),
            }
        return found | {
            "coordinator_cpu_ms_step": round(statistics.fmean(step["cpu_ms"] for step in natural), 1),
            "all_at_once_ms_p50": round(statistics.median(lag for step in natural for lag in step["lags_ms"]), 1),
            "bytes_in_step": round(statistics.fmean(step["bytes_in"] for step in natural)),
            "bytes_out_step": round(statistics.fmean(step["bytes_out"] for step in natural)),
            "tick_bytes": steps[-1]["sizes"]["tick"],
            "entry_bytes": steps[-1]["sizes"]["entry"],
            "decided_bytes_sent": steps[-1]["sizes"]["sent"],
            "rss_mb": watch.rss_mb(),
            "rss_peak_mb": watch.rss_mb("VmHWM"),
            "idle_cpu_percent": round(50 * (watch.cpu() - idle), 1),
            "refusals": sum(step["refusals"] for step in steps),
            "load": round(os.getloadavg()[0], 1),
        }


def _step(number: int, crowds: Crowds, watch: Watch, peers: int, three_reports: bool, summed: bool) -> dict[str, Any]:
    """One step; of an odd one all tell at once what they hold, of an even one the last is kept back."""
    natural, enough = summed or number % 2 == 1, peers // 2  # one less than a quorum of more than half
    [sizes, *_] = [it["sizes"] for it in crowds.all("tick", number)]
    before = watch.cpu(), watch.sockets()
    said = crowds.all("announce")
    if natural:
        crowds.send("hold", 0, peers)
        told = crowds.answers()
        since = min(it["began_at"] for it in told)
    else:
        said += crowds.all("hold", 0, enough)
        told = crowds.all("hold", enough, enough + 1)
        since = next(it["began_at"] for crowd, it in zip(crowds.numbers, told, strict=True) if enough in crowd)
    entries = crowds.all("entry")
    if three_reports:
        said += crowds.all("applied", number)
    after = watch.cpu(), watch.sockets()
    refused = [it for it in (*told, *said) if it["refusals"]]
    return {
        "natural": natural,
        "cpu_ms": 1000 * (after[0] - before[0]),
        "bytes_in": after[1][0] - before[1][0],
        "bytes_out": after[1][1] - before[1][1],
        "lags_ms": [1000 * (at - since) for it in entries for at in it["at"]],
        "sizes": sizes,
        "refusals": sum(it["refusals"] for it in refused),
    }


class Watch:
    """What a process takes, as the kernel counts."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port

    def cpu(self) -> float:
        """Seconds, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / HERTZ

    def rss_mb(self, name: str = "VmRSS") -> float:
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return round(int(found[1]) / 1024, 1)

    def sockets(self) -> tuple[int, int]:
        """(bytes that came in, bytes that went out) over all open connections."""
        told = subprocess.run(
            ["ss", "-tinH", f"sport = :{self.port}"], capture_output=True, text=True, check=True
        ).stdout
        came, went = (sum(map(int, re.findall(rf"{name}:(\d+)", told))) for name in ("bytes_received", "bytes_acked"))
        return came, went


class Crowds:
    """All processes of peers, told the same."""

    def __init__(self, pipes: list[Any], numbers: list[range]) -> None:
        self._pipes, self.numbers = pipes, numbers

    def send(self, name: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((name, *arguments))

    def answers(self) -> list[dict[str, Any]]:
        found = [pipe.recv() for pipe in self._pipes]
        for it in found:
            if "failed" in it:
                raise SystemExit(it["failed"])
        return found

    def all(self, name: str, *arguments: Any) -> list[dict[str, Any]]:
        self.send(name, *arguments)
        return self.answers()


@contextmanager
def _crowds(options: argparse.Namespace, invite: Invite) -> Iterator[Crowds]:
    spawn, count = multiprocessing.get_context("spawn"), min(options.processes, options.peers)
    pem = fetch_certificate(invite.coordinators[0], invite.certificate_sha256)
    numbers = [range(at * options.peers // count, (at + 1) * options.peers // count) for at in range(count)]
    pipes, processes = [], []
    for some in numbers:
        ours, theirs = spawn.Pipe()
        given = theirs, some, invite.coordinators[0], pem, invite.run_id, not options.three_reports
        processes.append(spawn.Process(target=serve_commands, args=given, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        yield Crowds(pipes, numbers)
    finally:
        for process in processes:
            process.kill()  # thousands of channels would take their time to close
            process.join()


@contextmanager
def coordinator_serving(
    clock: str, *create_flags: str, profile: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Invite]]:
    """A coordinator in a process of its own, with a run of this `[clock]`."""
    folder = Path(tempfile.mkdtemp(prefix="bench-coordinator-"))
    file, home = folder / "run.toml", folder / "home"
    file.write_text(f"[clock]\n{clock}")
    profiled = ["-m", "cProfile", "-o", str(profile)] if profile else []
    program = folder / "lifted.py"
    program.write_text(LIFTED)
    command = [
        sys.executable,
        *profiled,
        str(program),
        "serve",
        "--home",
        str(home),
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    with (folder / "log").open("w") as log:
        served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment())
        try:
            assert served.stdout is not None
            if not served.stdout.readline():
                raise SystemExit(f"the coordinator does not start: {(folder / 'log').read_text()[-2000:]}")
            create = [
                sys.executable,
                "-m",
                "coordinator",
                "run",
                "create",
                str(file),
                "--home",
                str(home),
                "--json",
                *create_flags,
            ]
            made = subprocess.run(create, capture_output=True, text=True, check=False)
            if made.returncode:
                raise SystemExit(f"no run is created: {made.stderr[-2000:]}")
            yield served, Invite.parse(json.loads(made.stdout.splitlines()[0])["invite"])
        finally:
            served.send_signal(signal.SIGINT)
            try:
                served.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                served.kill()
                served.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "SWARMENTUM_COORDINATOR_WEB_LISTEN": "none",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")])),
    }


def _quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
