"""Runtime and gRPC service, with real TLS, a real journal and the peers' own client."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.clock.effects import EntryCommitted, TickOpened
from coordinator.clock.events import Disconnected, TimerFired
from coordinator.clock.state import PeerPhase, Phase
from coordinator.serving import event_loop as runtime_module
from coordinator.serving import following, hub, sessions, throttled_log
from coordinator.store import home_files
from node.link.coordinators import CoordinatorWays
from protos import calls, limits
from protos.calls import BehindError, SessionLostError, error_of, fetch_certificate, pinned_aio_channel
from protos.envelope import NO_RUN, Kind, seal
from protos.errors import NetworkError, RefusedError
from protos.identity import Identity
from protos.limits import HOLDINGS_MAX
from protos.log import Chain, open_entry, seal_entry
from protos.run_config import RunConfig, TrustConfig
from protos.tick import tick_body
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import envelope_pb2, log_pb2
from tests.unit.coordinator.driver import LAYOUT, config, digest_of, sha, snapshot_at
from tests.unit.coordinator.serving import (
    COORDINATOR,
    LivePeer,
    Served,
    create_request,
    eventually,
    identity,
    operator_stub,
    peers,
    served,
    tick_of,
)

WAITS = config(min_peers=2, steps=5)


async def one_step(swarm: list[LivePeer]) -> list[pb.FollowResponse]:
    """Everyone hears the tick, contributes and holds; the entries as each heard them."""
    ticks = [tick_of(await peer.until("tick")) for peer in swarm]
    for peer, tick in zip(swarm, ticks, strict=True):
        assert await peer.contribute(tick, swarm) == []
    heard = [await peer.until("entry") for peer in swarm]
    for peer, tick in zip(swarm, ticks, strict=True):
        state = pb.AppliedState(step=tick.step, state_digest=digest_of(tick.step))
        assert await peer.client.report(pb.ReportBody(applied=[state])) == []
    return heard


async def begin(here: Served, swarm: list[LivePeer]) -> None:
    for peer in swarm:
        await peer.join()
    for peer in swarm:
        assert await peer.ready() == []
    assert here.runtime.run.phase is Phase.OPEN


async def test_a_peer_hears_whether_its_announcement_counts_as_heard(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        ada, bob = swarm
        tick = tick_of(await ada.until("tick"))

        async def tell(peer: LivePeer, **changed: object) -> pb.ReportResponse:
            return await peer.client.tell(pb.ReportBody(announcement=peer.announcement(tick, **changed)))

        assert (await tell(ada)).announcement_taken
        assert (await tell(ada)).announcement_taken, "said again"
        assert not (await tell(ada, payload_sha256=digest_of(9))).announcement_taken, "another payload"
        assert not (await tell(bob, parent_hash=bytes(32))).announcement_taken, "of another log"
        assert not (await bob.client.tell(pb.ReportBody())).announcement_taken


async def test_two_peers_to_the_end(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        chain = Chain(here.invite.run_id, COORDINATOR.public_key)
        for _ in range(5):
            heard = await one_step(swarm)
            assert heard[0] == heard[1]
            chain.extend(heard[0].entry.SerializeToString(deterministic=True))
        notice = await swarm[0].until("notice")
        while notice.notice.kind != pb.NoticeKind.NOTICE_KIND_FINISHED:
            notice = await swarm[0].until("notice")
        facts, _ = await swarm[0].client.get_run()
        assert (facts.phase, facts.head_step) == (pb.Phase.PHASE_FINISHED, 5)
        assert facts.head_hash == chain.head
        assert {p.state_digest for p in facts.peers} == {digest_of(5)}
        assert [p.votes_accepted for p in facts.peers] == [5, 5]
        page, head = await swarm[0].client.entries(1)
        assert (len(page), head) == (5, 5)
        registry = here.hub.metrics.registry
        name = here.invite.run_id.hex()[:16]
        assert registry.get_sample_value("swarmentum_entries_total", {"run": name}) == 5
        assert registry.get_sample_value("swarmentum_head_step", {"run": name}) == 5
    async with served(tmp_path, WAITS) as again:
        assert again.journal.entries(again.invite.run_id, 1, 9) == page, "bit for bit what it was before the restart"


async def test_join_and_challenge_are_used_once(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, here.channel() as channel:
        stub = rpc.CoordinatorServiceStub(channel)
        run_id = here.invite.run_id
        challenge = (await stub.GetChallenge(pb.GetChallengeRequest(run_id=run_id))).challenge
        body = pb.JoinBody(challenge=challenge, layout_digest=LAYOUT, device="cpu")
        request = pb.JoinRequest(envelope=seal(identity(0), Kind.KIND_JOIN, run_id, body))
        assert len((await stub.Join(request)).session_id) == 16
        for again in (request, pb.JoinRequest(envelope=seal(identity(1), Kind.KIND_JOIN, run_id, body))):
            with pytest.raises(grpc.RpcError, match="replayed"):
                await stub.Join(again)
        assert here.refused("replayed") == 2


async def test_a_flood_of_reports_is_cut_before_its_signatures_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one connection; others go on, and the peer tells again later."""
    monkeypatch.setattr(sessions, "CONNECTION_REPORTS_MAX", 5)
    monkeypatch.setattr(sessions, "CONNECTION_REPORT_MS", 1e9)
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,), here.channel() as channel:
        stub = rpc.CoordinatorServiceStub(channel)
        forged = seal(identity(1), Kind.KIND_REPORT, here.invite.run_id, pb.ReportBody())
        forged.signature = bytes(64)
        codes = []
        for _ in range(8):
            with pytest.raises(grpc.RpcError) as error:
                await stub.Report(pb.ReportRequest(envelope=forged))
            codes.append(error.value.code())
        assert codes[5:] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
        assert grpc.StatusCode.RESOURCE_EXHAUSTED not in codes[:5]
        assert here.refused("bad_signature") == 5
        await peer.join()
        await peer.client.report(pb.ReportBody())


