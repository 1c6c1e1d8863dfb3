"""The network breaks in two halves and heals: at most one half goes on, and then all do, with equal states."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import digests_by_step, processes_with, toml_of_run, wait_for
from tests.system.netns import Internet, NotHereError
from tests.system.spread_swarm import SpreadSwarm, places_of

pytestmark = [pytest.mark.system, pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

NEAR, FAR = ("ada", "bob"), ("cyd", "dan")
RUN = toml_of_run(
    "partition",
    source="DATA",
    relay=True,
    clock={
        "batch_samples": 16,
        "min_peers": 2,
        "snapshot_every": 20,
        "deadline_ms_min": 1000,
        "deadline_ms_max": 10000,
    },
)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SpreadSwarm]:
    try:
        internet = Internet(places_of((*NEAR, *FAR)), homes={})
    except NotHereError as why:
        pytest.skip(f"no network namespaces here: {why}")
    try:
        with SpreadSwarm(tmp_path, RUN, internet) as swarm:
            yield swarm
    finally:
        internet.close()
    assert processes_with(str(tmp_path)) == [], "something was left running"


def test_one_half_at_most_goes_on_and_after_the_break_all_do(swarm: SpreadSwarm) -> None:
    """The coordinator is with the first half; the other half's peers still reach each other."""
    for name in (*NEAR, *FAR):
        swarm.join(name)
    for name in (*NEAR, *FAR):
        swarm.wait_step(name, 8)
    swarm.internet.split(FAR)
    began, head = time.monotonic(), swarm.status()["step"]
    swarm.wait_step("ada", head + 6)
    print(f"the half with the coordinator went on within {time.monotonic() - began:.1f} s")
    for name in FAR:
        assert swarm.last_step(name) <= head, "a half without the coordinator went on, beyond what was under way"
    swarm.internet.join()
    healed = swarm.last_step("ada")
    for name in (*NEAR, *FAR):
        swarm.wait_step(name, healed + 5)
    for name in FAR:
        before = sum(line["accepted"] for line in swarm.steps(name))
        wait_for(f"vote of {name} that counts", lambda n=name, b=before: sum(x["accepted"] for x in swarm.steps(n)) > b)
    different = [s for s, d in digests_by_step(*(swarm.steps(n) for n in (*NEAR, *FAR))).items() if len(d) > 1]
    assert not different, f"replicas differ after steps {different[:5]}"
    for name in FAR:
        steps = [line["step"] for line in swarm.steps(name)]
        assert steps == list(range(steps[0], steps[-1] + 1)), f"{name} lost a step or applied one twice"
