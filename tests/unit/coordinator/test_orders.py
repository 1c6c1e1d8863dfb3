"""Two of three operators decide: what one stolen key cannot do, and what survives a crash. Coordinator and calls are real."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator import __main__ as command
from coordinator.clock import machine, operator_orders
from coordinator.clock.effects import Append, EndStream, EntryCommitted, OrderSigned, Refuse
from coordinator.clock.events import (
    ChangeAsked,
    DecayAsked,
    EntriesReturned,
    ExclusionAsked,
    FinishAsked,
    OrderAsked,
    PauseAsked,
    ReadmissionAsked,
    ResumeAsked,
    RevocationAsked,
    TicketAsked,
)
from coordinator.clock.state import Phase
from coordinator.commands.signing import Operators
from coordinator.store import checkpoint
from node.archive.audit import write_from_log
from node.archive.ledger import export_log, log_entries
from protos import clocks, limits
from protos.changes import settings_of
from protos.envelope import Kind, seal_bytes
from protos.errors import OperatorError, Refusal
from protos.identity import Identity
from protos.invite import Ticket
from protos.log import Chain, Entry, Exclusion, entry_body, seal_entry
from protos.orders import End, OperatorOrder, SignedOrder, open_end, order_body, order_id, seal_end
from protos.run_config import RunConfig, config_from_json
from protos.run_sections import AdmissionConfig, OperatorsConfig
from protos.v1 import coordinator_pb2 as pb
from protos.v1 import envelope_pb2
from tests.unit.coordinator.driver import Harness, config, joined, key
from tests.unit.coordinator.serving import COORDINATOR, Served, identity, operated, operator_stub, peers, served
from tests.unit.coordinator.test_machine import opened_together
from tests.unit.coordinator.test_peers import decide
from tests.unit.coordinator.test_service import begin, one_step

ADA, BOB, CID, EVE = (Identity.from_seed(bytes([200 + n]) * 32) for n in range(4))
NOW = 1_700_000_000_000
HOUR = operator_orders.WAITS_MS_MIN
KEYS = OperatorsConfig(keys=[ADA.peer_id, BOB.peer_id, CID.peer_id], needed=2)


def guarded(**clock: object) -> RunConfig:
    return config(**clock).model_copy(update={"operators": KEYS})


def order(nonce: int = 0, *, after_ms: int = HOUR, **says: Any) -> bytes:
    return order_body(OperatorOrder(bytes([nonce]) * 16, NOW + after_ms, **(says or {"finishes": True})))


def asked(harness: Harness, by: Identity, body: bytes, unix_ms: int = NOW) -> OrderAsked:
    envelope = seal_bytes(by, Kind.KIND_ORDER, harness.run_id, body)
    return OrderAsked(body, by.public_key, envelope.signature, unix_ms)


def sign(harness: Harness, by: Identity, body: bytes, unix_ms: int = NOW) -> list[Any]:
    return harness.feed(asked(harness, by, body, unix_ms))


def why(effects: list[Any]) -> str:
    [refusal] = [it for it in effects if isinstance(it, Refuse)]
    assert not [it for it in effects if isinstance(it, Append)], "a refusal writes nothing"
    return str(refusal.reason)


def running(count: int = 2, **clock: object) -> Harness:
    return opened_together(count, operators=KEYS, **clock)


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_an_exclusion_waits_for_the_second_key_and_the_entry_has_the_order() -> None:
    harness = running(3)
    body = order(excludes=key(2), reason="spam")
    assert [type(it) for it in sign(harness, ADA, body)] == [Append]
    assert key(2) in harness.run.step.tick.places  # type: ignore[union-attr]
    assert not harness.run.standings.get(key(2), None), "one signature excludes nobody"
    effects = sign(harness, BOB, body)
    assert EndStream(key(2)) in effects
    assert sum(isinstance(it, Append) and isinstance(it.record, OrderSigned) for it in effects) == 1
    assert harness.run.standings[key(2)].excluded
    decide(harness, 0, 1)
    entry = harness.entries[-1]
    assert [it.public_key for it in entry.exclusions] == [key(2)]
    [logged] = entry.orders
    assert (logged.body, logged.signers) == (body, (ADA.public_key, BOB.public_key))
    assert not harness.run.orders.unlogged
    follow(harness)


def follow(harness: Harness, first: int = 0) -> None:
    """The log from here on passes the readers' rule."""
    chain = Chain(harness.run_id, COORDINATOR.public_key, operators=KEYS)
    for entry in harness.entries[first:]:
        chain.extend(seal_entry(COORDINATOR, harness.run_id, entry).envelope)


