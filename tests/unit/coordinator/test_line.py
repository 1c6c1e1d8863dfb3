"""The line before a full run: the rules on values, then over gRPC with a restart of the coordinator."""

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from coordinator.clock.admission import block_places, places_free
from coordinator.clock.events import TicketAsked
from coordinator.clock.state import Peer, PeerPhase, Run
from coordinator.serving import hub as hub_module
from coordinator.serving.hub import Hub
from coordinator.serving.metrics import Metrics
from coordinator.serving.served_coordinator import _take_lines
from coordinator.store.journal import Journal
from coordinator.store.wait_queues import (
    CALLED_MS_MAX,
    CALLS_KEPT,
    FILE,
    LINE_MAX,
    RETURN_MS_MAX,
    SILENT_MS_MAX,
    Line,
    QueuedPeer,
    WaitQueues,
    asked,
    expected,
    may_come,
    moved,
    waiting,
)
from node.link.client import CoordinatorClient
from protos.errors import RefusedError
from protos.invite import Ticket, seal_ticket
from protos.run_config import RunConfig
from protos.run_sections import AdmissionConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import LAYOUT
from tests.unit.coordinator.serving import COORDINATOR, LivePeer, Served, eventually, identity, peers, served

FULL = RunConfig.model_validate({"clock": {"min_peers": 1, "max_peers": 1, "steps": 100}})
BLOCK = 32
ADA, BOB, CAY = b"a" * 32, b"b" * 32, b"c" * 32


def ask(line: Line, key: bytes, free: int, now_ms: int, network: str = "") -> tuple[Line, int]:
    turn = asked(present(line, now_ms), key, network, free, BLOCK, now_ms)
    return turn.line, turn.place


def present(line: Line, now_ms: int) -> Line:
    """Of a run in which nobody is yet."""
    return waiting(line, run_with({}), now_ms)


def run_with(peers: dict[bytes, Peer]) -> Run:
    return replace(Run(b"r" * 32, FULL), peers=peers)


def test_first_come_first_served() -> None:
    line: Line = {}
    line, first = ask(line, ADA, 0, 0)
    line, second = ask(line, BOB, 0, 1)
    line, again = ask(line, ADA, 0, 2)
    assert (first, second, again) == (1, 2, 1)
    line, late = ask(line, CAY, 1, 3)
    assert late == 2, "the free place is Ada's"
    assert not may_come(line, BOB, 1)
    assert not may_come(line, CAY, 1)
    line, called = ask(line, ADA, 1, 4)
    assert called == 0
    assert may_come(line, ADA, 1)
    line, next_one = ask(line, BOB, 2, 5)
    assert next_one == 0, "two places are free, and Ada keeps one"


def test_nobody_waits_while_there_is_room() -> None:
    assert ask({}, ADA, 3, 0) == ({}, 0), "an ordinary run has no line at all"


def test_a_silent_peer_and_one_that_does_not_come_lose_their_places() -> None:
    line: Line = {}
    line, _ = ask(line, ADA, 0, 0)
    line, _ = ask(line, BOB, 0, SILENT_MS_MAX)
    assert ask(line, BOB, 0, SILENT_MS_MAX + 1)[1] == 1, "Ada was silent for too long"
    line, place = ask(line, BOB, 1, SILENT_MS_MAX + 2)
    assert place == 0
    late = SILENT_MS_MAX + 2 + CALLED_MS_MAX
    assert list(present(line, late)) == [BOB], "Bob builds a large model"
    assert list(present(line, late + 1)) == []


def test_a_place_that_is_gone_again_leaves_its_peer_in_line() -> None:
    line, _ = ask({}, ADA, 0, 0)
    line, place = ask(line, ADA, 1, 1)
    assert place == 0
    line, place = ask(line, ADA, 0, 2)  # the peer that had left came back
    assert place == 1
    assert list(present(line, SILENT_MS_MAX + 3)) == [], "it has to ask again, as before it was called"


