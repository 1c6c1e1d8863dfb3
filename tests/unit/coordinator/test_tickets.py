"""Who is admitted with a ticket: the rule, the journal, and the service as peers and the operator's commands meet it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa

from coordinator.clock import admission
from coordinator.clock import state as limits
from coordinator.clock.effects import Append, EndStream, PeerLeft, Refuse, TicketMade, TicketRevoked, TicketUsed
from coordinator.clock.events import Connected, Reported, RevocationAsked, TicketAsked
from coordinator.clock.state import PeerPhase
from coordinator.commands.peers import milliseconds
from node.link.client import CoordinatorClient
from protos import clocks
from protos.calls import SessionLostError
from protos.envelope import NO_RUN, Kind, seal
from protos.errors import NetworkError, OperatorError, RefusedError
from protos.identity import Identity
from protos.invite import Invite, Ticket, seal_ticket
from protos.run_config import RunConfig
from protos.run_sections import AdmissionConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from tests.unit.coordinator.driver import LAYOUT, Harness, config, digest_of, joined, key, sha, snapshot_at
from tests.unit.coordinator.serving import COORDINATOR, LivePeer, eventually, identity, operated, read_back, served

DAY = 86_400_000
NOW = 1_800_000_000_000
TICKET = Ticket(b"t" * 16, NOW + DAY, 2, "lab")
OTHER = Ticket(b"o" * 16, 0, 1)


def by_invite(**clock: object) -> RunConfig:
    return RunConfig(clock=config(**clock).clock, admission=AdmissionConfig(mode="invite"))


def harness(*tickets: Ticket, **clock: object) -> Harness:
    made = Harness(by_invite(**clock), layout=LAYOUT)
    for ticket in tickets:
        made.feed(TicketAsked(ticket, NOW))
    assert not made.refusals
    return made


def asks(made: Harness, number: int, ticket: Ticket | None, at: int = NOW, layout: bytes = LAYOUT) -> str:
    """What the peer is told; empty: admitted."""
    effects = made.feed(replace(joined(number, layout), ticket=ticket, unix_ms=at))
    return next((effect.reason for effect in effects if isinstance(effect, Refuse)), "")


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_each_no_has_its_reason() -> None:
    made = harness(TICKET, OTHER)
    assert "`swarmentum-coordinator invite create`" in asks(made, 0, None)
    assert "has not made this invite" in asks(made, 0, Ticket(b"x" * 16, 0, 1))
    assert asks(made, 0, OTHER) == ""
    assert "was used by 1 of 1 peers; ask the run's operator" in asks(made, 1, OTHER)
    assert "expired a moment ago" in asks(made, 1, TICKET, NOW + DAY)
    assert "expired 2 days ago" in asks(made, 1, TICKET, NOW + 3 * DAY + 5)
    assert asks(made, 1, TICKET, NOW + DAY - 1) == ""
    made.feed(RevocationAsked(TICKET.ticket_id, with_peers=False))
    assert "was revoked" in asks(made, 2, TICKET)


@pytest.mark.parametrize(("ms", "words"), [
    (0, "a moment"), (1_000, "1 second"), (59_999, "59 seconds"), (60_000, "1 minute"), (7_200_000, "2 hours"),
    (DAY, "1 day"), (40 * DAY, "40 days"),
])  # fmt: skip
def test_span(ms: int, words: str) -> None:
    assert admission.span(ms) == words


def test_what_the_operator_made_counts_and_not_what_the_ticket_says() -> None:
    made = harness(OTHER)
    assert asks(made, 0, replace(OTHER, uses=99)) == ""
    assert "1 of 1 peers" in asks(made, 1, replace(OTHER, uses=99))


def test_a_guest_stays_one_and_counts_once() -> None:
    made = harness(TICKET)
    assert asks(made, 0, TICKET) == ""
    assert asks(made, 1, TICKET) == ""
    used = [record for record in made.journal if isinstance(record, TicketUsed)]
    made.feed(RevocationAsked(TICKET.ticket_id, with_peers=False))
    for _ in range(2):
        for ticket in (TICKET, OTHER, None):
            assert asks(made, 0, ticket, NOW + 99 * DAY) == ""
        made.restart()
    assert [record for record in made.journal if isinstance(record, TicketUsed)] == used
    assert used == [TicketUsed(TICKET.ticket_id, key(0)), TicketUsed(TICKET.ticket_id, key(1))]


def test_who_is_refused_for_another_reason_uses_nothing() -> None:
    made = harness(TICKET, max_peers=1)
    assert asks(made, 0, TICKET) == ""
    made.feed(Connected(key(0)))
    assert "full" in asks(made, 1, TICKET)
    assert "layout" in asks(made, 0, TICKET, layout=sha("other"))
    assert list(made.run.guests) == [key(0)]


def test_a_use_is_journalled_before_the_peer_is_told_and_no_crash_gives_it_twice() -> None:
    made = harness(OTHER)
    effects = made.feed(replace(joined(0), ticket=OTHER, unix_ms=NOW))
    assert [effect.record for effect in effects if isinstance(effect, Append)] == [TicketUsed(OTHER.ticket_id, key(0))]
    for length in range(len(made.journal) + 1):  # killed after any write: nobody was told before the last one
        again = Harness(made.settings, layout=LAYOUT)
        again.load(made.journal[:length])
        first, second = asks(again, 0, OTHER), asks(again, 1, OTHER)
        assert (first == "") == (length > 0), "without its ticket the run does not know it"
        assert second


def test_other_modes_ask_for_no_ticket_and_make_none() -> None:
    made = Harness(config())
    assert asks(made, 0, None) == ""
    assert asks(made, 1, TICKET) == ""
    assert not made.run.guests
    made.feed(TicketAsked(TICKET, NOW))
    assert 'admission mode "open"' in made.refusals[-1]


def test_tickets_and_guests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TICKETS_MAX", 3)
    monkeypatch.setattr(admission, "GUESTS_MAX", 4)
    made = harness(TICKET, OTHER)

    def no(ticket: Ticket, at: int = NOW) -> str:
        return admission.may_issue(made.run, ticket, at)[1]

    third = Ticket(b"3" * 16, 0, 2)
    assert "made before" in no(TICKET)
    assert "1 of 4 places are left" in no(third)
    assert no(third, NOW + DAY) == "made", "an expired ticket waits for nobody"
    assert asks(made, 0, TICKET) == ""
    assert "2 of 4 places" in no(replace(third, uses=3), NOW + DAY), "but its guest keeps its place"
    monkeypatch.setattr(admission, "GUESTS_MAX", 1)
    assert "1 guests, as many as a run can have" in asks(made, 1, OTHER), "a clock that went back opens no more places"
    monkeypatch.setattr(admission, "GUESTS_MAX", 4)
    made.feed(RevocationAsked(TICKET.ticket_id, with_peers=True))
    assert no(replace(third, uses=3)) == "made"
    made.feed(TicketAsked(third, NOW))
    assert "3 tickets, as many as a run can have" in no(Ticket(b"4" * 16, 0, 1))
    assert limits.TICKETS_MAX * 16 <= limits.GUESTS_MAX * 32 <= 1 << 20


def test_revoked_with_its_peers_they_leave_and_no_strict_step_waits_for_them() -> None:
    made = harness(TICKET, OTHER, min_peers=2, strict=True)
    for number, ticket in ((0, TICKET), (1, OTHER)):
        assert asks(made, number, ticket) == ""
        made.feed(Connected(key(number)))
    for number in (0, 1):
        made.feed(Reported(key(number), applied=((0, digest_of(0)),), snapshots=(snapshot_at(0),)))
    assert made.run.roster == (key(0), key(1))
    effects = made.feed(RevocationAsked(TICKET.ticket_id, with_peers=True))
    assert [type(effect) for effect in effects] == [Append, Append, EndStream]
    assert made.journal[-2:] == [PeerLeft(1, key(0)), TicketRevoked(TICKET.ticket_id, True)]
    assert made.run.peers[key(0)].phase is PeerPhase.ABSENT
    made.feed(Connected(key(0)))
    assert made.refusals[-1].endswith("join first")
    assert "revoked" in asks(made, 0, TICKET)
    made.restart()
    assert "revoked" in asks(made, 0, TICKET)
    made.feed(TicketAsked(Ticket(b"n" * 16, 0, 1), NOW))
    assert asks(made, 0, Ticket(b"n" * 16, 0, 1)) == "", "it is not banned: a new invite admits it"
    made.feed(RevocationAsked(b"?" * 16, with_peers=False))
    assert "no such ticket" in made.refusals[-1]


def test_the_journal_gives_back_what_it_got(tmp_path: Path) -> None:
    made = harness(TICKET, OTHER, Ticket(b"r" * 16, 0, 3, "späß"))
    asks(made, 0, OTHER)
    made.feed(RevocationAsked(TICKET.ticket_id, with_peers=False))
    made.feed(RevocationAsked(b"r" * 16, with_peers=True))
    kinds = {type(record) for record in made.journal}
    assert kinds == {TicketMade, TicketUsed, TicketRevoked}
    run = read_back(made, tmp_path)
    assert (run.tickets, run.guests) == (made.run.tickets, made.run.guests)


# ---- the service and the commands ------------------------------------------------------------------------------------


def peer(link: str | Invite, number: int) -> LivePeer:
    invite = link if isinstance(link, Invite) else Invite.parse(link)
    return LivePeer(number, CoordinatorClient(invite, identity(number)), invite.run_id)


async def refused(who: LivePeer, words: str) -> None:
    """Before a model is built, and when it joins."""
    await who.client.connect()
    with pytest.raises(RefusedError, match=words):
        await who.client.may_join()
    with pytest.raises(RefusedError, match=words):
        await who.join()
    await who.close()


async def test_from_the_command_to_the_second_peer_that_is_refused(tmp_path: Path) -> None:
    settings = by_invite(min_peers=2)
    name = settings.name
    async with served(tmp_path, settings) as here:
        with operated(here) as run:
            [made] = await run("create", name, "--uses", "1", "--label", "lab machines")
            assert (made["uses_left"], made["label"], made["state"]) == (1, "lab machines", "open")
            await refused(peer(here.invite, 0), "takes only peers with an invite")
            first = peer(made["invite"], 0)
            await first.client.connect()
            await first.client.may_join()
            assert not here.runtime.run.guests, "asking uses nothing"
            await first.join()
            await refused(peer(made["invite"], 1), "used by 1 of 1 peers")
            [listed] = await run("list", name)
            assert (listed["state"], listed["used_by"]) == ("used up", [identity(0).peer_id])
            assert listed["invite"] == made["invite"], "the same link, again"
            await first.close()
    async with served(tmp_path, settings) as here:  # killed and started again, on another port
        with operated(here) as run:
            [listed] = await run("list", here.invite.run_id.hex()[:12])
            again = peer(listed["invite"], 0)
            await again.join()
            await refused(peer(listed["invite"], 1), "used by 1 of 1 peers")
            await again.close()
            bare = peer(here.invite, 0)
            await bare.join()
            assert (await run("revoke", name, "lab machines"))[0]["removed"] == []
            await bare.client.report(pb.ReportBody())
            [gone] = await run("revoke", name, listed["ticket"][:8], "--and-its-peers")
            assert gone["removed"] == [identity(0).peer_id]
            await eventually(lambda: here.runtime.run.peers[bare.key].phase is PeerPhase.ABSENT)
            with pytest.raises((StopAsyncIteration, NetworkError)):
                await bare.until("no such event")
            with pytest.raises(SessionLostError):
                await anext(bare.client.follow(0))
            await refused(bare, "takes only peers with an invite")
            await refused(peer(listed["invite"], 0), "was revoked")
            with pytest.raises(OperatorError, match=r"0 invites .*; this run has: lab machines \("):
                await run("revoke", name, "nothing")
            begins = listed["ticket"][:2]  # a label such as `ed` or `ada` may begin the id of another person's invite
            await run("create", name, "--label", begins)
            with pytest.raises(OperatorError, match="2 invites"):
                await run("revoke", name, begins)


async def test_the_coordinators_clock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = by_invite(min_peers=2)
    async with served(tmp_path, settings) as here:
        with operated(here) as run:
            monkeypatch.setattr(clocks, "unix_ms", lambda: NOW)
            [made] = await run("create", settings.name, "--expires", "12h", "--uses", "2")
            assert made["expires"] == "2027-01-15 20:00:00Z"
            guest = peer(made["invite"], 0)
            await guest.join()
            monkeypatch.setattr(clocks, "unix_ms", lambda: NOW + 3 * DAY)
            await refused(peer(made["invite"], 1), "expired 2 days ago, by the coordinator's clock")
            await guest.join()
            await guest.close()


async def test_strangers_tickets_are_refused_at_the_door(tmp_path: Path) -> None:
    async with served(tmp_path, by_invite()) as here, here.channel() as channel:
        stub, run_id = rpc.CoordinatorServiceStub(channel), here.invite.run_id
        good = seal_ticket(COORDINATOR, run_id, TICKET)
        for ticket, reason in (
            (seal_ticket(Identity.generate(), run_id, TICKET), "unknown_signer"),
            (seal_ticket(COORDINATOR, bytes(32), TICKET), "wrong_run"),
            (good[:-1] + bytes([good[-1] ^ 1]), "bad_signature"),
            (good * 9, "too_large"),
            (b"\xff", "malformed"),
        ):
            for call, request in ((stub.Join, pb.JoinRequest), (stub.MayJoin, pb.MayJoinRequest)):
                challenge = (await stub.GetChallenge(pb.GetChallengeRequest(run_id=run_id))).challenge
                body = pb.JoinBody(challenge=challenge, layout_digest=LAYOUT, ticket=ticket)
                with pytest.raises(grpc.RpcError, match=reason):
                    await call(request(envelope=seal(identity(0), Kind.KIND_JOIN, run_id, body)))
            assert here.refused(reason) == 2
        body = pb.JoinBody(challenge=bytes(32), ticket=good)
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.MayJoin(pb.MayJoinRequest(envelope=seal(identity(0), Kind.KIND_JOIN, run_id, body)))


async def test_only_the_operator_makes_lists_and_revokes_and_each_request_counts_once(tmp_path: Path) -> None:
    settings = by_invite()
    async with served(tmp_path, settings) as here, here.channel() as channel:
        stub, run_id = rpc.OperatorServiceStub(channel), here.invite.run_id

        def create(by: Identity = COORDINATOR, **changed: Any) -> pb.CreateTicketRequest:
            body = pb.CreateTicketBody(**{"run_id": run_id, "nonce": b"n" * 16, "uses": 1, **changed})
            return pb.CreateTicketRequest(envelope=seal(by, Kind.KIND_ADMIN, NO_RUN, body))

        for request, reason in (
            (create(by=identity(0)), "unknown_signer"),
            (create(nonce=b"short"), "malformed"),
            (create(uses=0, nonce=b"1" * 16), "out_of_range"),
            (create(expires_in_ms=1 << 60, nonce=b"2" * 16), "out_of_range"),
            (create(label="\n", nonce=b"3" * 16), "out_of_range"),
            (create(run_id=bytes(32), nonce=b"4" * 16), "no run"),
        ):
            with pytest.raises(grpc.RpcError, match=reason):
                await stub.CreateTicket(request)
        for name, body in (("ListTickets", pb.ListTicketsBody()), ("RevokeTicket", pb.RevokeTicketBody())):
            envelope = seal(identity(0), Kind.KIND_ADMIN, NO_RUN, body)
            with pytest.raises(grpc.RpcError, match="unknown_signer"):
                await getattr(stub, name)(getattr(pb, f"{name}Request")(envelope=envelope))
        await stub.CreateTicket(create())
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.CreateTicket(create())
    async with served(tmp_path, settings) as again, again.channel() as channel:
        with pytest.raises(grpc.RpcError, match="made before"):
            await rpc.OperatorServiceStub(channel).CreateTicket(create())
        assert len(again.runtime.run.tickets) == 1


async def refused_for_now(peer: LivePeer) -> bool:
    """Whether the coordinator still says that it cannot write."""
    try:
        await peer.join()
    except NetworkError:
        return True
    return False


async def test_a_disk_that_fails_admits_nobody_and_uses_nothing(tmp_path: Path) -> None:
    settings = by_invite(min_peers=2)
    async with served(tmp_path, settings) as here:
        with operated(here) as run:
            [made] = await run("create", settings.name)
            with here.journal._engine.begin() as connection:
                stop = "CREATE TRIGGER full BEFORE INSERT ON records WHEN NEW.kind = 'used' "
                connection.execute(sa.text(stop + "BEGIN SELECT RAISE(ABORT, 'the disk fails'); END"))
            first, second = peer(made["invite"], 0), peer(made["invite"], 1)
            with pytest.raises(NetworkError, match=r"cannot write its journal: no step is decided until it can"):
                await first.join()
            with here.journal._engine.begin() as connection:
                connection.execute(sa.text("DROP TRIGGER full"))
            async with asyncio.timeout(240):  # the coordinator tries the disk again after a second or so
                while await refused_for_now(second):
                    await asyncio.sleep(0.1)
            with pytest.raises(RefusedError, match="1 of 1"):
                await first.join()
            await first.close()
            await second.close()


@pytest.mark.parametrize(
    ("text", "ms"), [("90m", 5_400_000), ("12h", DAY // 2), ("7d", 7 * DAY), ("2w", 14 * DAY), ("never", 0)]
)
def test_times(text: str, ms: int) -> None:
    assert milliseconds(text) == ms


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "3651d", "7 d", "soon", "9999999999s"])
def test_wrong_times_are_told(text: str) -> None:
    with pytest.raises(OperatorError, match="--expires"):
        milliseconds(text)