def test_the_coordinators_own_key_decides_none_of_the_three_and_no_decay() -> None:
    harness = running(3)
    harness.feed(PauseAsked(""))
    assert "2 of the 3 operators" in why(harness.feed(ExclusionAsked(key(2), "spam")))
    assert "2 of the 3 operators" in why(harness.feed(FinishAsked("")))
    assert "2 of the 3 operators" in why(harness.feed(ChangeAsked(settings_of({"clock.steps": 60}))))
    constant = config().optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    harness.run = replace(harness.run, config=harness.run.config.model_copy(update={"optimizer": constant}))
    assert "needs an order" in why(harness.feed(DecayAsked(5)))


def test_the_coordinators_own_key_removes_no_guests_with_their_ticket() -> None:
    ticket, invited = Ticket(b"t" * 16, 0, 1), AdmissionConfig(mode="invite")
    harness = Harness(guarded().model_copy(update={"admission": invited}))
    harness.feed(TicketAsked(ticket, NOW))
    harness.feed(replace(joined(1), ticket=ticket, unix_ms=NOW))
    assert key(1) in harness.run.guests
    assert "peer exclude" in why(harness.feed(RevocationAsked(ticket.ticket_id, with_peers=True)))
    assert key(1) in harness.run.guests
    assert isinstance(harness.feed(RevocationAsked(ticket.ticket_id, with_peers=False))[0], Append)


def test_each_signature_that_does_not_count_says_why() -> None:
    harness = running()
    body = order(excludes=key(1), reason="spam")
    sign(harness, ADA, body)
    assert "has signed order" in why(sign(harness, ADA, body))
    changed = order(excludes=key(0), reason="spam")
    assert "cannot change after its first signature" in why(sign(harness, BOB, changed))
    late = NOW + HOUR
    assert "has expired" in why(sign(harness, BOB, body, late))
    far = order(7, after_ms=limits.ORDER_MS_MAX + operator_orders.CLOCK_MS_MAX + 1)
    assert "more than 7 days" in why(sign(harness, BOB, far))
    assert "less than an hour" in why(sign(harness, BOB, order(8, after_ms=HOUR - 1)))
    sign(harness, BOB, body)
    assert "obeyed before" in why(sign(harness, CID, body))
    assert "obeyed before" in why(sign(harness, ADA, body)), "replayed"


def test_a_stolen_key_fills_its_own_places_alone_and_they_become_free() -> None:
    harness = running()
    for nonce in range(operator_orders.WAITING_OF_ONE_MAX):
        assert sign(harness, CID, order(nonce))
    assert "wait for signatures" in why(sign(harness, CID, order(9)))
    assert isinstance(sign(harness, ADA, order(10))[0], Append), "others still give orders"
    assert isinstance(sign(harness, CID, order(10))[0], Append), "and it still signs theirs"
    assert harness.run.phase is Phase.FINISHED
    fresh = running()
    for nonce in range(operator_orders.WAITING_OF_ONE_MAX):
        sign(fresh, CID, order(nonce))
    later = order(11, after_ms=2 * HOUR)
    assert isinstance(sign(fresh, CID, later, NOW + HOUR)[0], Append), "expired ones are forgotten"
    assert len(fresh.run.orders.waiting) == 1


def test_the_last_signature_can_come_again_once_the_run_allows_what_the_order_says() -> None:
    harness = running()
    body = order(settings=settings_of({"clock.steps": 60}))
    sign(harness, ADA, body)
    assert "is not paused" in why(sign(harness, BOB, body))
    assert harness.run.orders.waiting, "it still waits"
    harness.feed(PauseAsked(""))
    assert isinstance(sign(harness, BOB, body)[0], Append)
    assert harness.run.config.clock.steps == 60
    decide(harness, 0, 1)
    assert not harness.entries[-1].orders, "the open step was decided without the change"
    harness.feed(ResumeAsked())
    decide(harness, 0, 1)
    assert [it.body for it in harness.entries[-1].orders] == [body]
    follow(harness)