def test_one_network_cannot_fill_the_line() -> None:
    line: Line = {}
    for number in range(LINE_MAX):
        line, place = ask(line, number.to_bytes(32, "big"), 0, 0, "203.0.113.0/24")
    assert len(line) == BLOCK
    assert place == BLOCK + 1
    turn = asked(line, ADA, "203.0.113.0/24", 0, BLOCK, 0)
    assert "of your network wait in line, as many as there may be" in turn.reason
    for number in range(LINE_MAX):
        line, place = ask(line, b"x" + number.to_bytes(31, "big"), 0, 0, f"network {number // 9}")
    assert len(line) == LINE_MAX
    assert asked(line, ADA, "", 0, BLOCK, 0).line == line


def test_a_peer_that_follows_the_log_is_in_line_no_more() -> None:
    line, _ = ask({}, ADA, 0, 0)
    line, _ = ask(line, ADA, 1, 1)
    joined = Peer(ADA, phase=PeerPhase.ABSENT)
    assert list(waiting(line, run_with({ADA: joined}), 2)) == [ADA], "it has a session, and builds its model"
    assert list(waiting(line, run_with({ADA: replace(joined, phase=PeerPhase.SYNCING)}), 2)) == []
    counted = replace(joined, votes_accepted=1)
    assert list(waiting(line, run_with({ADA: counted}), 2)) == [], (
        "a restart kept it at the head of the line for minutes"
    )


def test_the_peers_of_one_network_keep_no_more_places_of_the_run_than_they_may_take() -> None:
    """Ten identities from one address ask a run of 16 that was full once, and join when they like, or never."""
    config = RunConfig.model_validate({"clock": {"max_peers": 16}})
    most, line = block_places(Run(b"r" * 32, config)), dict[bytes, QueuedPeer]()
    assert most == 8
    for number in range(10):
        line = dict(asked(line, bytes([number]) * 32, "203.0.113.0/24", 0, most, 0).line)
    for key in list(line):
        line = dict(asked(line, key, "203.0.113.0/24", 16, most, 1).line)
    assert sum(it.called_ms is not None for it in line.values()) == most
    assert asked(line, ADA, "198.51.100.0/24", 16, most, 2).place == 0, "half of the places are for others"


def test_a_line_is_read_back_and_damaged_bytes_cost_only_places() -> None:
    lines, run_id = WaitQueues(), b"r" * 32
    line, _ = ask({}, ADA, 0, 0, "net")
    line, _ = ask(line, BOB, 0, 0)
    line, _ = ask(line, ADA, 1, 0, "net")
    lines.keep(run_id, line, 0)
    assert lines.changed == [run_id]
    kept = {run_id: lines.taken(run_id)}
    lines.keep(run_id, line, 5)
    assert not lines.changed, "nobody came or left"
    again = WaitQueues(900, kept)
    assert list(again.of(run_id)) == [ADA, BOB]
    assert again.of(run_id)[ADA] == QueuedPeer("net", 900, 900), "the time while no coordinator acted does not count"
    assert again.waits_for_members(901)
    for damaged in (b"", b"[]", b"{", b'[["zz", ""]]', b'{"aa": 3}', b"\xff", b"[3]", b"[" * 100_000):
        assert WaitQueues(0, {run_id: damaged}).of(run_id) == {}
    again.keep(run_id, {}, 0)
    assert again.taken(run_id) == b""


def test_the_journal_has_the_newest_line_of_a_run_and_none_of_a_deleted_one(tmp_path: Path) -> None:
    journal = Journal(Journal.sqlite_url(tmp_path), COORDINATOR)
    one, two = b"1" * 32, b"2" * 32
    for run_id in (one, two):
        journal.create_run(run_id, log_pb2.Genesis(nonce=run_id[:16]))
    for body in (b"a", b"b", b"c"):
        journal.keep_line(one, body)
    journal.keep_line(two, b"x")
    assert journal.lines() == {one: b"c", two: b"x"}
    journal.keep_line(two, b"")
    assert journal.lines() == {one: b"c"}
    journal.delete_run(one)
    while journal.purge():
        pass
    assert journal.lines() == {}
    journal.close()


