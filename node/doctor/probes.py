"""Runs probes side by side, each with a deadline. A probe that fails, or does not end, gives a `Fault` and stops no other.

A thread that hangs cannot be ended: it is a daemon, so that the program ends without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from node.doctor.facts import Fault
from protos.errors import OperatorError, RefusedError, SwarmentumError

Probe = Callable[[], Any]


def fault_of(error: BaseException) -> Fault:
    """What a failed probe says."""
    refused = isinstance(error, RefusedError | OperatorError)
    return Fault(str(error) or type(error).__name__, refused)


def side_by_side(probes: Mapping[str, Probe], seconds_max: float) -> dict[str, Any]:
    """The fact of each probe, by its name, or its Fault."""
    found: dict[str, Any] = {}

    def run(name: str, probe: Probe) -> None:
        try:
            found[name] = probe()
        except (SwarmentumError, OSError, RuntimeError, ValueError) as error:
            found[name] = fault_of(error)

    threads = {name: threading.Thread(target=run, args=(name, probe), daemon=True) for name, probe in probes.items()}
    for thread in threads.values():
        thread.start()
    until = time.monotonic() + seconds_max
    for thread in threads.values():
        thread.join(max(until - time.monotonic(), 0.0))
    late = Fault(f"no answer within {seconds_max:.0f} s")
    return {name: found.get(name, late) for name in probes}
