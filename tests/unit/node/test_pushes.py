"""Pushed votes: what a member of the roster announced itself is kept; everything else is refused, and nothing is kept of it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from node.blobs.blobs import ARRIVALS_MAX, Arrivals, WireBytes
from node.blobs.payloads import Payloads
from node.swarm import pushes
from node.swarm.announcements import Announcements, Topic
from node.swarm.facts import Held
from node.swarm.inbox import PAYLOADS_AN_AUTHOR_MAX, Inbox
from node.swarm.outbox import Outbox
from node.swarm.pulls import Pulls
from node.swarm.pushes import REFUSED, TAKEN, Pusher, PushServer
from node.swarm.runtime import Counters, Runtime, View
from protos import slices
from protos.assignment import Range, SampleShare
from protos.envelope import Kind, seal
from protos.errors import NetworkError
from protos.identity import Identity
from protos.tick import Tick
from protos.v1 import update_pb2

RUN = b"r" * 32
ADA, BOB, EVE, RELAY = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3, 4))
VOTES = b"votes" * 100
PARTS = [b"first", b"second", b"third"]
SECONDS_MAX = 240.0


class AnyDoor:
    bytes_max = 1 << 20

    def open(self, data: bytes, step: int, named_bytes: int | None = None) -> Any:
        return None

    def part(self, number: int) -> "AnyDoor":
        return self


def announced(author: Identity, data: bytes = VOTES, step: int = 1, ranges: int = 1) -> bytes:
    body = update_pb2.Announcement(
        step=step, parent_hash=RUN, payload_sha256=slices.hash_of(data, ranges), payload_bytes=len(data)
    )
    return seal(author, Kind.KIND_ANNOUNCEMENT, RUN, body).SerializeToString()


def framed(envelope: bytes, data: bytes) -> bytes:
    return len(envelope).to_bytes(4, "big") + envelope + len(data).to_bytes(4, "big") + data


@dataclass
class Receiver:
    """BOB's side of a step whose roster is ADA and BOB; nobody can be pulled from."""

    payloads: Payloads
    outbox: Outbox
    server: PushServer
    fetch: mock.AsyncMock
    view: View
    announcements: Announcements
    refused: list[str] = field(default_factory=list)

    async def push(self, remote: Identity, *parts: bytes) -> bytes:
        """What comes back for these bytes on one stream, until it ends or waits for more."""
        reader, back = asyncio.StreamReader(), mock.Mock(drain=mock.AsyncMock())
        answers: list[bytes] = []
        back.write.side_effect = answers.append
        reader.feed_data(b"".join(parts))
        reader.feed_eof()
        async with asyncio.timeout(SECONDS_MAX):
            await self.server.handle(remote.peer_id, reader, back)
        return b"".join(answers)


@asynccontextmanager
async def receiving(folder: Path, ranges: tuple[bytes, ...] = ()) -> AsyncIterator[Receiver]:
    """`ranges`: of each range, which of ADA and BOB adds its votes up."""
    view = View(RUN, EVE.public_key)
    roster = tuple(SampleShare(key, 1) for key in sorted((ADA.public_key, BOB.public_key)))
    adding = (ADA.public_key, BOB.public_key) if ranges else ()
    view.tick, view.ranges = Tick(1, RUN, 1, roster, (Range(0, 2),), 0, adding, ranges), max(len(ranges), 1)
    counters, payloads, outbox = Counters(), Payloads(folder), Outbox()
    runtime = Runtime(BOB.public_key, mock.AsyncMock(), counters, view)
    fetcher = mock.Mock(fetch=mock.AsyncMock(side_effect=NetworkError("nobody to ask")))
    pulls = Pulls(fetcher, payloads, view, mock.Mock(newest=None), runtime, 1.0, mock.AsyncMock())
    announcements = Announcements(BOB.public_key, Inbox(RUN), pulls, AnyDoor(), outbox, view, runtime)
    announcements.open_step(view.tick)
    found = Receiver(payloads, outbox, cast(PushServer, None), fetcher.fetch, view, announcements)
    found.server = PushServer(
        announcements, view, pulls.keep, WireBytes(), lambda refusal: found.refused.append(refusal.reason.value)
    )
    yield found
    await runtime.stop()


