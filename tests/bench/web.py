"""The web page under many readers: their memory, and what they cost the clock of a real swarm. Also its pictures for the docs.

A coordinator with its page, a relay and peers train on this machine, in processes of their own. The peers' forward passes take
a while in which the cores are free, as with a GPU. Turns without and with `--readers` idle readers follow each other, so that
other work on the machine is in both. A reader is a live stream, in a process that reads its bytes and drops them.

python -m tests.bench web --json
python -m tests.bench web --pictures docs    # docs/web.png, docs/web-phone.png
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.system.local_swarm import LocalSwarm, wait_for

SETTLE_SECONDS: Final = 3.0
OPEN_SECONDS_MAX: Final = 120.0
PICTURES: Final = {"web.png": (1000, 1150), "web-phone.png": (360, 740)}
READY: Final = "the web page of the runs is ready"
RUN: Final = f"""
name = "shakespeare"
[model]
factory = "tests.system.paced_model:make"
[model.kwargs]
seconds = SECONDS
[model.kwargs.config]
model_type = "llama"
vocab_size = 256
hidden_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
intermediate_size = 128
max_position_embeddings = 64
[data]
source = "{os.__file__}"
context = 32
[clock]
steps = 100000
batch_samples = 8
min_peers = PEERS
snapshot_every = 20
[evaluation]
every = 20
samples = 8
sample_tokens = 60
prompt = "def "
[overlay]
bootstrap = [BOOTSTRAP]
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a forward pass")
    parser.add_argument("--turns", type=int, default=4, help="of each kind")
    parser.add_argument("--steps", type=int, default=40, help="in a turn")
    parser.add_argument("--pictures", type=Path, default=None, metavar="FOLDER", help="only take the pictures")


class Swarm(LocalSwarm):
    """Its coordinator shows a page, at a free port."""

    def surroundings(self, name: str) -> dict[str, str]:
        return {"SWARMENTUM_COORDINATOR_WEB_LISTEN": "127.0.0.1:0"} if name == "coordinator" else {}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    run = RUN.replace("SECONDS", str(options.seconds)).replace("PEERS", str(options.peers))
    with tempfile.TemporaryDirectory(prefix="bench-web-") as folder, Swarm(Path(folder), run) as swarm:
        for number in range(options.peers):
            swarm.join(f"peer{number}", "--owner", "ada")
        url = str(wait_for("page", lambda: swarm.events("coordinator", READY))[-1]["url"])
        wait_for("steps", lambda: decided(swarm, 45), 300)
        if options.pictures is not None:
            pictures(f"{url}#{swarm.invite.run_id.hex()}", options.pictures)
            return {"pictures": str(options.pictures)}
        return compared(options, swarm, url)


def decided(swarm: Swarm, least: int) -> list[float]:
    """Seconds of each step, as the coordinator's log has them; empty if there are fewer than `least`."""
    found = [float(event["seconds"]) for event in swarm.events("coordinator", "a step is decided")]
    return found if len(found) >= least else []


def compared(options: argparse.Namespace, swarm: Swarm, url: str) -> dict[str, Any]:
    """Step times and memory without readers and with them, turn by turn."""
    page, seconds, memory, pauses = page_of(swarm), dict[bool, list[float]](), dict[bool, list[float]](), []
    cpu = {False: 0.0, True: 0.0}
    for turn in range(2 * options.turns):
        crowded = bool(turn % 2)
        with Readers(url, swarm.invite.run_id.hex(), options.readers if crowded else 0) as readers:
            pauses.append(readers.opened_seconds)
            time.sleep(SETTLE_SECONDS)
            first, before = len(decided(swarm, 1)), (cpu_seconds(page), time.monotonic())
            steps = wait_for("steps", lambda at=first: decided(swarm, at + options.steps), 600)  # type: ignore[misc]
            cpu[crowded] += (cpu_seconds(page) - before[0]) / (time.monotonic() - before[1]) / options.turns
            seconds.setdefault(crowded, []).append(statistics.median(steps[first : first + options.steps]))
            memory.setdefault(crowded, []).append(rss_mb(page))
            assert readers.open() == (options.readers if crowded else 0), "readers were dropped"
    alone, together = (statistics.median(seconds[crowded]) for crowded in (False, True))
    return {
        "readers": options.readers,
        "step_ms_without": round(1000 * alone, 1),
        "step_ms_with": round(1000 * together, 1),
        "slower_percent": round(100 * (together / alone - 1), 2),
        "turns_ms_without": [round(1000 * it, 1) for it in seconds[False]],
        "turns_ms_with": [round(1000 * it, 1) for it in seconds[True]],
        "page_mb_without": round(memory[False][0], 1),
        "page_mb_with": round(max(memory[True]), 1),
        "readers_mb": round(max(memory[True]) - memory[False][0], 1),
        "page_cpu_percent_without": round(100 * cpu[False], 1),
        "page_cpu_percent_with": round(100 * cpu[True], 1),
        "open_all_seconds": round(max(pauses), 1),
        "load": round(os.getloadavg()[0], 1),
    }


def page_of(swarm: Swarm) -> int:
    """The process of the page: the coordinator's child."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"node.web.serve" in line and parent == swarm.serving["pid"]:
                return int(entry.name)
    raise SystemExit("the page has no process")


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise SystemExit(f"process {pid} has no VmRSS: it has ended")


def cpu_seconds(pid: int) -> float:
    """That a process took so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Readers:
    """Open live streams in a process of its own, until the end of the block."""

    def __init__(self, url: str, run: str, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve_readers, args=(theirs, url, run, count), daemon=True)
        self.opened_seconds = 0.0

    def __enter__(self) -> Readers:
        self._process.start()
        assert self._pipe.poll(OPEN_SECONDS_MAX), "the readers were not opened in time"
        self.opened_seconds = self._pipe.recv()
        return self

    def open(self) -> int:
        """How many have not ended."""
        self._pipe.send("count")
        return int(self._pipe.recv())

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def serve_readers(pipe: Connection, url: str, run: str, count: int) -> None:
    """Open `count` streams, and read them. Answers each message with the number that are open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_read(pipe, url, run, count))


async def _read(pipe: Connection, url: str, run: str, count: int) -> None:
    at, began = urlsplit(url), time.monotonic()
    head = f"GET /api/runs/{run}/events HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode()
    draining = []

    async def drain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()

    for _ in range(count):
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(head)
        status = await asyncio.wait_for(reader.readline(), 30)
        assert b" 200 " in status, status
        draining.append(asyncio.ensure_future(drain(reader, writer)))
    pipe.send(time.monotonic() - began)
    while await asyncio.to_thread(pipe.recv):
        pipe.send(sum(not it.done() for it in draining))


def pictures(url: str, folder: Path) -> None:
    """Pictures of the page once its browser has verified the log."""
    from tests.system.browser import chromium, tab

    with chromium() as browser:
        for name, (width, height) in PICTURES.items():
            with tab(browser, url, width=width, height=height) as page:
                page.wait_for_selector("#proof[data-state=good]")
                page.wait_for_timeout(1000 * SETTLE_SECONDS)
                page.screenshot(path=str(folder / name))