def test_the_end_has_its_order_and_the_readers_ask_for_it() -> None:
    harness = running()
    body = order(finishes=True, reason="good enough")
    sign(harness, ADA, body)
    sign(harness, CID, body)
    end = harness.run.ended
    assert harness.run.phase is Phase.FINISHED
    assert end.order is not None
    data = seal_end(COORDINATOR, harness.run_id, end).SerializeToString()

    def opens(made: bytes) -> End:
        return open_end(made, run_id=harness.run_id, coordinator=COORDINATOR.public_key, operators=KEYS)

    assert opens(data) == end
    for false in (
        replace(end, order=None),
        replace(end, reason="another"),
        replace(end, order=SignedOrder(body, end.order.signatures[:1])),
        replace(end, order=SignedOrder(body, end.order.signatures[:1] * 2)),
        replace(end, order=replace(end.order, body=order(1, finishes=True, reason="good enough"))),
    ):
        with pytest.raises(Refusal):
            opens(seal_end(COORDINATOR, harness.run_id, false).SerializeToString())


@pytest.mark.parametrize("crash", [1, 2])
def test_a_crash_after_each_signature_loses_nothing_and_doubles_nothing(crash: int) -> None:
    harness = running(3)
    body = order(excludes=key(2), reason="spam")
    for by in (ADA, BOB)[:crash]:
        sign(harness, by, body)
    before = harness.run.orders
    harness.restart()
    assert harness.run.orders == before
    if crash == 1:
        sign(harness, BOB, body)
    assert harness.run.standings[key(2)].excluded
    assert "obeyed before" in why(sign(harness, CID, body))


def test_a_checkpoint_has_orders() -> None:
    harness = running(3)
    sign(harness, ADA, order(excludes=key(2), reason="spam"))
    sign(harness, BOB, order(excludes=key(2), reason="spam"))
    sign(harness, BOB, order(1))
    run = replace(harness.run, step=None, phase=Phase.WAITING)
    fresh = Harness(guarded(min_peers=2)).run
    assert checkpoint.load(fresh, checkpoint.dump(run)).orders == run.orders


def test_an_entry_that_comes_back_marks_its_orders_as_obeyed() -> None:
    harness = running(3)
    body = order(excludes=key(2), reason="spam")
    sign(harness, ADA, body)
    sign(harness, BOB, body)
    decide(harness, 0, 1)
    lost = Harness(guarded(min_peers=2))
    entries = [it for it in harness.journal if isinstance(it, EntryCommitted)]
    run = machine.restore(lost.run, entries, 0)
    assert order_id(harness.run_id, body) in run.orders.obeyed


def test_a_change_that_the_entries_which_come_back_lack_leaves_no_order_for_a_later_entry() -> None:
    lived = running()
    decide(lived, 0, 1)
    kept = list(lived.journal)
    for _ in range(2):
        decide(lived, 0, 1)
    lost = Harness(lived.settings)
    lost.load(kept)
    lost.feed(PauseAsked(""))
    body = order(settings=settings_of({"clock.steps": 60}))
    sign(lost, ADA, body)
    sign(lost, BOB, body)
    assert lost.run.config.clock.steps == 60
    lost.feed(joined(0))
    entries = tuple(it for it in lived.journal if isinstance(it, EntryCommitted))
    lost.feed(EntriesReturned(key(0), entries, len(entries)))
    assert lost.run.config.clock.steps == lived.settings.clock.steps, "no entry has the change"
    assert not lost.run.orders.unlogged, "readers refuse an entry with this order and without the change"
    assert not operator_orders.for_entry(lost.run.orders, (), len(entries) + 1)
    assert "obeyed before" in why(sign(lost, CID, body))


def test_an_exclusion_that_is_taken_back_before_an_entry_leaves_no_order() -> None:
    harness = running(3)
    body = order(excludes=key(2), reason="spam")
    sign(harness, ADA, body)
    sign(harness, BOB, body)
    harness.feed(ReadmissionAsked(key(2)))
    assert not harness.run.orders.unlogged
    decide(harness, 0, 1)
    follow(harness)


# ---- what a reader of the log refuses --------------------------------------------------------------------------------