async def test_reports_of_one_peer_are_taken_one_at_a_time_and_of_all_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams a few free identities have, they hold up nobody whose votes were accepted."""
    came, under_way, most, gate = list[str](), Counter[bytes](), Counter[bytes](), asyncio.Event()
    may_report = sessions.Sessions.may_report

    def counted(self: sessions.Sessions, connection: str, now_ms: int) -> bool:
        came.append(connection)
        return may_report(self, connection, now_ms)

    async with served(tmp_path, WAITS) as here, peers(here, 4) as swarm:
        ada, bob, *strangers = swarm
        await begin(here, [ada, bob])
        await one_step([ada, bob])
        for stranger in strangers:
            await stranger.join()
        handle = here.runtime.handle

        async def gated(event: Any) -> Any:
            if (key := getattr(event, "public_key", bob.key)) == bob.key:
                return await handle(event)
            under_way[key] += 1
            most[key] = max(under_way[key], most[key])
            most[b""] = max(sum(under_way[stranger.key] for stranger in strangers), most[b""])
            await gate.wait()
            under_way[key] -= 1
            return await handle(event)

        monkeypatch.setattr(here.runtime, "handle", gated)
        monkeypatch.setattr(sessions.Sessions, "may_report", counted)
        loop, slow = asyncio.get_running_loop(), [ada, *strangers]
        calls = [loop.create_task(peer.client.report(pb.ReportBody())) for peer in slow for _ in range(3)]
        await eventually(lambda: len(came) == len(calls))
        assert await bob.client.report(pb.ReportBody()) == []
        gate.set()
        assert await asyncio.gather(*calls) == [[]] * len(calls)
        assert [most[peer.key] for peer in slow] == [1, 1, 1]
        assert most[b""] == 1


async def test_a_report_counts_once_and_may_be_overtaken(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,), here.channel() as channel:
        await peer.join()
        stub = rpc.CoordinatorServiceStub(channel)

        def request(sequence: int, session: bytes | None = None) -> pb.ReportRequest:
            body = pb.ReportBody(session_id=session or peer.client._session, sequence=sequence)
            return pb.ReportRequest(envelope=seal(identity(0), Kind.KIND_REPORT, here.invite.run_id, body))

        await stub.Report(request(10))
        await stub.Report(request(9))  # overtaken by 10
        for sequence in (10, 9, 1, 0):  # 1 was the Follow
            with pytest.raises(grpc.RpcError, match="replayed"):
                await stub.Report(request(sequence))
        await stub.Report(request(200))
        with pytest.raises(grpc.RpcError, match=r"replayed: sequence 11 after 200: .* went back to an earlier state"):
            await stub.Report(request(11))  # too far behind to know
        with pytest.raises(grpc.RpcError) as error:
            await stub.Report(request(201, bytes(16)))
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


async def test_strangers_bytes_are_refused_with_their_reason(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,), here.channel() as channel:
        await peer.join()
        stub = rpc.CoordinatorServiceStub(channel)
        run_id = here.invite.run_id

        def good() -> Any:
            body = pb.ReportBody(session_id=peer.client._session, sequence=peer.client._next())
            return seal(identity(0), Kind.KIND_REPORT, run_id, body)

        async def refused(envelope: Any, reason: str, code: grpc.StatusCode) -> None:
            before = here.refused(reason)
            with pytest.raises(grpc.RpcError) as error:
                await stub.Report(pb.ReportRequest(envelope=envelope))
            assert error.value.code() == code  # type: ignore[attr-defined]
            assert here.refused(reason) == before + 1

        invalid = grpc.StatusCode.INVALID_ARGUMENT
        changed = good()
        changed.signature = bytes([changed.signature[0] ^ 1]) + changed.signature[1:]
        await refused(changed, "bad_signature", invalid)
        changed = good()
        changed.body += b"\x00"
        await refused(changed, "bad_signature", invalid)
        await refused(seal(identity(0), Kind.KIND_FOLLOW, run_id, pb.FollowBody()), "wrong_kind", invalid)
        await refused(
            seal(identity(0), Kind.KIND_REPORT, bytes(32), pb.ReportBody()), "wrong_run", grpc.StatusCode.NOT_FOUND
        )
        changed = good()
        changed.public_key = b"short"
        await refused(changed, "malformed", invalid)
        many = pb.ReportBody(holdings=[pb.Holding()] * (HOLDINGS_MAX + 1))
        await refused(seal(identity(0), Kind.KIND_REPORT, run_id, many), "out_of_range", invalid)
        foreign = pb.ReportBody(announcement=LivePeer(5, peer.client, run_id).announcement(_tick(run_id)))
        await refused(seal(identity(0), Kind.KIND_REPORT, run_id, foreign), "unknown_signer", invalid)
        nan = pb.ReportBody(announcement=peer.announcement(_tick(run_id), loss=float("nan")))
        await refused(seal(identity(0), Kind.KIND_REPORT, run_id, nan), "out_of_range", invalid)
        evil = pb.ReportBody(abstained=pb.Abstention(step=1, reason="\x1b]0;owned"))
        await refused(seal(identity(0), Kind.KIND_REPORT, run_id, evil), "out_of_range", invalid)
        long = pb.ReportBody(abstained=pb.Abstention(step=1, reason="x" * 129))
        await refused(seal(identity(0), Kind.KIND_REPORT, run_id, long), "out_of_range", invalid)
        fine = pb.ReportBody(abstained=pb.Abstention(step=1, reason="the gradient is not finite"))
        assert await peer.client.report(fine) == []
        assert await peer.client.report(pb.ReportBody()) == [], "the peer itself is not disturbed"


async def test_status_says_why_a_peer_has_no_votes(tmp_path: Path) -> None:
    """It said `syncing` or `ready` alone, and of one peer's NaN nothing, while others voted."""
    async with served(tmp_path, WAITS) as here, peers(here, 2) as (ada, bob):

        async def why() -> dict[bytes, str]:
            facts, _ = await ada.client.get_run()
            return {peer.public_key: peer.standing_reason for peer in facts.peers}

        await ada.join()
        await bob.join()
        assert await why() == {ada.key: "builds the model", bob.key: "builds the model"}
        await ada.ready()
        await bob.ready()
        await bob.until("tick")
        assert await why() == {ada.key: "", bob.key: ""}
        said = pb.Abstention(step=1, reason="the loss is nan", not_finite=True)
        await bob.client.report(pb.ReportBody(abstained=said))
        assert await why() == {ada.key: "", bob.key: "no votes of step 1: the loss is nan"}
        before = here.runtime.run
        late = replace(before.peers[bob.key], phase=PeerPhase.SYNCING, applied_step=-1)
        run = replace(before, head_step=12, peers={**before.peers, bob.key: late}, snapshots=(snapshot_at(10),))
        here.runtime.run = run
        assert (await why())[bob.key] == "gets the state of step 10, which none of the peers that are here have"
        few, all_that_are_named = (hub._idle(run, late, number) for number in (15, 16))
        assert ("which 15 of the peers" in few, "which 16 or more of the peers" in all_that_are_named) == (True, True)
        here.runtime.run = replace(run, peers={**run.peers, bob.key: replace(late, applied_step=3)})
        assert (await why())[bob.key] == "9 steps behind"


