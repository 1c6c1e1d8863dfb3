"""A whole swarm on this machine, through `swarmentum demo`: steps a second, and bytes against an fp32 all-reduce."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS_MAX = 900


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group-size", type=int, default=128)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        flags = ["--peers", str(options.peers), "--steps", str(options.steps), "--group-size", str(options.group_size)]
        command = [sys.executable, "-m", "node", "demo", "--json", *flags, "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=True)
        values = json.loads(done.stdout.splitlines()[-1])
    sent = [peer["payload_bytes_sent"] / peer["steps_applied"] for peer in values["peers"]]
    on_wire = [peer["wire_bytes_sent"] / peer["steps_applied"] for peer in values["peers"]]
    overhead = [peer["wire_bytes_received"] / max(peer["payload_bytes_received"], 1) for peer in values["peers"]]
    allreduce = values["allreduce_bytes_per_peer_step"]
    return {
        "peers": options.peers,
        "steps": values["steps"],
        "parameters": values["parameters"],
        "group_size": options.group_size,
        "seconds": values["seconds"],
        "steps_per_second": round(values["steps"] / values["seconds"], 3),
        "tokens_per_second": round(values["tokens"] / values["seconds"], 1),
        "payload_bytes_per_peer_step": round(max(sent), 1),
        "wire_bytes_sent_per_peer_step": round(max(on_wire), 1),
        "allreduce_bytes_per_peer_step": allreduce,
        "ratio_payload_to_allreduce": round(max(sent) / allreduce, 7),
        "ratio_wire_to_allreduce": round(max(on_wire) / allreduce, 7),
        "ratio_received_on_wire_to_payload": round(max(overhead), 4),
        "loss_first": round(values["loss_first"], 4),
        "loss_last": round(values["loss_last"], 4),
        "digests_equal_at_every_step": values["digests_equal_at_every_step"],
    }
