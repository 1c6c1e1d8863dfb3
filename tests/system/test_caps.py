"""The owner's caps at the network interface: a real swarm in namespaces, whose router counts every byte of each peer."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.local_swarm import owner, toml_of_run, wait_for
from tests.system.netns import Internet, NotHereError
from tests.system.spread_swarm import SpreadSwarm, places_of

pytestmark = [pytest.mark.system, pytest.mark.netns, pytest.mark.timeout(900)]
MBIT = 125_000
NAMES = ("ada", "eve")
MODEL = (
    '[model]\nconfig = { model_type = "llama", vocab_size = 256, hidden_size = 512, num_hidden_layers = 3, '
    "num_attention_heads = 4, num_key_value_heads = 4, intermediate_size = 1024, max_position_embeddings = 64, "
    "tie_word_embeddings = true }"
)
RUN = toml_of_run(
    "capped", MODEL, source="DATA", relay=True, clock={"batch_samples": 2, "min_peers": 1, "snapshot_every": 10}
)


class CappedSwarm(SpreadSwarm):
    """An owner's command runs at the place of its peer, whose loopback has the door."""

    def inside(self, name: str) -> tuple[str, ...]:
        return super().inside(name.rpartition("-")[2])


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SpreadSwarm]:
    try:
        internet = Internet(places_of(NAMES), {})
    except NotHereError as error:
        pytest.skip(str(error))
    try:
        with CappedSwarm(tmp_path, RUN, internet) as swarm:
            yield swarm
    finally:
        internet.close()


def rate(swarm: SpreadSwarm, size: int) -> float:
    """What ada's interface sends, in bytes a second, headers and all else included, until it has sent so many bytes."""
    before, began = swarm.internet.sent()["ada"], time.monotonic()
    wait_for(f"{size} bytes more", lambda: swarm.internet.sent()["ada"] - before >= size)
    return (swarm.internet.sent()["ada"] - before) / (time.monotonic() - began)


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "key"), [("ada", "upload_mbit"), pytest.param("eve", "download_mbit", marks=pytest.mark.nightly)]
)
@pytest.mark.nightly
def test_a_cap_is_honoured_at_the_interface_while_a_snapshot_moves(swarm: SpreadSwarm, who: str, key: str) -> None:
    mbit = 6.0
    flag = ("--set", f"{key}={mbit}")
    swarm.join("ada", *(flag if who == "ada" else ()))
    swarm.wait_step("ada", 11)
    owner(swarm, "ada", "pause")  # no votes: what moves is the snapshot
    before = swarm.internet.sent()["ada"]
    swarm.join("eve", *(flag if who == "eve" else ()))
    wait_for("the first megabyte", lambda: swarm.internet.sent()["ada"] - before > 1_500_000)
    measured = rate(swarm, 15_000_000)
    print(f"{key} = {mbit}: {measured / MBIT:.2f} Mbit/s at the interface")
    assert measured < 1.1 * mbit * MBIT
    owner(swarm, who, "set", key, "off")
    wait_for("the whole snapshot", lambda: swarm.last_step("eve") or swarm.events("eve", "snapshot agreed"))
