"""A peer that the log excludes stops with the reason; one that was admitted after that entry goes on past it."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from node.blobs.payloads import Payloads
from node.overlay.settings import OverlaySettings
from node.swarm.facts import Failed
from node.swarm.membership import JoinFacts
from node.swarm.session import Outside, Session, build
from protos.identity import Identity
from protos.invite import Invite
from protos.log import Entry, Exclusion, SignedEntry, seal_entry
from protos.v1 import coordinator_pb2 as pb

RUN = b"r" * 32
ADA, COORDINATOR = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
INVITE = Invite(RUN, ("127.0.0.1:1",), COORDINATOR.public_key, bytes(32), (), "excluded")
WORDS = "excluded by the operator of this run: spam"


def log(excluded_in: int, steps: int) -> list[SignedEntry]:
    """Entries that nobody contributed to; one excludes Ada."""
    entries, head = [], RUN
    for step in range(1, steps + 1):
        out = (Exclusion(ADA.public_key, WORDS, by_operator=True),) if step == excluded_in else ()
        entries.append(seal_entry(COORDINATOR, RUN, Entry(step, head, (), 0, b"", (), 0, exclusions=out)))
        head = entries[-1].hash
    return entries


@pytest.mark.parametrize(("admitted_at", "stops"), [(1, True), (2, False), (3, False)])
def test_an_exclusion_from_before_it_was_admitted_is_over(tmp_path: Path, admitted_at: int, stops: bool) -> None:
    told: list[object] = []

    async def emit(event: object) -> None:
        told.append(event)

    async def live() -> int:
        client = mock.AsyncMock()
        client.join.return_value = pb.JoinResponse(head_step=admitted_at)
        life = Session(build(INVITE, ADA, tmp_path / "identity.key", OverlaySettings(), mock.Mock(), lambda sha256: None,
                       Payloads(tmp_path / "payloads"), emit, Outside(client=lambda *_: client)))  # fmt: skip
        await life.parts.membership.enter(JoinFacts(bytes(32), 1, "cpu"))
        life._follow_and_deliver = mock.AsyncMock()  # type: ignore[method-assign]
        await life.follow_from(0, RUN)
        for signed in log(excluded_in=2, steps=3):
            await life.parts.entries.receive(signed.envelope)
        await life.parts.runtime.stop()
        return life.committed_step

    assert asyncio.run(live()) == 3
    assert [str(event.error) for event in told if isinstance(event, Failed)] == ([WORDS] if stops else [])
