"""Runs probes side by side, each with a deadline. A probe that fails, or does not end, gives a `Fault` and stops no other.

A thread that hangs cannot be ended: it is a daemon, so that the program ends without it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from node.doctor.doctor_facts import Fault
from protos.errors import OperatorError, RefusedError, SwarmentumError

Probe = Callable[[], Any]


def _nobody(_name: str, _fact: Any) -> None:
    """Nobody waits for the facts one by one."""


def fault_of(error: BaseException) -> Fault:
    """What a failed probe says."""
    refused = isinstance(error, RefusedError | OperatorError)
    return Fault(str(error) or type(error).__name__, refused)


def side_by_side(
    probes: Mapping[str, Probe], seconds_max: float, told: Callable[[str, Any], None] = _nobody
) -> dict[str, Any]:
    """The fact of each probe, by its name, or its Fault. `told` gets each name and fact as it comes, in this thread."""
    came: queue.Queue[tuple[str, Any]] = queue.Queue(len(probes))

    def run(name: str, probe: Probe) -> None:
        try:
            came.put((name, probe()))
        except (SwarmentumError, OSError, RuntimeError, ValueError) as error:
            came.put((name, fault_of(error)))

    for name, probe in probes.items():
        threading.Thread(target=run, args=(name, probe), daemon=True).start()
    found: dict[str, Any] = {}
    until = time.monotonic() + seconds_max
    while len(found) < len(probes):
        try:
            name, fact = came.get(timeout=max(until - time.monotonic(), 0.001))
        except queue.Empty:
            break
        found[name] = fact
        told(name, fact)
    late = Fault(f"no answer within {seconds_max:.0f} s")
    for name in probes.keys() - found.keys():
        told(name, late)
    return {name: found.get(name, late) for name in probes}
