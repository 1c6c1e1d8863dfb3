"""What a watcher concludes from bytes: in any order, from anyone, within its bounds. Needs no libp2p."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.watch import net, watch_command, watched_run
from node.watch.watched_run import AnnouncementSeen, EntrySeen, EntrySource, Refused, Watch
from protos.changes import settings_of
from protos.errors import DivergedError, OperatorError, Reason
from protos.identity import Identity
from protos.invite import Invite
from protos.log import Contribution
from protos.run_sections import OperatorsConfig
from tests.interop.world import ROOT, Log

COORDINATOR = Identity.from_seed(bytes([1]) * 32)
RUN_ID = bytes(range(32))
_LOG = Log(RUN_ID, COORDINATOR)
ENTRIES = [_LOG.commit() for _ in range(6)]


def new_watch() -> Watch:
    watch = Watch(RUN_ID, COORDINATOR.public_key)
    watch.begin(OperatorsConfig())
    return watch


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_order_and_the_source_of_entries_do_not_matter(order: list[int], listed: list[bool]) -> None:
    watch, steps = new_watch(), []
    for n in order:
        receive = watch.receive_listed if listed[n] else watch.receive
        steps += [event.signed.entry.step for event in receive(ENTRIES[n].envelope) if isinstance(event, EntrySeen)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert watch.head == (6, ENTRIES[5].hash)
    assert watch.wanted() is None


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_counted(data: bytes) -> None:
    watch = new_watch()
    (event,) = watch.receive(data)
    assert isinstance(event, Refused)
    assert watch.tally.refused == {event.reason: 1}
    assert watch.head == (0, RUN_ID)


@given(st.integers(0, len(ENTRIES[0].envelope) - 1), st.integers(1, 255))
def test_no_byte_of_an_entry_can_be_changed(at: int, by: int) -> None:
    data = bytearray(ENTRIES[0].envelope)
    data[at] ^= by
    watch = new_watch()
    watch.receive(bytes(data))
    assert watch.head == (0, RUN_ID)


def test_what_the_operators_did_not_order_breaks_the_chain() -> None:
    log, watch = Log(RUN_ID, COORDINATOR), Watch(RUN_ID, COORDINATOR.public_key)
    watch.begin(OperatorsConfig(keys=[peer.peer_id for peer in log.peers]))
    watch.receive(log.commit().envelope)
    changed = log.entry(settings=settings_of({"clock.steps": 7}))
    with pytest.raises(DivergedError, match="settings that the operators did not order"):
        watch.receive(changed.envelope)
    assert watch.head[0] == 1


def test_what_is_missing_is_asked_for_until_it_is_there() -> None:
    watch = new_watch()
    assert watch.wanted() is None
    watch.receive(ENTRIES[2].envelope)
    assert watch.wanted() == 1
    watch.receive_listed(ENTRIES[0].envelope)
    assert watch.wanted() == 2
    watch.receive_listed(ENTRIES[1].envelope)
    assert (watch.wanted(), watch.head[0]) == (None, 3)
    watch.told_head(5)
    assert watch.wanted() == 4


def test_entries_that_wait_are_bounded_and_the_nearest_are_kept() -> None:
    log, watch = Log(RUN_ID, COORDINATOR), new_watch()
    far = [log.commit() for _ in range(watched_run.ENTRIES_WAITING_MAX + 10)]
    for signed in reversed(far[1:]):
        watch.receive(signed.envelope)
    watch.receive(far[0].envelope)
    assert watch.head[0] == watched_run.ENTRIES_WAITING_MAX


def test_a_table_of_peers_is_bounded_and_keeps_who_contributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_run, "PEERS_MAX", 5)
    log, watch = Log(RUN_ID, COORDINATOR), new_watch()
    watch.receive(log.commit().envelope)
    for n in range(20, 40):  # whoever holds the invite can make up keys
        assert isinstance(watch.receive(log.announce(Identity.from_seed(bytes([n]) * 32)))[0], AnnouncementSeen)
    assert len(watch.peers) == 5
    assert {peer.public_key for peer in log.peers} < watch.peers.keys()


def test_announcements_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.limits.ROSTER_PEERS_MAX", 2)
    log, watch = Log(RUN_ID, COORDINATOR), new_watch()
    events = [watch.receive(log.announce(Identity.from_seed(bytes([n]) * 32)))[0] for n in range(20, 26)]
    assert [isinstance(event, Refused) and event.reason is Reason.OUT_OF_RANGE for event in events] == [False] * 4 + [
        True
    ] * 2


def test_a_fork_of_an_old_step_is_noticed_also_through_the_coordinator() -> None:
    watch = new_watch()
    for signed in ENTRIES:
        watch.receive(signed.envelope)
    with pytest.raises(DivergedError, match="two different entries of step 1"):
        watch.receive_listed(Log(RUN_ID, COORDINATOR).entry(next_sample=7).envelope)


def test_nothing_is_concluded_before_it_is_known_where_the_chain_starts() -> None:
    watch = Watch(RUN_ID, COORDINATOR.public_key)
    assert watch.receive(ENTRIES[3].envelope) == []
    assert watch.wanted() is None
    (first,) = watch.anchor()
    assert isinstance(first, EntrySeen)
    assert (first.signed.entry.step, watch.anchored_at) == (4, 4)
    assert watch.begin(OperatorsConfig()) == []  # too late to start elsewhere
    assert isinstance(watch.receive(ENTRIES[4].envelope)[0], EntrySeen)


DIES = """
from node.watch import net
net.RESTARTS_MAX, net.RESTART_SECONDS_MAX = 3, 0.01

