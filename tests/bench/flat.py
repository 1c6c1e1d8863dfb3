"""Traffic of a swarm whose votes are added up, beside one where every peer takes every payload, for swarms of many sizes.

Up to REAL_PEERS_MAX peers are real: sessions with p2pd each and a coordinator in a process (`traffic`), both ways in turn. For
larger swarms the bytes are counted with the coordinator's own draw and the peers' own order of sources, without a network.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Final

from coordinator.clock import aggregation, machine
from coordinator.clock.state import Peer, PeerPhase
from coordinator.clock.value_copy import replace
from node.swarm.collector import sources_of
from protos.assignment import SampleShare
from protos.optimizer_config import OptimizerConfig
from protos.run_config import ClockConfig, RunConfig
from protos.run_sections import AdmissionConfig

REAL_PEERS_MAX: Final = 32
COUNTED_STEPS: Final = 16
SECONDS_MAX: Final = 600


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8, 16, 64, 256, 1000, 4000])
    parser.add_argument("--aggregators", type=int, default=3)
    parser.add_argument("--ranges", type=int, nargs="+", default=[1])
    parser.add_argument("--cap", type=int, default=2)
    parser.add_argument("--payload-bytes", type=int, default=7000, help="of the real peers")
    parser.add_argument("--steps", type=int, default=12, help="of the real peers")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for peers in options.peers:
        if peers > REAL_PEERS_MAX:
            for ranges in options.ranges:
                found = counted(peers, options.aggregators, options.cap, ranges)
                rows[_row(peers, ranges)] = {"how": "counted", **found}
            continue
        every = real(peers, 0, 1, options)
        for ranges in options.ranges:
            few = real(peers, options.aggregators, ranges, options)
            rows[_row(peers, ranges)] = {
                "how": "real sessions",
                "payloads_down_most": few["payloads_down_most"],
                "payloads_up_mean": few["payloads_peer_step"],
                "payloads_up_all_to_all": every["payloads_peer_step"],
                "steps_per_second_ratio": round(few["steps_per_second"] / every["steps_per_second"], 2),
                "cpu_ms_peer_step": few["cpu_ms_peer_step"],
                "cpu_ms_peer_step_all_to_all": every["cpu_ms_peer_step"],
                "coordinator_bytes_peer_step": few["coordinator_bytes_peer_step"],
                "coordinator_bytes_peer_step_all_to_all": every["coordinator_bytes_peer_step"],
            }
    return {"aggregators": options.aggregators, "cap": options.cap, "peers": rows}


def _row(peers: int, ranges: int) -> str:
    return str(peers) if ranges == 1 else f"{peers} in {ranges} ranges"


def real(peers: int, aggregators: int, ranges: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run of `traffic`."""
    flags = {
        "peers": peers, "aggregators": aggregators, "ranges": ranges, "cap": options.cap,
        "payload-bytes": options.payload_bytes, "steps": options.steps, "idle-s": 1, "pause-s": 0.1,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "tests.bench",
        "traffic",
        "--json",
        *(f"--{name}={it}" for name, it in flags.items()),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS_MAX)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def counted(peers: int, aggregators: int, cap: int, ranges: int) -> dict[str, Any]:
    """Payloads (sums in payloads' bytes) that a peer sends and gets in a step, over COUNTED_STEPS steps."""
    keys = sorted(hashlib.sha256(b"%d" % number).digest() for number in range(peers))
    config = RunConfig(
        optimizer=OptimizerConfig(selection="random", cap=cap),
        clock=ClockConfig(aggregators=aggregators, ranges=ranges, batch_samples=peers, max_peers=2048),
        admission=AdmissionConfig(mode="invite"),
    )
    run = machine.new_run(bytes(32), config)
    run = replace(run, peers={key: Peer(key, PeerPhase.READY) for key in keys})
    roster = tuple(SampleShare(key, 1) for key in keys)
    total = math.log2(2 * cap + 1)
    up, down, most_up, most_down = 0.0, 0.0, 0.0, 0.0
    for step in range(COUNTED_STEPS):
        head = hashlib.sha256(b"step %d" % step).digest()
        rows = aggregation.drawn(replace(run, head_hash=head, head_step=step), roster, 1)
        sent, got = defaultdict[bytes, float](float), defaultdict[bytes, float](float)
        signed: Any = SimpleNamespace(hash=head)
        for number, row in enumerate(rows):  # in slices of payloads
            for key in keys:
                for who in {*row} - {key}:
                    sent[key] += 1
                    got[who] += 1
                if key not in row:
                    sent[sources_of(signed, key, tuple(row), keys, number)[0]] += total
                    got[key] += total
        ups, downs = ({key: many[key] / ranges for key in keys} for many in (sent, got))
        if not rows:
            ups = downs = dict.fromkeys(keys, float(peers - 1))
        up, down = up + sum(ups.values()), down + sum(downs.values())
        most_up, most_down = max(most_up, *ups.values()), max(most_down, *downs.values())
    each = peers * COUNTED_STEPS
    return {
        "payloads_up_mean": round(up / each, 2),
        "payloads_down_mean": round(down / each, 2),
        "payloads_up_most": round(most_up, 1),
        "payloads_down_most": round(most_down, 1),
        "payloads_up_all_to_all": peers - 1,
    }
