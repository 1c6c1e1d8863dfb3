"""Owners at the coordinator: shown at once, written down only for votes that count, and folded back."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.clock.effects import OwnerNamed
from coordinator.clock.events import Connected, Reported
from node.archive import ledger
from node.commands import status
from node.link.run_reader import read_facts
from protos.accounts import NOBODY, Owner
from protos.errors import RefusedError
from protos.limits import OWNER_STEPS_MIN
from protos.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.driver import LAYOUT, Harness, config, digest_of, joined, key, snapshot_at
from tests.unit.coordinator.serving import Served, peers, served
from tests.unit.coordinator.test_machine import contribute
from tests.unit.coordinator.test_service import WAITS, begin, one_step

ADA, BOB = Owner("Ada"), Owner("Bob")


def comes(harness: Harness, number: int, owner: Owner = NOBODY) -> None:
    head = harness.run.head_step
    harness.feed(replace(joined(number), owner=owner))
    harness.feed(Connected(key(number)))
    harness.feed(Reported(key(number), applied=((head, digest_of(head)),), snapshots=(snapshot_at(0),)))


def decide(harness: Harness, *numbers: int) -> None:
    contribute(harness, *numbers)
    head = harness.run.head_step
    for number in numbers:
        harness.feed(Reported(key(number), applied=((head, digest_of(head)),)))


def named(harness: Harness) -> list[tuple[int, str]]:
    return [(it.step, it.owner.name) for it in harness.journal if isinstance(it, OwnerNamed)]


@pytest.fixture
def harness() -> Harness:
    made = Harness(config(min_peers=2, steps=400), layout=LAYOUT)
    comes(made, 0, ADA)
    comes(made, 1)
    return made


def test_an_owner_is_written_once_a_vote_counts_and_survives_a_restart(harness: Harness) -> None:
    for _ in range(20):  # strangers that come with new names write nothing
        comes(harness, 2, Owner(f"stranger {harness.run.head_step}"))
    assert named(harness) == []
    decide(harness, 0, 1)
    decide(harness, 0, 1)
    assert named(harness) == [(1, "Ada")]
    harness.restart()
    assert harness.run.peers[key(0)].owner == ADA
    assert harness.run.peers[key(1)].owner == NOBODY


def test_changes_are_shown_at_once_and_written_rarely(harness: Harness) -> None:
    decide(harness, 0, 1)
    for count in range(OWNER_STEPS_MIN + 2):
        harness.feed(Reported(key(0), owner=Owner(f"name {count}")))
        assert harness.run.peers[key(0)].owner.name == f"name {count}"
        decide(harness, 0, 1)
    assert [step for step, _ in named(harness)] == [1, 1 + OWNER_STEPS_MIN]
    harness.feed(Reported(key(0), owner=NOBODY))
    for _ in range(OWNER_STEPS_MIN):
        decide(harness, 0, 1)
    assert named(harness)[-1][1] == ""


async def join(here: Served, number: int, owner: pb.Owner) -> None:
    async with peers(here, number + 1) as swarm:
        await swarm[number].client.connect()
        await swarm[number].client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu", owner=owner))


async def test_the_door_refuses_marks_and_readers_see_groups(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here:
        with pytest.raises(RefusedError, match=r"U\+202E"):
            await join(here, 0, pb.Owner(name="a\u202eb"))
        for number, name in enumerate(("Ada", "Bob", "Ada")):
            await join(here, number, pb.Owner(name=name))
        values = status.as_values(*await read_facts(here.invite), here.invite.run_id)
        assert [(it["name"], len(it["peers"])) for it in values["owners"]] == [("Ada", 2), ("Bob", 1)]
        status.show(values)


async def test_the_ledger_of_a_run_adds_up_an_owners_identities(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        for peer in swarm:
            await peer.client.report(pb.ReportBody(owner=pb.Owner(name="Ada")))
        await one_step(swarm)
        found = ledger.ledger(here.invite.run_id, *await ledger.read(here.invite))
        [line] = found.values()["owners"]
        assert (line["name"], line["identities"], line["votes_accepted"]) == ("Ada", 2, 2)
        assert {it["owner"] for it in found.values()["identities"]} == {"Ada"}
        ledger.show(found)
