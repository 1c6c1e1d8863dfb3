"""Who the operator excludes and readmits: the rule, the clock without them, the journal, the service and the commands."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.clock import admission, trust
from coordinator.clock.effects import Append, Denial, EndStream, PeerExcluded, PeerReadmitted, Refuse, SendTick
from coordinator.clock.events import Connected, Disconnected, ExclusionAsked, ReadmissionAsked, Reported, TimerFired
from coordinator.clock.state import PeerPhase, Phase
from coordinator.clock.trust import Standing
from coordinator.commands import operator
from coordinator.commands.peers import peer_named
from protos import limits
from protos.calls import SessionLostError
from protos.envelope import NO_RUN, Kind, seal
from protos.errors import NetworkError, OperatorError, RefusedError
from protos.identity import Identity, peer_id
from protos.log import Exclusion
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import coordinator_pb2_grpc as rpc
from protos.v1 import log_pb2
from tests.unit.coordinator.driver import Harness, Swarm, claim_of, config, digest_of, joined, key
from tests.unit.coordinator.serving import (
    COORDINATOR,
    LivePeer,
    Served,
    eventually,
    identity,
    operated,
    peers,
    read_back,
    served,
    tick_of,
)
from tests.unit.coordinator.test_machine import contribute, offence_of, opened, opened_together
from tests.unit.coordinator.test_trust import Watched

TEXT = "excluded by the operator of this run: spam"


def exclude(harness: Harness, number: int, reason: str = "spam") -> list[Any]:
    return harness.feed(ExclusionAsked(key(number), reason))


def readmit(harness: Harness, number: int) -> list[Any]:
    return harness.feed(ReadmissionAsked(key(number)))


def comes(harness: Harness, *numbers: int) -> None:
    """They join, and have the state."""
    head = harness.run.head_step
    harness.comes(*numbers, at=head)


def decide(harness: Harness, *numbers: int) -> None:
    """They close the step, and apply it."""
    contribute(harness, *numbers)
    head = harness.run.head_step
    harness.applies(head, *numbers)


# ---- the clock goes on without them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_out_at_once_told_why_and_named_in_the_log_without_evidence(strict: bool) -> None:
    harness = opened_together(strict=strict)
    claim = claim_of(harness.ticks[-1], 0)
    harness.feed(Reported(key(0), claim=claim, holdings=((1, key(0), claim.payload_sha256),)))
    effects = exclude(harness, 0)
    assert effects[:2] == [Append(PeerExcluded(key(0), "spam")), EndStream(key(0))], "journalled before it is told"
    harness.restart()
    comes(harness, 1, 2)
    contribute(harness, 1, 2)
    [entry] = harness.entries
    assert entry.exclusions == (Exclusion(key(0), TEXT, by_operator=True),)
    assert {c.public_key for c in entry.contributions} == {key(1), key(2)}
    harness.refusals.clear()
    [refusal] = harness.feed(joined(0))
    assert refusal == Refuse(key(0), TEXT, Denial.EXCLUDED)
    harness.feed(Connected(key(0)))
    harness.feed(Reported(key(0), claim=claim))
    assert harness.refusals == [TEXT] * 3
    contribute(harness, 1, 2)
    assert harness.entries[1].exclusions == (), "once"
    before = harness.run.standings
    assert before[key(0)].logged_step == 1
    harness.restart()
    assert harness.run.standings == before


def test_a_strict_step_no_longer_waits_for_who_was_killed() -> None:
    swarm = Swarm(config(min_peers=2, strict=True, steps=12), 3)
    swarm.play(lambda: swarm.run.head_step == 3)
    swarm.kill(swarm.peers[2])
    with pytest.raises(AssertionError, match="strict: waiting for"):
        swarm.play(lambda: swarm.run.head_step == 6, ms_max=600_000)
    swarm.event(ExclusionAsked(key(2), "its machine is gone"))
    assert swarm.run.roster == (key(0), key(1)), "opened again, at once"
    swarm.finish()
    assert [(e.step, x.public_key) for e in swarm.entries for x in e.exclusions] == [(4, key(2))]


def test_a_strict_step_waits_for_the_rest_though_the_excluded_one_was_counted() -> None:
    harness = opened_together(strict=True)
    contribute(harness, 0, 2, holders=(0, 1, 2))
    assert harness.run.step.counted == 0b101
    effects = exclude(harness, 2)
    assert [e.tick.attempt for e in effects if isinstance(e, SendTick)] == [2]
    assert harness.run.roster == (key(0), key(1))
    assert set(harness.run.step.claims) == {key(0)}
    assert harness.run.head_step == 0, "one vote is missing"
    contribute(harness, 0, 1)
    assert {c.public_key for c in harness.entries[0].contributions} == {key(0), key(1)}


def test_the_last_one_that_a_step_waits_for_is_excluded_and_the_step_closes() -> None:
    harness = opened_together()
    contribute(harness, 0, 1)
    assert harness.run.head_step == 0
    exclude(harness, 2)
    assert harness.run.head_step == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_whole_roster_is_excluded_and_others_go_on(strict: bool) -> None:
    harness = opened(strict=strict)
    contribute(harness, 0)
    for n in range(3):
        exclude(harness, n)
    assert harness.run.phase is Phase.OPEN
    assert not harness.run.ready
    harness.now += 200_000
    harness.feed(TimerFired())
    harness.restart()
    comes(harness, 5, 6)
    assert harness.run.roster == (key(0), key(1), key(2)), "too few"
    comes(harness, 7)
    assert harness.run.roster == (key(5), key(6), key(7))
    contribute(harness, 5, 6, 7)
    [entry] = harness.entries
    assert [x.public_key for x in entry.exclusions] == [key(n) for n in range(3)]
    assert {c.public_key for c in entry.contributions} == {key(n) for n in (5, 6, 7)}


def test_fewer_than_min_peers_wait_for_another() -> None:
    harness = opened(strict=True)
    exclude(harness, 2)
    assert "waiting for 3 ready peers" in harness.run.reason
    comes(harness, 4)
    assert harness.run.roster == (key(0), key(1), key(4))


def test_before_the_first_step_and_while_the_run_waits() -> None:
    harness = Harness(config(min_peers=2))
    exclude(harness, 9, "never came")
    comes(harness, 0)
    exclude(harness, 0)
    assert harness.run.phase is Phase.WAITING
    readmit(harness, 0)
    assert harness.run.standings.keys() == {key(9)}, "nothing is left of it: no entry has said it"
    harness.feed(joined(9))
    assert harness.refusals == ["excluded by the operator of this run: never came"]


# ---- readmission -----------------------------------------------------------------------------------------------------


def test_readmitted_the_log_says_so_once_and_it_takes_part() -> None:
    harness = opened_together()
    exclude(harness, 2)
    contribute(harness, 0, 1)
    assert readmit(harness, 2)[0] == Append(PeerReadmitted(key(2)))
    harness.restart()
    assert harness.run.standings[key(2)] == Standing(log_excludes=True)
    comes(harness, 0, 1, 2)
    contribute(harness, 0, 1)
    harness.now += 200_000
    harness.feed(TimerFired())
    assert harness.entries[1].readmitted == (key(2),)
    assert not harness.run.standings, "nothing is held against it, and nothing is left to be said"
    contribute(harness, 0, 1, 2)
    assert key(2) in {c.public_key for c in harness.entries[2].contributions}
    assert harness.entries[2].readmitted == ()
    before = harness.run.standings
    harness.restart()
    assert harness.run.standings == before


def test_the_operator_changes_its_mind_within_a_step() -> None:
    harness = opened_together()
    exclude(harness, 2, "first")
    decide(harness, 0, 1)
    readmit(harness, 2)
    exclude(harness, 2, "second")
    readmit(harness, 2)
    exclude(harness, 2, "third")
    decide(harness, 0, 1)
    assert harness.entries[1].readmitted == ()
    assert [x.reason[-5:] for x in harness.entries[1].exclusions] == ["third"], "the newest word"
    readmit(harness, 2)
    decide(harness, 0, 1)
    assert harness.entries[2].readmitted == (key(2),)


def test_each_no_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = opened_together(steps=1)

    def no(what: type, number: int) -> str:
        harness.refusals.clear()
        effects = harness.feed(what(key(number), "x") if what is ExclusionAsked else what(key(number)))
        assert [type(e) for e in effects] == [Refuse]
        [reason] = harness.refusals
        return reason

    assert "is not excluded" in no(ReadmissionAsked, 1)
    exclude(harness, 7)
    assert f"excluded already: {TEXT}" in no(ExclusionAsked, 7)
    monkeypatch.setattr(trust, "REMOVED_MAX", 1)
    assert "1 peers are excluded, as many as" in no(ExclusionAsked, 8)
    harness.feed(Reported(key(1), offences=(offence_of(0),)))
    assert "announced two payloads for one step" in no(ReadmissionAsked, 0)
    contribute(harness, 1, 2)
    assert harness.run.phase is Phase.FINISHED
    assert "finished" in no(ExclusionAsked, 1)
    assert "finished" in no(ReadmissionAsked, 7)


def test_as_many_readmissions_as_an_entry_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "READMITTED_MAX", 1)
    harness = opened_together()
    exclude(harness, 7)
    exclude(harness, 8)
    decide(harness, 0, 1, 2)
    readmit(harness, 7)
    readmit(harness, 8)
    assert "wait for it" in harness.refusals[-1]
    decide(harness, 0, 1, 2)
    readmit(harness, 8)
    decide(harness, 0, 1, 2)
    assert [e.readmitted for e in harness.entries] == [(), (key(7),), (key(8),)]


def test_proof_of_two_payloads_counts_against_the_excluded_too_and_no_readmission_hides_it() -> None:
    harness = opened_together()
    exclude(harness, 0)
    contribute(harness, 1, 2)
    harness.feed(Reported(key(1), offences=(replace(offence_of(0), step=2),)))
    harness.feed(Reported(key(2), offences=(offence_of(0),)))
    readmit(harness, 0)
    assert "two payloads" in harness.refusals[-1]
    contribute(harness, 1, 2)
    [exclusion] = harness.entries[1].exclusions
    assert exclusion.equivocation is not None
    assert not exclusion.by_operator


def test_who_was_excluded_by_checks_comes_back_on_probation_with_a_clean_score() -> None:
    swarm = Watched(6, bad={5})
    swarm.play(12)
    assert swarm.run.standings[key(5)].excluded
    assert not swarm.run.standings[key(5)].by_operator
    swarm.numbers.remove(5)
    swarm.bad.clear()
    readmit(swarm, 5)
    again = swarm.run.standings[key(5)]
    assert (again.name, again.score, again.evidence, again.weight) == ("probation", 0.0, (), 1.0)
    swarm.come(5)
    swarm.play(3)
    assert any(key(5) in {c.public_key for c in entry.trials} for entry in swarm.entries)
    assert [entry.readmitted for entry in swarm.entries if entry.readmitted] == [(key(5),)]
    before = swarm.run.standings
    swarm.restart()
    assert swarm.run.standings == before


def test_what_the_operator_decided_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "STANDINGS_KEPT", 3)
    many = {key(n): Standing(score=9.0, excluded="x") for n in range(9)}
    many |= {key(10): Standing(excluded="y", by_operator=True), key(11): Standing(log_excludes=True)}
    assert trust.bounded(many, keep=()).keys() >= {key(10), key(11)}


def test_the_journal_gives_back_what_it_got(tmp_path: Path) -> None:
    made = Harness(config())
    exclude(made, 0, "späß, 'quoted' [bold]")
    exclude(made, 1)
    readmit(made, 1)
    run = read_back(made, tmp_path)
    assert run.standings == made.run.standings


# ---- the service and the commands ------------------------------------------------------------------------------------


def refused_joins(here: Served, reason: Denial) -> float:
    labels = {"run": here.invite.run_id.hex()[:16], "reason": reason.value}
    found = here.hub.metrics.registry.get_sample_value("swarmentum_joins_refused_total", labels)
    return found or 0.0


async def entry_by(peer: LivePeer, tick: log_pb2.Tick) -> log_pb2.LogEntry:
    """It alone contributes; the entry, and the state after it is reported."""
    await peer.contribute(tick, [peer])
    entry = log_pb2.LogEntry.FromString((await peer.until("entry")).entry.body)
    await peer.client.report(
        pb.ReportBody(applied=[pb.AppliedState(step=tick.step, state_digest=digest_of(tick.step))])
    )
    return entry


async def test_from_the_command_to_the_peer_that_is_told_why_and_comes_back(tmp_path: Path) -> None:
    settings = config(min_peers=1, strict=True)
    reason = "sends what it did not compute"
    told = f"excluded by the operator of this run: {reason}"
    async with served(tmp_path, settings) as here, peers(here, 2) as (ada, bob):
        for peer in (ada, bob):
            await peer.join()
        for peer in (ada, bob):
            await peer.client.report(pb.ReportBody(applied=[pb.AppliedState(step=0, state_digest=digest_of(0))]))
        for peer in (ada, bob):
            await peer.ready()
        assert [len(tick_of(await peer.until("tick")).roster) for peer in (ada, bob)] == [2, 2]
        with operated(here, "peer") as run:
            listed = await run("list", settings.name)
            assert {row["id"]: row["standing"] for row in listed} == {
                peer_id(ada.key): "counted",
                peer_id(bob.key): "counted",
            }
            with pytest.raises(OperatorError, match="2 peers of this run are called '12D3KooW': 12D3"):
                await run("exclude", settings.name, "12D3KooW", "--reason", reason)
            with pytest.raises(OperatorError, match="no peer of this run"):
                await run("exclude", settings.name, "nobody", "--reason", reason)
            for bad in ("  ", "a\nb", "x" * 257, "\u202e"):
                with pytest.raises(RefusedError, match="the reason takes 1 to 256 bytes, printable"):
                    await run("exclude", settings.name, peer_id(bob.key), "--reason", bad)
            [done] = await run("exclude", settings.name, peer_id(bob.key)[-8:], "--reason", reason)
            assert done == {"id": peer_id(bob.key), "excluded": True, "reason": reason, "known": True}
            with pytest.raises(SessionLostError):
                await bob.client.report(pb.ReportBody())
            with pytest.raises((StopAsyncIteration, NetworkError)):
                await bob.until("no such event")
            with pytest.raises(RefusedError, match=told):
                await bob.join()
            with pytest.raises(RefusedError, match=told):
                await bob.client.may_join()
            assert refused_joins(here, Denial.EXCLUDED) == 2
            [alone] = tick_of(await ada.until("tick")).roster
            assert alone.public_key == ada.key, "the strict step was opened again without it"
            with pytest.raises(RefusedError, match="excluded already"):
                await run("exclude", settings.name, peer_id(bob.key), "--reason", reason)
            [row] = [row for row in await run("list", settings.name) if row["standing"] == "excluded"]
            assert (row["id"], row["standing_reason"], row["by_operator"]) == (peer_id(bob.key), told, True)
    async with served(tmp_path, settings) as here, peers(here, 2) as (ada, bob):  # killed and started again
        with pytest.raises(RefusedError, match=told):
            await bob.join()
        tick = tick_of(await ada.join())
        await ada.ready()
        [exclusion] = (await entry_by(ada, tick)).exclusions
        assert (exclusion.public_key, exclusion.reason, exclusion.by_operator) == (bob.key, told, True)
        assert not exclusion.evidence
        [excluded] = (await ada.client.get_run())[0].exclusions
        assert (excluded.step, excluded.by_operator, excluded.proven) == (1, True, False)
        with operated(here, "peer") as run:
            [back] = await run("readmit", settings.name, peer_id(bob.key)[-6:])
            assert back == {"id": peer_id(bob.key), "excluded": False}
            with pytest.raises(RefusedError, match="is not excluded"):
                await run("readmit", settings.name, peer_id(bob.key))
            await bob.join(from_step=1)
            assert here.runtime.run.peers[bob.key].phase is PeerPhase.SYNCING
            readmitted = (await entry_by(ada, tick_of(await ada.until("tick")))).readmitted
            assert list(readmitted) == [bob.key]
            assert not here.runtime.run.standings
            stranger = Identity.generate().peer_id
            assert not (await run("exclude", settings.name, stranger, "--reason", "x"))[0]["known"]
            assert stranger in {row["id"] for row in await run("list", settings.name)}


async def test_each_join_that_is_refused_is_counted_by_its_kind(tmp_path: Path) -> None:
    async with served(tmp_path, config(max_peers=1, min_peers=1)) as here, peers(here, 2) as (ada, bob):
        await ada.join()
        with pytest.raises(RefusedError, match="full"):
            await bob.join()
        with pytest.raises(RefusedError, match="layout"):
            await ada.client.join(pb.JoinBody(layout_digest=bytes(32), parameters=10, device="cpu"))
        assert (refused_joins(here, Denial.FULL), refused_joins(here, Denial.LAYOUT)) == (1, 1)
        assert refused_joins(here, Denial.EXCLUDED) == 0


async def test_only_the_operator_excludes_and_readmits(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here, here.channel() as channel:
        stub, run_id = rpc.OperatorServiceStub(channel), here.invite.run_id

        def request(name: str, by: Identity = COORDINATOR, **changed: Any) -> Any:
            fields = {"run_id": run_id, "nonce": b"n" * 16, "public_key": key(0), **changed}
            if name == "ExcludePeer":
                fields = {"reason": "spam", **fields}
            body = getattr(pb, f"{name}Body")(**fields)
            return getattr(pb, f"{name}Request")(envelope=seal(by, Kind.KIND_ADMIN, NO_RUN, body))

        for name in ("ExcludePeer", "ReadmitPeer"):
            for changed, reason in (
                ({"by": identity(0)}, "unknown_signer"),
                ({"nonce": b"short"}, "malformed"),
                ({"public_key": b"short", "nonce": name[:1].encode() * 16}, "malformed"),
                ({"run_id": bytes(32), "nonce": name[1:2].encode() * 16}, "no run"),
            ):
                with pytest.raises(grpc.RpcError, match=reason):
                    await getattr(stub, name)(request(name, **changed))
        assert not here.runtime.run.standings
        await stub.ExcludePeer(request("ExcludePeer"))
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.ExcludePeer(request("ExcludePeer"))
        with pytest.raises(grpc.RpcError, match="replayed"):
            await stub.ReadmitPeer(request("ReadmitPeer"))
        captured = request("ExcludePeer", nonce=b"m" * 16).envelope
        with pytest.raises(grpc.RpcError, match="malformed"):
            await stub.ReadmitPeer(pb.ReadmitPeerRequest(envelope=captured))
        await eventually(lambda: here.runtime.run.standings[key(0)].by_operator)


def test_names_of_peers() -> None:
    keys = [identity(n).public_key for n in range(3)]
    run = pb.GetRunResponse(
        peers=[pb.PeerStatus(public_key=k) for k in keys[:2]], exclusions=[pb.ExcludedPeer(public_key=keys[2])]
    )
    for k in keys:
        assert peer_named(run, peer_id(k)) == peer_named(run, peer_id(k)[-8:]) == peer_named(run, peer_id(k)[:14]) == k
    stranger = Identity.generate()
    assert peer_named(run, stranger.peer_id) == stranger.public_key, "one that never came"
    for name, words in (("", "no peer"), ("12D3", "3 peers"), (stranger.peer_id[-8:], "whole peer id")):
        with pytest.raises(OperatorError, match=words):
            peer_named(run, name)


def test_the_reason_fits_in_the_log() -> None:
    from protos.log import REASON_CHARACTERS_MAX

    assert (
        len(trust.removed({}, key(0), "x" * limits.EXCLUSION_REASON_BYTES_MAX)[key(0)].excluded)
        <= REASON_CHARACTERS_MAX
    )


def test_hanging_up_afterwards_changes_nothing() -> None:
    harness = opened_together(strict=True)
    exclude(harness, 2)
    before = len(harness.journal)
    harness.feed(Disconnected(key(2)))
    harness.feed(Disconnected(key(2), leaving=True))
    assert len(harness.journal) == before
    assert harness.run.roster == (key(0), key(1))


def test_what_people_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names and words of others are text, whatever is in them."""
    ada, bob, stranger = (identity(n).public_key for n in range(3))
    why = "excluded by the operator of this run: [bold]spam"
    told = pb.GetRunResponse(
        peers=[
            pb.PeerStatus(public_key=ada, phase=pb.PeerPhase.PEER_PHASE_READY, device="cpu [x]", standing="counted"),
            pb.PeerStatus(
                public_key=bob, phase=pb.PeerPhase.PEER_PHASE_ABSENT, standing="excluded", standing_reason=why
            ),
        ],
        exclusions=[pb.ExcludedPeer(public_key=bob, reason=why, by_operator=True)],
    )

    class Told:
        def __init__(self, home: Path) -> None: ...

        def find(self, run: str) -> pb.GetRunResponse:
            return told

        def exclude_peer(self, genesis: log_pb2.Genesis, public_key: bytes, reason: str) -> None: ...

        def readmit_peer(self, genesis: log_pb2.Genesis, public_key: bytes) -> None: ...

    monkeypatch.setattr(operator, "Operator", Told)
    monkeypatch.setenv("COLUMNS", "240")

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(command.app, ["peer", *arguments, "--home", str(tmp_path)])
        assert done.exit_code == 0, done.output
        return done.stdout

    listed = said("list", "run")
    assert all(words in listed for words in (peer_id(ada)[-8:], peer_id(bob)[-8:], "cpu [x]", why))
    assert f"Peer {peer_id(ada)} is excluded, and told why" in said(
        "exclude", "run", peer_id(ada)[-8:], "--reason", "x"
    )
    assert "has not seen it yet" in said("exclude", "run", peer_id(stranger), "--reason", "x")
    assert said("readmit", "run", peer_id(bob)) == f"Peer {peer_id(bob)} may join again.\n"
    assert CliRunner().invoke(command.app, ["peer", "exclude", "run", peer_id(ada)]).exit_code == 2, "no reason"