def test_a_stolen_coordinator_key_writes_no_log_that_its_readers_take() -> None:
    run_id = bytes([7]) * 32
    body = order(excludes=key(2), reason="spam")

    def signed(*by: Identity, said: bytes = body, of: bytes = run_id) -> SignedOrder:
        return SignedOrder(
            said, tuple((it.public_key, seal_bytes(it, Kind.KIND_ORDER, of, said).signature) for it in by)
        )

    out = Exclusion(key(2), "excluded by the operator of this run: spam", by_operator=True)
    plain = Entry(1, run_id, (), 0, b"", (), 0)

    def takes(*entries: Entry) -> None:
        chain = Chain(run_id, COORDINATOR.public_key, operators=KEYS)
        for entry in entries:
            parent = replace(entry, step=chain.step + 1, parent_hash=chain.head)
            chain.extend(seal_entry(COORDINATOR, run_id, parent).envelope)

    excluded = replace(plain, exclusions=(out,), orders=(signed(ADA, BOB),))
    takes(plain, excluded, plain)
    changes = order(2, settings=settings_of({"clock.steps": 60}))
    changed = replace(plain, settings=settings_of({"clock.steps": 60}))
    takes(plain, replace(changed, orders=(signed(ADA, CID, said=changes),)), changed)
    for bad in (
        [replace(excluded, orders=())],
        [replace(excluded, orders=(signed(ADA),))],
        [replace(excluded, orders=(signed(ADA, ADA),))],
        [replace(excluded, orders=(signed(ADA, EVE),))],
        [replace(excluded, orders=(signed(ADA, BOB, of=bytes(32)),))],
        [replace(excluded, exclusions=(replace(out, public_key=key(1)),))],
        [replace(excluded, exclusions=(replace(out, reason="another"),))],
        [replace(excluded, exclusions=())],
        [excluded, replace(plain, readmitted=(key(2),)), excluded],
        [changed],
        [replace(changed, orders=(signed(ADA, said=changes),))],
        [replace(changed, orders=(signed(ADA, CID, said=changes),)), plain],
        [replace(plain, orders=(signed(ADA, CID, said=order(3)),))],
    ):
        with pytest.raises(Refusal):
            takes(*bad)


def test_a_run_without_operators_keys_has_no_orders_that_a_reader_shows_as_signed() -> None:
    run_id, nobody, body = bytes([7]) * 32, OperatorsConfig(), order(finishes=True)
    made_up = SignedOrder(body, ((EVE.public_key, seal_bytes(EVE, Kind.KIND_ORDER, run_id, body).signature),))
    plain = Entry(1, run_id, (), 0, b"", (), 0)
    for entry, good in ((plain, True), (replace(plain, orders=(made_up,)), False)):
        data = seal_entry(COORDINATOR, run_id, entry).envelope
        chain = Chain(run_id, COORDINATOR.public_key, operators=nobody)
        if good:
            chain.extend(data)
            continue
        with pytest.raises(Refusal, match="names no operators"):
            chain.extend(data)
    for end, good in ((End(0, run_id), True), (End(0, run_id, "", made_up), False)):
        sealed = seal_end(COORDINATOR, run_id, end).SerializeToString()
        if good:
            assert open_end(sealed, run_id=run_id, coordinator=COORDINATOR.public_key, operators=nobody) == end
            continue
        with pytest.raises(Refusal, match="names no operators"):
            open_end(sealed, run_id=run_id, coordinator=COORDINATOR.public_key, operators=nobody)


def test_an_entry_with_the_most_orders_fits() -> None:
    words, settings = "x" * limits.EXCLUSION_REASON_BYTES_MAX, settings_of({"clock.steps": 60})
    largest = max(len(order(excludes=key(2), reason=words)), len(order(settings=settings)))
    assert largest <= limits.ORDER_BYTES_MAX
    full = SignedOrder(bytes(limits.ORDER_BYTES_MAX), ((bytes(32), bytes(64)),) * limits.OPERATORS_MAX)
    bare = Entry(1, bytes(32), (), 0, b"", (), 0)
    grown = len(entry_body(replace(bare, orders=(full,) * limits.ORDERS_MAX))) - len(entry_body(bare))
    assert grown <= limits.ORDERS_MAX * (limits.SIGNED_ORDER_BYTES_MAX + 8)
    assert 314_000 + grown <= limits.ENTRY_BYTES_MAX


# ---- a coordinator that serves ---------------------------------------------------------------------------------------