async def test_the_file_of_an_earlier_version_is_taken_over_once(tmp_path: Path) -> None:
    async with served(tmp_path, FULL) as here:
        run_id = here.invite.run_id
    path = tmp_path / FILE
    journal, gone = Journal(Journal.sqlite_url(tmp_path), COORDINATOR), bytes(32)
    path.write_text(json.dumps({run_id.hex(): [[ADA.hex(), "net"], [BOB.hex(), ""]], "zz": 3}))
    _take_lines(journal, path)
    assert journal.lines() == {}, "one that cannot be read has none"
    path.write_text(json.dumps({it.hex(): [[ADA.hex(), "net"], [BOB.hex(), ""]] for it in (run_id, gone)}))
    _take_lines(journal, path)
    assert not path.exists()
    assert journal.lines().keys() == {run_id}, "before anything is served, so a crash loses none"
    path.write_text(json.dumps({run_id.hex(): [[CAY.hex(), ""]]}))
    _take_lines(journal, path)
    hub = Hub(journal, COORDINATOR, Metrics())
    hub.restore()
    assert list(hub.lines.of(run_id)) == [ADA, BOB], "the journal has the newer line"
    await hub.stop()
    hub.close()


async def test_a_line_that_a_stop_or_a_failing_disk_kept_from_the_journal_is_written_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of other runs counted as written when the first write was cancelled, and each that failed did."""
    monkeypatch.setattr(hub_module, "LINES_SECONDS", 0.01)
    one, two, three = (bytes([number]) * 32 for number in range(3))
    line = {ADA: QueuedPeer("", 0)}
    file = tmp_path / "journal.sqlite3"
    async with served(tmp_path, FULL) as here:
        with structlog.testing.capture_logs() as said, closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON lines BEGIN SELECT RAISE(ABORT, 'disk full'); END")
            here.hub.keep_line(one, line, 0)
            await eventually(lambda: said)
            other.execute("DROP TRIGGER full")
            await eventually(lambda: here.journal.lines().keys() == {one})
            other.execute("BEGIN IMMEDIATE")
            here.hub.keep_line(one, {**line, BOB: QueuedPeer("", 0)}, 0)
            here.hub.keep_line(two, line, 0)
            here.hub.keep_line(three, line, 0)
            await eventually(lambda: here.hub.lines.changed == [two, three])
            stopping = asyncio.ensure_future(here.hub.stop())
            await asyncio.sleep(0)
            other.execute("ROLLBACK")
            await stopping
        assert len(said) == 1, "a full disk may last"
        kept = here.journal.lines()
        assert kept.keys() == {one, two, three}
        assert WaitQueues(0, kept).of(one).keys() == {ADA, BOB}


def test_the_expected_wait_follows_from_the_pace_at_which_places_became_free() -> None:
    minute, line, pace = 60_000, dict[bytes, QueuedPeer](), None
    for number, key in enumerate((ADA, BOB, CAY)):
        after = asked(line, key, "", 0, BLOCK, number).line
        pace, line = moved(pace, line, after, number), dict(after)
    assert pace is not None
    said = "the expected wait is not known: nobody has left the run in the 5 min since the line began"
    assert expected(pace, 3, 5 * minute) == said
    for at, key in ((4, ADA), (10, ADA), (20, BOB)):  # a peer that asks again is called once
        after = asked(line, key, "", 2, BLOCK, at * minute).line
        pace, line = moved(pace, line, after, at * minute), dict(after)
    assert pace.called_ms == (4 * minute, 20 * minute)
    said = "expected wait: about 30 min, at the pace of the last 2 places that became free"
    assert expected(pace, 3, 20 * minute) == said
    assert moved(pace, line, {}, 21 * minute) is None, "the next line begins anew"
    for at in range(CALLS_KEPT + 4):
        pace = moved(pace, {}, {bytes([at]): QueuedPeer("", at, at * minute)}, at * minute)
    assert len(pace.called_ms) == CALLS_KEPT
    assert expected(pace, 2, (CALLS_KEPT + 4) * minute).startswith("expected wait: about 2 min,")


async def turn(peer: LivePeer) -> pb.MayJoinResponse:
    await peer.client.connect()
    return await peer.client.wait_in_line()


async def test_over_grpc_the_order_holds_also_after_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, FULL) as here, peers(here, 3) as (ada, bob, cay):
        assert (await turn(ada)).place == 0, "nobody waits, so the peer need not wait for others to come back"
        await ada.join()
        for peer, place, length in ((bob, 1, 1), (cay, 2, 2), (bob, 1, 2)):
            answer = await turn(peer)
            assert (answer.place, answer.length) == (place, length)
        assert "number 2 of 2 in line; the expected wait is not known" in (await turn(cay)).reason
        with pytest.raises(RefusedError, match="is full"):
            await cay.client.may_join()  # a peer that does not wait, as `doctor` and older versions
        facts, _ = await bob.client.get_run()
        assert facts.in_line == 2
        await ada.close()
        await eventually(lambda: places_free(here.runtime.run, b"") == 1)
        await cay.client.connect()
        with pytest.raises(RefusedError, match="2 peers wait in line"):
            await cay.client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
    async with served(tmp_path, FULL) as here, peers(here, 3) as (ada, bob, cay):
        assert (await turn(cay)).place == 2, "the place that looks free may be Ada's"
        assert (await turn(bob)).place == 1
        with pytest.raises(RefusedError, match="2 peers wait in line"):
            await bob.client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
        here.hub.lines._read_ms -= RETURN_MS_MAX
        assert (await turn(cay)).place == 1, "the place is kept for Bob"
        assert (await turn(bob)).place == 0
        answer = await turn(cay)
        assert answer.place == 1, "Bob is called, and builds its model"
        assert "expected wait: about " in answer.reason
        await bob.join()
        assert (await turn(cay)).place == 1
        facts, _ = await cay.client.get_run()
        assert facts.in_line == 1


async def test_an_invite_for_one_peer_takes_one_place_of_the_line(tmp_path: Path) -> None:
    """A ticket is used by a join alone, so one for one peer filled the line of a run by invite with free identities."""
    run = FULL.model_copy(update={"admission": AdmissionConfig(mode="invite")})
    one, many = Ticket(b"1" * 16, 0, 1), Ticket(b"2" * 16, 0, 2)
    async with served(tmp_path, run) as here, peers(here, 9) as swarm:
        for ticket in (one, many, Ticket(b"3" * 16, 0, 1)):
            await here.runtime.handle(TicketAsked(ticket, 0))
        first, *others = swarm
        with_ticket(first, here, Ticket(b"3" * 16, 0, 1))
        assert (await turn(first)).place == 0
        await first.join()
        places = []
        for number, peer in enumerate(others):
            with_ticket(peer, here, one if number < 5 else many)
            answer = await turn(peer)
            places.append(answer.place)
            if number == 4:
                assert "with your invite wait in line, as many as there may be" in answer.reason
        assert places == [1, 2, 2, 2, 2, 2, 3, 4]
        assert len(here.hub.lines.of(here.invite.run_id)) == 3, "one, and two"
        assert (await turn(others[0])).place == 1, "it keeps its own"


def with_ticket(peer: LivePeer, here: Served, ticket: Ticket) -> None:
    sealed = seal_ticket(COORDINATOR, here.invite.run_id, ticket)
    peer.client = CoordinatorClient(replace(here.invite, ticket=sealed), identity(peer.number))