async def held(receiver: Receiver) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not receiver.outbox.holdings:
            await asyncio.sleep(0)


async def test_what_its_author_pushes_is_held_without_a_pull(tmp_path: Path) -> None:
    async with receiving(tmp_path) as bob:
        assert await bob.push(ADA, framed(announced(ADA), VOTES)) == TAKEN
        sha256 = hashlib.sha256(VOTES).digest()
        assert bob.payloads.get(sha256) == VOTES
        await held(bob)
        assert bob.outbox.holdings == {Held(ADA.public_key, sha256): 1}
        assert not bob.refused


async def test_what_comes_before_the_tick_of_its_step_is_kept_for_it(tmp_path: Path) -> None:
    """A peer that hears of the step a moment later than the author would otherwise get the same bytes twice."""
    async with receiving(tmp_path) as bob:
        assert bob.view.tick is not None
        bob.fetch.side_effect = AssertionError("a pull of what is here")
        assert await bob.push(ADA, framed(announced(ADA, step=2), VOTES)) == TAKEN
        assert bob.payloads.get(hashlib.sha256(VOTES).digest()) == VOTES
        assert not bob.outbox.holdings, "nobody knows yet whether its author is in the step's roster"
        bob.announcements.move_head(1, RUN)
        bob.announcements.open_step(replace(bob.view.tick, step=2))
        await held(bob)
        assert bob.outbox.holdings == {Held(ADA.public_key, hashlib.sha256(VOTES).digest()): 2}
        assert not bob.refused


async def test_a_slice_that_comes_before_the_tick_is_pulled_later(tmp_path: Path) -> None:
    """Only the tick says which ranges this peer adds up."""
    whole = slices.joined(PARTS)
    async with receiving(tmp_path, (b"\1", b"\0", b"\1\0")) as bob:
        early = announced(ADA, whole, step=2, ranges=3)
        assert await bob.push(ADA, framed(early, slices.with_slices(whole, 3, (0, 2)))) == TAKEN
        assert (list(tmp_path.iterdir()), bob.refused) == ([], [])


async def test_what_strangers_push_before_a_tick_is_not_kept(tmp_path: Path) -> None:
    async with receiving(tmp_path) as bob:
        assert REFUSED[await bob.push(EVE, framed(announced(EVE, step=2), VOTES))].value == "unknown_signer"
        payloads = [b"%d" % number + VOTES for number in range(9)]
        for data in payloads:
            await bob.push(ADA, framed(announced(ADA, data, step=2), data))
        assert len(list(tmp_path.iterdir())) == PAYLOADS_AN_AUTHOR_MAX, "a member's own are bounded as in an open step"


