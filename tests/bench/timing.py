"""Fair timings: everything that is compared takes turns in the same run, so that a busy machine slows all of it."""

import statistics
import time
from collections.abc import Callable, Mapping


def medians_ms(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each action in milliseconds, over `rounds` interleaved rounds after two to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 2):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}