async def test_evidence_must_be_the_offenders_own_words(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as (ada, bob):
        await ada.join()
        await bob.join()
        tick = _tick(here.invite.run_id)

        async def report(*announcements: Any, count: int = 1) -> list[str]:
            first, second = (said.SerializeToString() for said in announcements)
            said = log_pb2.Equivocation(first=first, second=second)
            return await ada.client.report(pb.ReportBody(equivocations=[said] * count))

        one, other = bob.announcement(tick), bob.announcement(tick, payload_sha256=bytes(32))
        by_ada = ada.announcement(tick, payload_sha256=bytes(32))
        for pair, why in (((one, one), "replayed"), ((one, by_ada), "unknown_signer")):
            with pytest.raises(RefusedError, match=why):
                await report(*pair)
        by_ada.public_key = bob.key
        with pytest.raises(RefusedError, match="bad_signature"):
            await report(one, by_ada)
        with pytest.raises(RefusedError, match="out_of_range"):
            await report(one, other, count=limits.EQUIVOCATIONS_MAX + 1)
        assert not here.runtime.run.standings
        assert await report(one, other) == []
        assert await report(other, one) == []
        facts, _ = await ada.client.get_run()
        [excluded] = facts.exclusions
        assert (excluded.public_key, excluded.step, excluded.proven) == (bob.key, 0, True)
        assert {peer.public_key: peer.standing for peer in facts.peers} == {ada.key: "counted", bob.key: "excluded"}
        with pytest.raises(RefusedError, match="two payloads announced for step 1"):
            await bob.client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
    async with served(tmp_path, WAITS) as here:
        assert here.runtime.run.standings[bob.key].excluded, "a restart forgets nothing"


def _tick(run_id: bytes) -> log_pb2.Tick:
    return log_pb2.Tick(step=1, parent_hash=run_id)


async def test_the_pin_decides(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here:
        address = here.invite.coordinators[0]
        pem = await asyncio.to_thread(fetch_certificate, address, here.certificate.sha256)
        assert pem.split() == here.certificate.certificate_pem.split()
        with pytest.raises(RefusedError, match="not the invite's coordinator"):
            await asyncio.to_thread(fetch_certificate, address, sha("another"))
    with pytest.raises(NetworkError):
        await asyncio.to_thread(fetch_certificate, address, here.certificate.sha256)


async def test_a_certificate_that_changed_is_told_to_a_peer_that_follows(tmp_path: Path) -> None:
    """gRPC's words were about a handshake and a protocol, for as long as the peer ran."""
    before = home_files.load_or_create(tmp_path / "before")
    async with served(tmp_path, WAITS) as here:
        [address], ways = here.invite.coordinators, CoordinatorWays(before.sha256)
        async with pinned_aio_channel(address, before.certificate_pem) as channel:
            with pytest.raises(grpc.RpcError) as failed:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        told = await ways.explained(error_of(failed.value), address)
        assert "has another TLS certificate; ask the run's operator" in str(told)
        assert isinstance(told, NetworkError), "a network on the way may have put it there for a while"
        same = await CoordinatorWays(here.certificate.sha256).explained(error_of(failed.value), address)
        assert "handshake failed" in str(same).lower()


async def test_health_answers(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, here.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "swarmentum.v1.CoordinatorService", "swarmentum.v1.OperatorService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_service_that_is_not_here_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, here.channel() as channel:
        # It asks nothing: a question that is written after the refusal came fails with INTERNAL, in the client itself
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_late_follower_gets_the_log_then_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of one entry, and entries committed while the follower reads: none missed, none doubled."""
    monkeypatch.setattr(runtime_module, "ENTRIES_PAGE_MAX", 1)
    async with served(tmp_path, config(min_peers=2, max_peers=3, steps=40)) as here, peers(here, 3) as swarm:
        await begin(here, swarm[:2])
        for _ in range(4):
            await one_step(swarm[:2])
        late, steps = swarm[2], [0]

        async def read() -> None:
            steps[0] = ((event := await late.join()).entry and 1) or 0
            chain = Chain(here.invite.run_id, COORDINATOR.public_key)
            while True:
                if event.WhichOneof("event") == "entry":
                    steps[0] = chain.extend(event.entry.SerializeToString(deterministic=True)).entry.step
                event = await late.event()

        reader = asyncio.get_running_loop().create_task(read())
        for _ in range(12):
            await one_step(swarm[:2])
        await eventually(lambda: steps[0] == 16 or reader.done())
        assert not reader.done(), reader.exception()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def test_second_stream_ends_the_first(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        first = peer.stream
        assert first is not None
        second = peer.client.follow(0)
        assert (await anext(second)).HasField("notice")
        with pytest.raises((StopAsyncIteration, NetworkError)):
            await asyncio.wait_for(anext(first), 240)
        assert here.runtime.run.peers[peer.key].phase is PeerPhase.SYNCING
        assert await peer.ready() == []
        peer.stream = second  # type: ignore[assignment]


async def test_broken_stream_makes_the_peer_absent(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        assert here.runtime.run.peers[peer.key].phase is PeerPhase.SYNCING
        await peer.close()
        await eventually(lambda: here.runtime.run.peers[peer.key].phase is PeerPhase.ABSENT)
        assert here.runtime.run.peers[peer.key].gone


async def test_follower_that_does_not_read_is_cut_and_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOWER_EVENTS_MAX", 3)
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        runtime = here.runtime
        for _ in range(4):
            runtime.streams.send(None, pb.FollowResponse(notice=pb.Notice(reason="x")))
        assert not runtime.streams.following
        await eventually(lambda: runtime.run.peers[peer.key].phase is PeerPhase.ABSENT)


async def test_late_disconnect_does_not_hit_the_next_stream(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        assert await here.runtime.handle(Disconnected(peer.key)) == []
        assert here.runtime.run.peers[peer.key].phase is PeerPhase.SYNCING
        await peer.client.report(pb.ReportBody(leaving=True))
        assert here.runtime.run.peers[peer.key].phase is PeerPhase.ABSENT


async def test_operator_requests_need_the_coordinators_key_and_count_once(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, here.channel() as channel:
        stub = operator_stub(channel)
        for request, reason in (
            (create_request(WAITS, by=Identity.generate()), "unknown_signer"),
            (create_request(WAITS, kind=Kind.KIND_JOIN), "wrong_kind"),
            (
                create_request(RunConfig(clock=config(min_peers=2).clock, trust=TrustConfig(enabled=True))),
                "out_of_range",
            ),
        ):
            with pytest.raises(grpc.RpcError, match=reason):
                await stub.CreateRun(request)
            assert here.refused(reason) == 1
        request = create_request(WAITS)
        await stub.CreateRun(request)
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.CreateRun(request)
        body = pb.ListRunsBody(nonce=bytes(16))
        runs = (await stub.ListRuns(pb.ListRunsRequest(envelope=seal(COORDINATOR, Kind.KIND_ADMIN, NO_RUN, body)))).runs
        assert len(runs) == 2
    async with served(tmp_path, WAITS) as again, again.channel() as channel:
        with pytest.raises(grpc.RpcError, match="replayed"):
            await operator_stub(channel).CreateRun(request)
        assert len(again.hub.runs) == 2


async def test_a_journal_that_lost_its_end_gets_it_back_from_a_peer(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        for _ in range(3):
            await one_step(swarm)
        entries = here.journal.entries(here.invite.run_id, 1, 9)
    with here.journal._engine.begin() as connection:
        lost = sa.text(
            "DELETE FROM records WHERE number >= (SELECT number FROM records WHERE kind = 'entry' AND step = 2)"
        )
        connection.execute(lost)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as (ada, bob):
        with pytest.raises(BehindError, match="the head is 1"):
            await ada.join(from_step=3)
        run_id = here.invite.run_id
        second = open_entry(entries[1], run_id=run_id, coordinator=COORDINATOR.public_key).entry
        foreign = seal_entry(identity(0), run_id, second).envelope
        for offered, newest, why in (
            ([foreign], entries[2], "unknown_signer"),
            (entries[1:], foreign, "unknown_signer"),
            (entries[2:], entries[2], "does not follow"),
            ([entries[1]] * 65, entries[2], "out_of_range"),
        ):
            with pytest.raises(RefusedError, match=why):
                await ada.client.offer(offered, newest)
        assert (here.runtime.run.head_step, here.runtime.run.lost_until) == (1, 0)
        assert await ada.client.offer(entries[1:2], entries[2]) == 2
        assert "waiting for a peer that gives back entries 3 to 3" in here.runtime.run.reason
        assert await ada.client.offer(entries[1:], entries[2]) == 3
        assert await ada.client.offer(entries[1:], entries[2]) == 3, "another peer gave the same"
        assert here.journal.entries(here.invite.run_id, 1, 9) == entries, "the same bytes as before"
        for peer in (ada, bob):
            await peer.join(from_step=3)
        for peer in (ada, bob):
            await peer.ready(3)
        await one_step([ada, bob])
        assert (await ada.client.entries((1 << 64) - 1))[0] == []
        head = here.runtime.run.head_hash
    async with served(tmp_path, WAITS) as here:
        assert here.runtime.run.head_hash == head


async def test_entries_are_taken_back_within_a_session_only(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.client.connect()
        with pytest.raises(SessionLostError):
            await peer.client.offer([], b"")


async def test_request_of_a_peer_that_hangs_up_is_done_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled between the journal and the new state, the same entry would be written twice."""
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        tick = tick_of(await swarm[0].until("tick"))
        await swarm[0].contribute(tick, swarm)
        gate, writing, append = asyncio.Event(), asyncio.Event(), here.journal.append
        loop = asyncio.get_running_loop()

        def slow(run_id: bytes, *records: Any) -> None:
            if any(isinstance(record, EntryCommitted) for record in records):
                loop.call_soon_threadsafe(writing.set)
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
            append(run_id, *records)

        monkeypatch.setattr(here.journal, "append", slow)
        call = loop.create_task(swarm[1].contribute(tick, swarm))
        await asyncio.wait_for(writing.wait(), 240)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await swarm[1].close()
        gate.set()
        await eventually(lambda: here.runtime.run.head_step == 1)
        await eventually(lambda: here.runtime.run.peers[swarm[1].key].phase is PeerPhase.ABSENT)
        records = list(here.journal.records(here.invite.run_id))
        assert sum(isinstance(r, EntryCommitted) for r in records) == 1
        assert sum(isinstance(r, TickOpened) for r in records) == 2


@pytest.mark.parametrize("kind", ["tick", "entry"])
async def test_failing_disk_stops_nothing_for_good(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are told UNAVAILABLE, come back, tell again; no step is lost, none is there twice.

    An entry and the tick after it are one transaction: whichever of them fails, neither is written.
    """
    monkeypatch.setattr(throttled_log, "RETRY_MS_MIN", 20)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        await one_step(swarm)
        tick = tick_of(await swarm[0].until("tick"))
        engine = here.journal._engine
        with engine.begin() as connection:
            stop = f"CREATE TRIGGER full BEFORE INSERT ON records WHEN NEW.kind = '{kind}' "
            connection.execute(sa.text(stop + "BEGIN SELECT RAISE(ABORT, 'disk full'); END"))
        await swarm[0].contribute(tick, swarm)
        with pytest.raises(NetworkError):
            await swarm[1].contribute(tick, swarm)
        await eventually(lambda: not here.runtime.streams.newest)
        with engine.begin() as connection:
            connection.execute(sa.text("DROP TRIGGER full"))
        head = len(here.journal.entries(here.invite.run_id, 1, 99))
        assert head == 1
        for peer in swarm:
            await peer.join(from_step=head)
        for peer in swarm:
            await peer.ready(head)
        if here.runtime.run.step is None:
            await eventually(lambda: here.runtime.run.step is not None)
        for peer in swarm:
            await peer.contribute(_open_tick(here), swarm)
        await eventually(lambda: here.runtime.run.head_step == head + 1)
        entries = [r for r in here.journal.records(here.invite.run_id) if isinstance(r, EntryCommitted)]
        assert [r.entry.step for r in entries] == list(range(1, head + 2))


async def test_peer_that_a_failing_disk_made_unknown_is_told_to_join_again(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        here.runtime._stale = True
        with pytest.raises(NetworkError):
            await anext(peer.client.follow(0))
        await here.runtime.handle(TimerFired())
        with pytest.raises(SessionLostError, match="join first"):
            await anext(peer.client.follow(0))
        assert peer.key not in here.runtime.streams.newest
        await peer.join()
        assert await peer.ready() == []


def _open_tick(here: Served) -> log_pb2.Tick:
    return tick_body(here.runtime.run.step.tick)


async def test_finished_run_that_was_restarted_ends_without_its_peers(tmp_path: Path) -> None:
    short = config(min_peers=2, steps=1, deadline_ms_min=100, deadline_ms_max=100)
    async with served(tmp_path, short) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        ticks = [tick_of(await peer.until("tick")) for peer in swarm]
        for peer, tick in zip(swarm, ticks, strict=True):
            await peer.contribute(tick, swarm)
        assert here.runtime.run.phase is Phase.FINISHED
        assert not here.runtime.run.finished_told
    async with served(tmp_path, short) as again:
        await eventually(lambda: again.runtime.run.finished_told)


async def test_a_place_that_is_taken_meanwhile_ends_the_peer_that_follows(tmp_path: Path) -> None:
    async with served(tmp_path, config(max_peers=1)) as here, peers(here, 2) as swarm:
        for peer in swarm:
            await peer.client.connect()
            await peer.client.join(pb.JoinBody(layout_digest=LAYOUT, parameters=10, device="cpu"))
        first = swarm[0].client.follow(0)
        await anext(first)
        with pytest.raises(RefusedError, match="the run is full: 1 of 1 peers are here"):
            await anext(swarm[1].client.follow(0))


async def test_reports_on_a_stream_and_addresses_alone(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as (peer,):
        await peer.join()
        for _ in range(3):
            assert not (await peer.client.tell(pb.ReportBody())).refusals
        stream = peer.client._telling
        assert stream is not None
        assert isinstance(await peer.client.bootstrap(), list)
        peer.client._session = bytes(16)
        with pytest.raises(SessionLostError):
            await peer.client.tell(pb.ReportBody())
        assert peer.client._telling is None, "the next report opens another stream"


async def test_an_entry_and_its_tick_are_packed_against_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "BYTES_MIN", 0)
    packed: list[tuple[bytes, bytes]] = []

    def pack(data: bytes, before: bytes) -> bytes:
        packed.append((data, before))
        return calls.pack(data, before)

    monkeypatch.setattr(following, "pack", pack)
    async with served(tmp_path, WAITS) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        chain = Chain(here.invite.run_id, COORDINATOR.public_key)
        for _ in range(4):
            heard = await one_step(swarm)
            assert heard[0] == heard[1]
            chain.extend(heard[0].entry.SerializeToString(deterministic=True))
    assert len(packed) == 3, "the first had none before it"
    assert [before for _, before in packed[1:]] == [data for data, _ in packed[:-1]]


def test_only_a_follower_that_has_the_message_before_gets_a_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BYTES_MIN", 0)
    some = following.EventStreams()

    def decide(step: int) -> None:
        some.hold(envelope_pb2.SignedEnvelope(body=b"entry %d" % step))
        some.send_tick(None, pb.TickEvent(deadline_ms=step))

    def follow(key: bytes, *, unpacks: bool) -> following.Events:
        queue = some.following[key] = some.open(key, unpacks=unpacks)
        return queue

    def kinds(queue: following.Events) -> list[str | None]:
        found = []
        while not queue.empty():
            data = queue.get_nowait()
            found.append(None if data is None else pb.FollowResponse.FromString(data).WhichOneof("event"))
        return found

    old, new = follow(b"old", unpacks=False), follow(b"new", unpacks=True)
    decide(1)
    decide(2)
    late = follow(b"late", unpacks=True)
    again = follow(b"new", unpacks=True)
    decide(3)
    decide(4)
    assert kinds(old) == ["decided"] * 4
    assert kinds(new) == ["decided", "decided_zstd", None]
    assert kinds(late) == kinds(again) == ["decided", "decided_zstd"]


async def test_only_the_signer_of_a_streams_first_report_may_leave_signatures_out(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 2) as (ada, bob):
        await ada.join()
        await bob.join()

        def unsigned_report(of: LivePeer) -> pb.ReportRequest:
            request = of.client._reported(pb.ReportBody())
            request.envelope.signature = b""
            return request

        async def _all(answers: AsyncIterator[pb.ReportResponse]) -> list[pb.ReportResponse]:
            return [answer async for answer in answers]

        stub = rpc.CoordinatorServiceStub(ada.client._channel)
        mine = ada.client._reported(pb.ReportBody())
        for asked, why in (([unsigned_report(ada)], "wrong length"), ([mine, unsigned_report(bob)], "wrong length")):
            stream = stub.Tell(iter(asked))
            with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
                await _all(stream)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="wrong length"):
            await stub.Report(unsigned_report(ada))
        for _ in range(3):
            assert not (await ada.client.tell(pb.ReportBody())).refusals