async def test_an_aggregator_takes_the_slices_of_its_ranges(tmp_path: Path) -> None:
    """And what it is pushed beside them, or with another list than the author signed, is refused, and pulled."""
    whole = slices.joined(PARTS)
    for data, reason in (
        (slices.with_slices(whole, 3, (0, 2)), ""),
        (whole, "hash_mismatch"),
        (slices.with_slices(whole, 3, (0, 1)), "hash_mismatch"),
        (slices.with_slices(slices.joined([*PARTS[:2], b"else"]), 3, (0, 2)), "hash_mismatch"),
        (b"no list", "malformed"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        async with receiving(folder, (b"\1", b"\0", b"\1\0")) as bob:
            answer = await bob.push(ADA, framed(announced(ADA, whole, ranges=3), data))
            assert (answer == TAKEN) is (not reason)
            assert bob.refused == ([reason] if reason else [])
            if reason:
                continue
            await held(bob)
            assert bob.outbox.holdings == {Held(ADA.public_key, slices.hash_of(whole, 3)): 1}
            assert {path.read_bytes() for path in folder.iterdir()} == {
                whole[: slices.list_bytes(3)],
                PARTS[0],
                PARTS[2],
            }


async def test_what_an_aggregator_held_for_one_attempt_counts_for_no_other(tmp_path: Path) -> None:
    """In the next it may have other ranges: it gets their slices, and says again what it holds."""
    whole = slices.joined(PARTS)
    async with receiving(tmp_path, (b"\1", b"\0", b"\1\0")) as bob:
        await bob.push(ADA, framed(announced(ADA, whole, ranges=3), slices.with_slices(whole, 3, (0, 2))))
        await held(bob)
        assert bob.view.tick is not None
        bob.fetch.side_effect = [PARTS[1]]
        bob.view.tick = replace(bob.view.tick, attempt=2, ranges=(b"\0", b"\1", b"\0"))
        bob.outbox.open_step(bob.view.tick)
        bob.announcements.open_step(bob.view.tick)
        assert not bob.outbox.holdings
        await held(bob)
        assert [call.args[0] for call in bob.fetch.call_args_list] == [slices.slice_of(PARTS[1]).sha256]


async def test_who_adds_up_nothing_any_more_pulls_and_holds_nothing(tmp_path: Path) -> None:
    """The step opened with other aggregators before this peer began to pull: a list alone is no payload."""
    whole = slices.joined(PARTS)
    async with receiving(tmp_path, (b"\1", b"\0")) as bob:
        bob.fetch.side_effect = [whole[: slices.list_bytes(3)]]
        bob.announcements.offer(announced(ADA, whole, ranges=3))
        bob.view.tick = replace(bob.view.tick, ranges=(b"\0", b"\0"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not bob.fetch.call_args_list
        assert not bob.outbox.holdings


async def test_an_announcement_that_comes_alone_is_pulled(tmp_path: Path) -> None:
    large = bytes(pushes.PUSHED_BYTES_MAX + 1)
    async with receiving(tmp_path) as bob:
        bob.fetch.side_effect = [large]
        assert await bob.push(ADA, framed(announced(ADA, large), b"")) == TAKEN
        await held(bob)
        assert bob.outbox.holdings == {Held(ADA.public_key, hashlib.sha256(large).digest()): 1}


async def test_a_second_push_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    async with receiving(tmp_path) as bob:
        assert await bob.push(ADA, framed(announced(ADA), VOTES), framed(announced(ADA), b"x" * 500)) == 2 * TAKEN
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("remote", "envelope", "data", "reason"),
    [
        (EVE, announced(EVE), VOTES, "unknown_signer"),  # not in the roster
        (ADA, announced(BOB), VOTES, "unknown_signer"),  # another's words
        (ADA, announced(ADA), b"other" * 100, "hash_mismatch"),
        (ADA, announced(ADA), VOTES + b"x", "out_of_range"),
        (ADA, announced(ADA, step=9_999), VOTES, "wrong_step"),
        (ADA, b"\xff" * 100, VOTES, "malformed"),
        (ADA, b"x" * 1_000, VOTES, "too_large"),
        (ADA, announced(ADA), bytes(pushes.PUSHED_BYTES_MAX + 1), "too_large"),
    ],
)
async def test_nothing_else_is_kept(
    tmp_path: Path, remote: Identity, envelope: bytes, data: bytes, reason: str
) -> None:
    async with receiving(tmp_path) as bob:
        answer = await bob.push(remote, framed(envelope, data))
        assert REFUSED[answer].value == reason, "its author is told"
        assert bob.refused == [reason]
        assert not list(tmp_path.iterdir())


async def test_pushes_of_one_author_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "PUSHES_MAX_AT_ONCE", 3)
    monkeypatch.setattr(pushes, "PUSH_MS", 10_000)
    async with receiving(tmp_path) as bob:
        answers = await bob.push(ADA, *[framed(announced(ADA), VOTES)] * 5)
        assert (answers[:-1], REFUSED[answers[-1:]].value) == (3 * TAKEN, "too_many")
        assert bob.refused == ["too_many"]


def pusher(said: list[bytes], *, answers: bool, answer: bytes = TAKEN) -> tuple[Pusher, list[bytes]]:
    """ADA, connected to BOB and in a roster with it; what BOB was sent."""
    sent: list[bytes] = []

    async def open_stream(_key: bytes, _protocol: str) -> tuple[Any, Any]:
        if not answers:
            raise NetworkError("nobody is there")
        reader, writer = asyncio.StreamReader(), mock.Mock(drain=mock.AsyncMock())
        writer.write.side_effect = lambda data: (sent.append(data), reader.feed_data(answer))
        return reader, writer

    async def say(envelope: bytes) -> None:
        said.append(envelope)

    view = View(RUN, EVE.public_key)
    roster = tuple(SampleShare(key, 1) for key in sorted((ADA.public_key, BOB.public_key)))
    view.tick = Tick(1, RUN, 1, roster, (Range(0, 2),), 0)
    here = {BOB.peer_id: True, RELAY.peer_id: True}
    host = mock.Mock(
        open=open_stream,
        identity=ADA,
        connected=mock.AsyncMock(return_value=here),
        subscribers=mock.AsyncMock(return_value={BOB.peer_id}),
    )
    topic = Topic(host, RUN, view, mock.Mock())
    topic.say = say  # type: ignore[method-assign]
    return Pusher(host, view, WireBytes(), topic, Arrivals(), {}), sent


async def test_nobody_gossips_what_all_have(tmp_path: Path) -> None:
    """A relay is connected, and listens to no topic: it is not pushed to, and nothing is gossiped for it."""
    said: list[bytes] = []
    ada, sent = pusher(said, answers=True)
    for _ in range(3):  # said again while the step is open
        await ada.publish(announced(ADA), VOTES)
    assert sent == [framed(announced(ADA), VOTES)]
    assert said == []


async def test_a_later_life_of_a_peer_is_pushed_to_again() -> None:
    """It heard of no votes of the open step, and a strict step waited for ever for it to hold them."""
    for how in (lambda reader: reader.feed_eof(), lambda reader: reader.set_exception(ConnectionResetError())):
        ada, sent = pusher([], answers=True)
        await ada.publish(announced(ADA), VOTES)
        how(ada._kept[BOB.public_key].reader)
        for _ in range(2):
            await ada.publish(announced(ADA), VOTES)
        assert sent == 2 * [framed(announced(ADA), VOTES)]


async def test_who_cannot_be_pushed_to_hears_it_by_gossip() -> None:
    said: list[bytes] = []
    ada, sent = pusher(said, answers=False)
    await ada.publish(announced(ADA), VOTES)
    assert (sent, said) == ([], [announced(ADA)])


async def test_a_large_payload_is_announced_alone_on_the_stream_and_not_gossiped() -> None:
    """Gossip carries an announcement some nine times to each peer; all models above 8 M parameters have such payloads."""
    said: list[bytes] = []
    large = bytes(pushes.PUSHED_BYTES_MAX + 1)
    ada, sent = pusher(said, answers=True)
    await ada.publish(announced(ADA, large), large)
    assert (sent, said) == ([framed(announced(ADA, large), b"")], [])
    await ada.publish(announced(ADA, large), large)
    assert ada._arrivals.took(hashlib.sha256(large).digest()) is None, "no payload came: no time says its uplink"


async def test_a_member_whose_log_is_at_another_step_hears_no_gossip() -> None:
    """Gossip meets the same door. The push is tried again with the next repetition, because the member may have caught up."""
    for reason, gossiped in (
        ("wrong_step", False),
        ("wrong_parent", False),
        ("unknown_signer", True),
        ("too_many", True),
    ):
        said: list[bytes] = []
        [code] = [code for code, known in REFUSED.items() if known.value == reason]
        ada, sent = pusher(said, answers=True, answer=code)
        for _ in range(2):
            await ada.publish(announced(ADA), VOTES)
        assert sent == 2 * [framed(announced(ADA), VOTES)]
        assert said == (2 * [announced(ADA)] if gossiped else []), reason


async def test_a_member_that_was_at_another_step_and_is_gone_hears_by_gossip() -> None:
    said: list[bytes] = []
    [code] = [code for code, known in REFUSED.items() if known.value == "wrong_step"]
    ada, _ = pusher(said, answers=True, answer=code)
    await ada.publish(announced(ADA), VOTES)
    assert said == []
    cast(Any, ada._host).open = mock.AsyncMock(side_effect=NetworkError("nobody is there"))
    await ada.publish(announced(ADA), VOTES)
    assert said == [announced(ADA)]


async def test_a_member_is_pushed_to_before_it_is_known_to_listen() -> None:
    """p2pd may learn minutes later that a member listens to the topic; a stranger may be a relay, which needs nothing."""
    ada, sent = pusher([], answers=True)
    cast(Any, ada._host).subscribers = mock.AsyncMock(return_value=set())
    await ada.publish(announced(ADA), VOTES)
    assert sent == [framed(announced(ADA), VOTES)]


async def test_a_slow_neighbour_costs_no_gossip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its push is under way, and arrives before any gossip would. Gossip begins when the push has failed."""
    monkeypatch.setattr(pushes, "PUSH_PATIENCE_SECONDS", 0.0)
    said: list[bytes] = []
    ada, sent = pusher(said, answers=True)
    answer = asyncio.Event()
    opened = cast(Any, ada._host).open

    async def slow(*names: Any) -> Any:
        await answer.wait()
        return await opened(*names)

    cast(Any, ada._host).open = slow
    for _ in range(3):
        await ada.publish(announced(ADA), VOTES)
    assert (sent, said) == ([], [])
    [push] = ada._pushing.values()
    answer.set()
    async with asyncio.timeout(SECONDS_MAX):
        assert await push
    await ada.publish(announced(ADA), VOTES)
    assert (sent, said) == ([framed(announced(ADA), VOTES)], [])


async def test_an_announcement_that_a_later_one_overtakes_is_not_pushed_in_its_place() -> None:
    """The daemon names the neighbours to both calls at once. Before, the earlier payload went out, and counted as the later."""
    ada, sent = pusher([], answers=True)
    named = asyncio.Event()

    async def connected() -> dict[str, bool]:
        await named.wait()
        return {BOB.peer_id: True}

    cast(Any, ada._host).connected = connected
    more = VOTES + b"more"
    calls = [asyncio.ensure_future(ada.publish(announced(ADA, data), data)) for data in (VOTES, more)]
    await asyncio.sleep(0)
    named.set()
    await asyncio.wait_for(asyncio.gather(*calls), SECONDS_MAX)
    assert sent == [framed(announced(ADA, more), more)]
    assert ada._has == {BOB.public_key}


async def test_the_time_to_each_answer_is_measured_for_the_size_of_the_votes() -> None:
    """The first push on a stream opens it, too, and says nothing about the uplink."""
    ada, sent = pusher([], answers=True)
    await ada.publish(announced(ADA), VOTES)
    assert ada._arrivals.took(hashlib.sha256(VOTES).digest()) is None
    more = VOTES + b"more"
    await ada.publish(announced(ADA, more), more)
    assert len(sent) == 2
    took = ada._arrivals.took(hashlib.sha256(more).digest())
    assert took is not None
    assert 0 <= took.typical < 1000 * SECONDS_MAX


async def test_streams_are_kept_after_a_new_start_of_the_daemon_too() -> None:
    """None was, and so no time was measured any more: the size of the votes followed the uplink no longer."""
    ada, _ = pusher([], answers=True)
    ada.close()
    for data in (VOTES, VOTES + b"more"):
        await ada.publish(announced(ADA, data), data)
    assert ada._arrivals.took(hashlib.sha256(VOTES + b"more").digest()) is not None


async def test_a_push_that_the_next_one_overtakes_has_taken_so_long_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pushes that arrived in time were measured, so that the votes grew although a peer got none of them."""
    monkeypatch.setattr(pushes, "PUSH_PATIENCE_SECONDS", 0.0)
    ada, sent = pusher([], answers=True)
    opened = cast(Any, ada._host).open

    async def never(*names: Any) -> Any:
        _, writer = await opened(*names)
        return asyncio.StreamReader(), writer

    cast(Any, ada._host).open = never
    await ada.publish(announced(ADA), VOTES)
    async with asyncio.timeout(SECONDS_MAX):
        while not sent:
            await asyncio.sleep(0)
    overtaken = list(ada._pushing.values())
    await ada.publish(announced(ADA, VOTES + b"more"), VOTES + b"more")
    await asyncio.wait(overtaken, timeout=SECONDS_MAX)
    assert ada._arrivals.took(hashlib.sha256(VOTES).digest()) is not None
    ada.close()


async def test_what_waits_for_the_owners_limit_is_on_its_way() -> None:
    """The time began after the wait, so that the votes of a peer with a limited upload grew beyond what it lets out."""
    ada, _ = pusher([], answers=True)
    await ada.publish(announced(ADA), VOTES)
    clock = mock.Mock(side_effect=[10.0, 17.0])
    with mock.patch.object(pushes, "time", mock.Mock(monotonic=clock)):
        cast(Any, ada._wire.up).take = mock.AsyncMock(side_effect=lambda *_, **__: clock.assert_called_once())
        await ada.publish(announced(ADA, VOTES + b"more"), VOTES + b"more")
    took = ada._arrivals.took(hashlib.sha256(VOTES + b"more").digest())
    assert took is not None
    assert took.typical == 7000


async def test_what_slices_take_is_what_their_payload_takes() -> None:
    """Pushed or pulled. A `vote_size` that follows the uplink heard of no payload in a run with ranges; of one that was pulled
    only how long its list of some hundred bytes took."""
    ada, sent = pusher([], answers=True)
    ada._view.ranges = 3
    ada._view.tick = replace(ada._view.tick, aggregators=(BOB.public_key,), ranges=(b"\0",) * 3)
    for number in range(2):
        whole = slices.joined([*PARTS[:2], b"of step %d" % number])
        await ada.publish(announced(ADA, whole, ranges=3), whole)
    assert len(sent) == 2
    name = slices.hash_of(whole, 3)
    took = ada._arrivals.took(name)
    assert took is not None
    assert 0 <= took.typical < 1000 * SECONDS_MAX
    for sha256, milliseconds in (
        (name, 1),
        (slices.slice_of(b"of step 1").sha256, 7000),
        (b"a snapshot's piece", 9000),
    ):
        for _ in range(3):
            ada._arrivals.pulled(sha256, milliseconds, BOB.peer_id)
    assert ada._arrivals.took(name) == (7000, 7000)
    assert ada._arrivals.took(b"a snapshot's piece") == (9000, 9000)
    for number in range(2 * ARRIVALS_MAX):
        ada._arrivals.travels_as(b"%d" % number, [b"part %d" % number])
    assert len(ada._arrivals._whole) == ARRIVALS_MAX


def test_the_codes_of_refusals_stay() -> None:
    names = ["too_large", "malformed", "wrong_kind", "wrong_run", "bad_signature", "unknown_signer", "wrong_step"]
    names += ["wrong_parent", "replayed", "equivocated", "wrong_layout", "out_of_range", "hash_mismatch", "too_many"]
    assert [REFUSED[bytes([0x80 + number])].value for number in range(len(names))] == names


async def test_an_author_keeps_who_refused_its_last_payload_and_why() -> None:
    for answer, doors in ((b"\x84", {BOB.peer_id[-8:]: "bad_signature"}), (b"\x00", {}), (b"\xff", {}), (TAKEN, {})):
        ada, _ = pusher([], answers=True, answer=answer)
        await ada.publish(announced(ADA), VOTES)
        assert ada._doors == doors
    ada, _ = pusher([], answers=True, answer=b"\x84")
    await ada.publish(announced(ADA), VOTES)
    ada._doors["somebody"] = "of an earlier payload"
    more = VOTES + b"more"
    await ada.publish(announced(ADA, more), more)
    assert "somebody" not in ada._doors


class Silent:
    """A stream that says nothing until it is ended."""

    def __init__(self, bob: Receiver, remote: Identity) -> None:
        self.reader, self.ended = asyncio.StreamReader(), False
        writer = mock.Mock(drain=mock.AsyncMock())
        writer.transport.abort.side_effect = self._end
        self.task = asyncio.ensure_future(bob.server.handle(remote.peer_id, self.reader, writer))

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.reader.set_exception(ConnectionResetError())


async def silent(bob: Receiver, remotes: list[Identity]) -> list[Silent]:
    streams = [Silent(bob, remote) for remote in remotes]
    await asyncio.sleep(0)
    return streams


async def ended(streams: list[Silent]) -> None:
    for stream in streams:
        stream.reader.feed_eof() if not stream.ended else None
    await asyncio.gather(*(stream.task for stream in streams))


def strangers(count: int) -> list[Identity]:
    return [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1000, 1000 + count)]


async def test_silent_strangers_keep_no_member_out(tmp_path: Path) -> None:
    """256 of them held every place for 15 minutes."""
    async with receiving(tmp_path) as bob:
        streams = await silent(bob, strangers(pushes.PUSHERS_MAX))
        assert sum(not stream.ended for stream in streams) == pushes.STRANGERS_MAX
        assert await bob.push(ADA, framed(announced(ADA), VOTES)) == TAKEN
        await ended(streams)


async def test_peers_that_are_in_the_roster_no_more_make_room_for_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were members once, and hold every place."""
    monkeypatch.setattr(pushes, "PUSHERS_MAX", 4)
    async with receiving(tmp_path) as bob:
        former = strangers(4)
        tick = bob.server._view.tick
        assert tick is not None
        bob.server._view.tick = replace(tick, roster=tuple(SampleShare(it.public_key, 1) for it in former))
        streams = await silent(bob, former)
        assert not any(stream.ended for stream in streams)
        bob.server._view.tick = tick
        assert await bob.push(ADA, framed(announced(ADA), VOTES)) == TAKEN
        assert [stream.ended for stream in streams] == [True, False, False, False], "the one that is silent for longest"
        await ended(streams)


async def test_a_silent_stranger_is_waited_for_a_short_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes, "STRANGER_SECONDS_MAX", 0.01)
    async with receiving(tmp_path) as bob:
        [stranger, member] = await silent(bob, [EVE, ADA])
        async with asyncio.timeout(SECONDS_MAX):
            with pytest.raises(TimeoutError):
                await stranger.task
        assert stranger.ended
        assert not member.ended
        await ended([member])


async def test_a_stranger_with_many_streams_holds_one_place(tmp_path: Path) -> None:
    async with receiving(tmp_path) as bob:
        streams = await silent(bob, [EVE] * 9)
        assert [stream.ended for stream in streams] == [True] * 8 + [False]
        await ended(streams)


async def test_a_host_without_a_key_of_a_peer_takes_no_place(tmp_path: Path) -> None:
    async with receiving(tmp_path) as bob:
        await bob.server.handle("QmNoEd25519", asyncio.StreamReader(), mock.Mock())
        assert not len(bob.server._audience)
