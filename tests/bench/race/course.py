"""One rival runs its course: each peer in a network namespace with a shaped link, watched until it is through.

Whatever happens, no process is left: the namespaces are removed with all that runs in them. A rival that cannot run, or
ends with an error, is a result with the reason. Every wait has a deadline.
"""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from tests.bench.race.curves import Counted, Point, curve
from tests.bench.race.rivals import Course, Rival, RivalError, names
from tests.bench.race.task import Task
from tests.system.netns import Internet
from tests.system.spread_swarm import places_of

FIRST_STEP_SECONDS_MAX: Final = 300.0
"""From the start of the processes to the end of the first step, on a busy machine with 2 cores."""
END_SECONDS_MAX: Final = 120.0
"""From the end of the time to run until every process has ended: the step that is open, the last average, the export."""
WATCH_SECONDS: Final = 0.1


@dataclass
class Result:
    """What came of a rival; `failed` says why it did not come to its end, and what it did before counts all the same."""

    points: list[Point] = field(default_factory=list)
    model: nn.Module | None = None
    failed: str | None = None


def run(rival: Rival, task: Task, advance: Callable[[int, float | None], None]) -> Result:
    """Start, watch and end a rival; `advance(step, loss)` is told how far it is. Raises NotHereError without namespaces."""
    internet = Internet(places_of(names(task)), homes={})
    try:
        for place in names(task):
            internet.shape(place, round(1000 * task.mbit), round(1000 * task.mbit))
        return _watched(rival, task, internet, advance)
    finally:
        internet.close()


def _watched(rival: Rival, task: Task, internet: Internet, advance: Callable[[int, float | None], None]) -> Result:
    result, counted = Result(), [_counted(internet, task)]
    course: Course | None = None
    try:
        course = rival.start(task, internet)
        _follow(course, task, internet, counted, advance)
        result.model = course.model()
    # local_swarm says with an AssertionError what did not happen in time
    except (RivalError, AssertionError, OSError, subprocess.SubprocessError) as error:
        result.failed = f"{type(error).__name__}: {error}"
    finally:
        if course is not None:
            result.points = curve(course.lines(), counted, task.peers)
            course.close()
    return result


def _follow(
    course: Course, task: Task, internet: Internet, counted: list[Counted], advance: Callable[[int, float | None], None]
) -> None:
    """Until it is through, or RivalError at a deadline."""
    began, first = time.monotonic(), None
    while True:
        points = curve(course.lines(), counted, task.peers)
        counted.append(_counted(internet, task))
        now = time.monotonic()
        first = now if points and first is None else first
        advance(points[-1].step if points else 0, points[-1].loss if points else None)
        if course.through():
            return
        if first is None and now - began > FIRST_STEP_SECONDS_MAX:
            raise RivalError(f"no step within {FIRST_STEP_SECONDS_MAX:.0f} s of the start")
        if first is not None and now - first > task.seconds + END_SECONDS_MAX:
            raise RivalError(f"not through {END_SECONDS_MAX:.0f} s after its time of {task.seconds:.0f} s was over")
        time.sleep(WATCH_SECONDS)


def _counted(internet: Internet, task: Task) -> Counted:
    sent = internet.sent()
    return Counted(time.monotonic(), sum(sent[place] for place in names(task)))