def test_settings_name_their_mistakes_and_old_runs_keep_their_ids() -> None:
    for wrong in (
        {"keys": [ADA.peer_id], "needed": 2},
        {"keys": [ADA.peer_id, ADA.peer_id], "needed": 2},
        {"keys": ["12D3KooWnobody"], "needed": 1},
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - pydantic's
            OperatorsConfig.model_validate(wrong)
    assert "operators" not in config().canonical_json(), "a version before operators reads a run without them"
    assert config_from_json(guarded().canonical_json()).operators == KEYS


def envelope(here: Served, by: Identity, body: bytes) -> envelope_pb2.SignedEnvelope:
    return seal_bytes(by, Kind.KIND_ORDER, here.invite.run_id, body)


def live(nonce: int = 0, **says: Any) -> bytes:
    return order_body(OperatorOrder(bytes([nonce]) * 16, clocks.unix_ms() + 2 * HOUR, **(says or {"finishes": True})))


async def refused(stub: Any, sent: envelope_pb2.SignedEnvelope) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.SignOrder(pb.SignOrderRequest(envelope=sent))
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    return str(error.value.details())


async def test_an_attack_with_one_stolen_key(tmp_path: Path) -> None:
    """Eve has Cid's key and all that went over the wire. The run goes on as if she had not."""
    async with served(tmp_path, guarded(min_peers=2)) as here, peers(here, 2) as swarm, here.channel() as channel:
        await begin(here, swarm)
        stub, victim = operator_stub(channel), swarm[1].key
        theirs = envelope(here, CID, live(1, excludes=victim, reason="mine now"))
        answer = await stub.SignOrder(pb.SignOrderRequest(envelope=theirs))
        assert not answer.obeyed
        assert len(answer.order.signatures) == 1
        assert "has signed order" in await refused(stub, theirs), "replayed"
        again = envelope(here, CID, live(1, excludes=victim, reason="mine now"))
        assert "cannot change" in await refused(stub, again), "the same key twice, with another end"
        for by in (EVE, COORDINATOR):
            assert "none of the keys" in await refused(stub, envelope(here, by, theirs.body))
        forged = envelope_pb2.SignedEnvelope()
        forged.CopyFrom(theirs)
        forged.public_key = ADA.public_key
        assert "does not verify" in await refused(stub, forged)
        elsewhere = seal_bytes(ADA, Kind.KIND_ORDER, bytes(32), theirs.body)
        elsewhere.run_id = here.invite.run_id
        assert "does not verify" in await refused(stub, elsewhere), "Ada signed it for another run"
        wrong = seal_bytes(CID, Kind.KIND_ADMIN, here.invite.run_id, theirs.body)
        assert "kind" in await refused(stub, wrong)
        hidden = envelope(here, CID, theirs.body + b"\xfa\x01\x01x")
        assert "does not know" in await refused(stub, hidden), "signers must see all that they sign"
        both = envelope(here, CID, live(5, excludes=victim, reason="x", finishes=True))
        assert "one of these" in await refused(stub, both)
        [entries] = {len(heard) for heard in [await one_step(swarm)]}
        assert entries == 2
        assert here.runtime.run.phase is Phase.OPEN
        assert not here.runtime.run.standings


async def test_orders_survive_a_restart_and_the_log_file_names_all_signers(tmp_path: Path) -> None:
    body = b""
    async with served(tmp_path, guarded(min_peers=2)) as here, here.channel() as channel:
        body = live(1, finishes=True, reason="good")
        await operator_stub(channel).SignOrder(pb.SignOrderRequest(envelope=envelope(here, ADA, body)))
    async with served(tmp_path, guarded(min_peers=2)) as here, peers(here, 3) as swarm, here.channel() as channel:
        stub = operator_stub(channel)
        await begin(here, swarm[:2])
        first = swarm[:2]
        outs = live(2, excludes=identity(2).public_key, reason="noise")
        for by in (BOB, CID):
            answer = await stub.SignOrder(pb.SignOrderRequest(envelope=envelope(here, by, outs)))
        assert answer.obeyed
        await one_step(first)
        path, folder = tmp_path / "run.log", tmp_path / "audit"
        await asyncio.to_thread(export_log, here.invite, path)
        [entry] = [it.entry for it in log_entries(path)[1] if it.entry.orders]
        assert entry.orders[0].signers == (BOB.public_key, CID.public_key)
        write_from_log(path, folder)
        [said] = (folder / "orders.jsonl").read_text().splitlines()
        assert BOB.peer_id in said
        assert CID.peer_id in said
        assert "noise" in said
        answer = await stub.SignOrder(pb.SignOrderRequest(envelope=envelope(here, CID, body)))
        assert answer.obeyed
        assert here.runtime.run.phase is Phase.FINISHED
        ended = await first[0].client.get_run()
        data = ended[0].end.SerializeToString(deterministic=True)
        end = open_end(data, run_id=here.invite.run_id, coordinator=COORDINATOR.public_key, operators=KEYS)
        assert end.order.signers == (ADA.public_key, CID.public_key)


async def test_from_the_commands_of_two_operators_on_two_machines(tmp_path: Path) -> None:
    for name, by in (("ada", ADA), ("bob", BOB), ("eve", EVE)):
        (tmp_path / name).write_bytes(by.to_libp2p())
    home = tmp_path / "home"
    home.mkdir()
    async with served(home, guarded(min_peers=2)) as here, peers(here, 2) as swarm:
        await begin(here, swarm)
        link, peer = here.invite.link(), identity(1).peer_id
        with operated(here, "peer") as peer_command, operated(here, "order") as orders, operated(here, "run") as runs:
            with pytest.raises(OperatorError, match="none of this run's operators"):
                await peer_command("exclude", "swarm", peer, "--reason", "spam")
            ada, bob = ("--key", str(tmp_path / "ada")), ("--key", str(tmp_path / "bob"))
            [given] = await peer_command("exclude", link, peer, "--reason", "spam", *ada)
            assert (given["obeyed"], given["signed_by"], given["needed"]) == (False, [ADA.peer_id], 2)
            assert given["says"] == f"exclude the peer {peer}: spam"
            assert await orders("list", link, *bob) == [given]
            assert await orders("list", "swarm") == [given], "the coordinator's own key may look"
            with pytest.raises(Exception, match="expected"):
                await orders("list", link, "--key", str(tmp_path / "eve"))
            with pytest.raises(OperatorError, match="0 waiting orders"):
                await orders("sign", link, "ffff", "--yes", *bob)
            [signed] = await orders("sign", link, given["order"][:8], "--yes", *bob)
            assert (signed["obeyed"], signed["signed_by"]) == (True, [ADA.peer_id, BOB.peer_id])
            assert here.runtime.run.standings[swarm[1].key].excluded
            await runs("pause", "swarm")
            [changed] = await runs("change", link, "clock.steps=60", *ada)
            assert changed["what"] == "change"
            [signed] = await orders("sign", "swarm", changed["order"], "--yes", *bob)
            assert signed["obeyed"]
            assert here.runtime.run.config.clock.steps == 60
            [ended] = await runs("finish", link, *bob)
            assert (ended["what"], ended["obeyed"]) == ("finish", False)


def test_a_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "key"

    def said() -> dict[str, Any]:
        done = CliRunner().invoke(command.app, ["order", "key", str(file), "--json"])
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    first, second = said(), said()
    assert first == {**second, "made": True}
    assert file.stat().st_mode & 0o077 == 0
    assert Identity.load_or_create(file).peer_id == second["key"]


async def test_a_coordinator_that_shows_another_order_under_a_name_gets_no_signature(tmp_path: Path) -> None:
    async with served(tmp_path, guarded(min_peers=2)) as here:
        facts, _ = await facts_at(here)
        mine = Operators(here.invite, facts, ADA)
        given = await asyncio.to_thread(lambda: mine.give(finishes=True))
        other = order_body(replace(given.signed.order, reason="changed"))
        name = order_id(here.invite.run_id, given.signed.body)
        stored = here.runtime.run.orders.waiting[name]
        changed = {name: replace(stored, body=other)}
        here.runtime.run = replace(here.runtime.run, orders=replace(here.runtime.run.orders, waiting=changed))
        bob = Operators(here.invite, facts, BOB)
        with pytest.raises(Refusal, match="does not verify"):
            await asyncio.to_thread(bob.find, name.hex())


async def facts_at(here: Served) -> Any:
    async with peers(here, 1) as swarm:
        await swarm[0].client.connect()
        return await swarm[0].client.get_run()
