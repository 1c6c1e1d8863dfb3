"""Where a run's coordinators are: what counts, what is kept, and what is not taken."""

from pathlib import Path

import pytest

from node.link.client import CoordinatorClient
from node.link.coordinators import Coordinators
from protos.errors import NetworkError
from protos.invite import COORDINATORS_MAX
from protos.run_config import RunConfig
from tests.unit.coordinator.driver import config
from tests.unit.coordinator.serving import served

INVITED = ("one.example:7700",)


def test_what_was_named_last_comes_first_and_the_invites_stay(tmp_path: Path) -> None:
    known = Coordinators(INVITED, tmp_path / "run" / "coordinators.json")
    assert known.addresses == INVITED
    known.learn(["two.example:7700", "one.example:7700"])
    known.learn([])  # of a coordinator that is alone, or older than this
    assert known.addresses == ("two.example:7700", "one.example:7700")
    known.learn(["three.example:7700", "[::1]:7700"])
    again = Coordinators(INVITED, tmp_path / "run" / "coordinators.json")
    assert again.addresses == known.addresses == ("three.example:7700", "[::1]:7700", "one.example:7700")


@pytest.mark.parametrize("address", ["", "nowhere", "a b:1", "x" * 300 + ":1", "host:port", "host:123456", "a:1\n"])
def test_what_is_no_address_is_not_taken(address: str) -> None:
    known = Coordinators(INVITED)
    known.learn([address, "two.example:1"])
    assert known.addresses == ("two.example:1", *INVITED)


def test_no_more_than_an_invite_can_name() -> None:
    known = Coordinators(INVITED)
    known.learn([f"host{n}:1" for n in range(100)])
    assert len(known.addresses) == COORDINATORS_MAX + 1


def test_a_disk_that_takes_nothing_ends_nobody(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    known = Coordinators(INVITED, tmp_path / "run" / "coordinators.json")
    known.learn(["two.example:1"])
    assert known.addresses == ("two.example:1", *INVITED)


async def test_who_learns_of_a_second_coordinator_stays_with_the_first_while_that_acts(tmp_path: Path) -> None:
    """A channel made twice to the same coordinator is no other coordinator: joining again would forget what it holds."""
    run: RunConfig = config()
    async with served(tmp_path, run) as here:
        client = CoordinatorClient(here.invite, None)
        await client.connect()
        client.known.learn(["127.0.0.1:1"])
        assert client.several
        assert not await client.move()
        await client.get_run()
        await client.close()


async def test_the_runs_facts_are_had_from_another_coordinator_or_when_one_is_back(tmp_path: Path) -> None:
    """A peer that needs the newest snapshot waits as long as everywhere else, and no longer."""
    run: RunConfig = config()
    async with served(tmp_path, run) as here:
        client = CoordinatorClient(here.invite, None)
        await client.connect()
    with pytest.raises(NetworkError):
        await client.reach_run(0.0)
    async with served(tmp_path, run) as here:  # on another port
        client.known.learn(list(here.invite.coordinators))
        _, found = await client.reach_run(60.0)
        assert found == run
        await client.close()