async def serve(self):
    raise ExceptionGroup("tree", [ValueError("a stranger's frame")])

net.Overlay._serve = serve
told = []
overlay = net.Overlay("topic", lambda news: told.append(news) is None)
overlay.start()
overlay.join(300)
assert not overlay.is_alive()
problem = "py-libp2p ended: ValueError(\\"a stranger's frame\\")"
assert told == [net.OverlayStatus(0, number, problem, fatal=number == 3) for number in range(4)], told
"""
LIVES = """
import queue
from node.watch import net
told = queue.Queue()
overlay = net.Overlay("topic", lambda news: told.put(news) is None)
overlay.start()
assert told.get(timeout=300) == net.OverlayStatus(0, 0)
overlay.stop()
assert not overlay.is_alive()
"""


# in a process of its own: libp2p and hivemind cannot be imported in one
@pytest.mark.skipif(find_spec("libp2p") is None, reason="needs the extra swarmentum[watch]")
@pytest.mark.parametrize("script", [DIES, LIVES], ids=["one that ends is started again", "one that runs is stopped"])
def test_the_overlay_s_thread(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_addresses_that_are_dialled_are_bounded_and_plain_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "ADDRESSES_KEPT_MAX", 3)
    overlay = net.Overlay("topic", lambda news: True)
    overlay.dial(("/ip4/1.2.3.4/udp/1/quic/p2p/x", "/ip4/1.2.3.4/tcp/1/p2p/a"))
    overlay.dial(tuple(f"/ip4/1.2.3.4/tcp/1/p2p/{name}" for name in "abcd"))
    assert list(overlay._addresses) == [f"/ip4/1.2.3.4/tcp/1/p2p/{name}" for name in "abc"]


def test_a_liar_does_not_decide_the_loss_that_is_shown() -> None:
    claims = (2.0, 2.0, 2.0, 1e4)
    entry = _LOG.entry(
        contributions=tuple(Contribution(bytes([n]) * 32, bytes(32), 9, 4, 9, it) for n, it in enumerate(claims))
    )
    assert EntrySeen(entry, EntrySource.GOSSIP, 0).loss == 2.5


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    link = Invite(RUN_ID, ("127.0.0.1:1",), COORDINATOR.public_key, bytes(32), (), "a run").link()
    with pytest.raises(OperatorError, match=r"pip install '\.\[watch\]'"):
        watch_command.run(link, as_json=True, steps=None, seconds=None)
