"""The size of the votes against an uplink of a known speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.blobs.blobs import ARRIVAL_REPORTS_MAX, ARRIVALS_MAX, Arrivals, Took
from node.training.optimizers import demo_config
from node.training.uplink import REPORTS_KEPT, VoteSize, following
from protos.limits import PAYLOADS_GB, PERIODS_KEPT
from protos.optimizer_defaults import GROWTH_MAX, most_bytes
from protos.run_config import ClockConfig, RunConfig

BYTES = {8: 8000, 16: 5000, 32: 3000, 64: 1750, 128: 1000}
LATENCY_MS, COMPUTED_MS, BUDGET = 20.0, 1000.0, 0.25


def settle(chooser: VoteSize, bytes_a_ms: float, steps: int = 100, slowest: float = 1.0) -> list[int]:
    """The sizes of so many steps over a link of `bytes_a_ms`; words on a step arrive during the next. The slowest puller takes
    `slowest` times as long as the typical one."""
    sizes = []
    for _ in range(steps):
        took = LATENCY_MS + BYTES[chooser.size] / bytes_a_ms
        chooser.arrived(chooser.size, Took(took, slowest * took))
        chooser.computed(COMPUTED_MS)
        sizes.append(chooser.choose())
    return sizes


@given(st.floats(0.1, 10_000), st.sampled_from(sorted(BYTES)))
def test_it_settles_on_what_the_link_carries(bytes_a_ms: float, start: int) -> None:
    sizes = settle(VoteSize(BYTES, start, BUDGET), bytes_a_ms)
    last = sizes[-1]
    assert set(sizes[-50:]) == {last}, "the size swings"
    fits = [size for size in BYTES if LATENCY_MS + BYTES[size] / bytes_a_ms <= BUDGET * COMPUTED_MS]
    assert last in fits or last == 128
    larger = [size for size in fits if BYTES[size] > BYTES[last]]
    # a place more than it took may have fitted, for the room that is kept free and the latency that does not grow
    assert len(larger) <= 1 or BYTES[last] / bytes_a_ms + LATENCY_MS > BUDGET * COMPUTED_MS / 5


def test_a_link_that_gets_worse_and_better_is_followed() -> None:
    chooser = VoteSize(BYTES, 128, BUDGET)
    assert settle(chooser, 100.0)[-1] == 8
    assert settle(chooser, 5.0)[-1] == 128
    assert settle(chooser, 100.0)[-1] == 8


def test_one_slow_downlink_keeps_all_votes_at_the_size_of_the_run() -> None:
    assert settle(VoteSize(BYTES, 128, BUDGET), 100.0, slowest=10.0)[-1] == 128
    chooser = VoteSize(BYTES, 32, BUDGET)
    assert settle(chooser, 1e6, slowest=5.0)[-1] == 8, "20 ms five times are within the budget"
    assert settle(chooser, 1e6, slowest=100.0)[-1] == 32, "and below the run's size one puller decides nothing"


def test_far_away_peers_get_what_the_run_asks_for_where_fewer_bytes_would_not_come_sooner() -> None:
    """By default the votes of a run with short steps fell to the smallest: 300 ms on the way are 300 ms for each size."""
    chooser = VoteSize(BYTES, 16, BUDGET)
    far = Took(300.0, 300.0)
    sizes = []
    for _ in range(1000):
        chooser.arrived(chooser.size, far)
        chooser.computed(COMPUTED_MS)
        sizes.append(chooser.choose())
    assert set(sizes) == {16, 32}
    assert sizes.count(32) < 100, "it is tried again, rarely"
    assert settle(chooser, 5.0, steps=300)[-1] == 128, "and later, when bytes decide it, they get fewer"


def test_nothing_changes_without_reports_or_on_old_ones() -> None:
    chooser = VoteSize(BYTES, 32, BUDGET)
    for _ in range(20):
        chooser.computed(COMPUTED_MS)
        chooser.arrived(128, Took(10_000.0, 10_000.0))
        assert chooser.choose() == 32


def test_reports_of_slow_pullers_count_though_fast_ones_are_there_before_them() -> None:
    """The first reports came before the next votes, and closed the payload: a peer slower than a step was never heard of."""
    chooser, arrivals = VoteSize(BYTES, 128, BUDGET), Arrivals()
    for step in range(50):
        chooser.fit(arrivals.took, COMPUTED_MS, ClockConfig(), 2)
        chooser.sent(b"%d" % step, chooser.size)
        arrivals.add(b"%d" % step, 20, "near")
        arrivals.add(b"%d" % (step - 1), 2000, "far")
    assert chooser.size == 128
    assert [took.slowest for took in chooser._arrivals] == REPORTS_KEPT * [2000]


def test_one_slow_step_decides_nothing() -> None:
    chooser = VoteSize(BYTES, 8, BUDGET)
    settle(chooser, 1000.0)
    chooser.arrived(8, Took(100_000.0, 100_000.0))
    assert chooser.choose() == 8


def test_a_size_that_is_not_offered_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="none of"):
        VoteSize(BYTES, 7, BUDGET)


def test_arrivals_are_bounded_and_one_puller_does_not_decide() -> None:
    arrivals = Arrivals()
    for word in (100, 110, 90_000):
        arrivals.add(b"a", word, str(word))
    assert arrivals.took(b"a") == Took(110, 90_000)
    assert arrivals.took(b"b") is None
    for _ in range(2 * ARRIVAL_REPORTS_MAX):
        arrivals.add(b"a", 1_000_000, "90000")
    assert arrivals.took(b"a") == Took(110, 1_000_000), "one peer is one report, however often it pulls"
    for number in range(2 * ARRIVAL_REPORTS_MAX):
        arrivals.add(b"a", 2_000_000, f"peer {number}")
    assert len(arrivals._took[b"a"]) == ARRIVAL_REPORTS_MAX
    for blob in range(ARRIVALS_MAX):
        arrivals.add(blob.to_bytes(2, "big"), 1, "ada")
    assert arrivals.took(b"a") is None
    assert REPORTS_KEPT < ARRIVALS_MAX


@pytest.mark.parametrize(
    ("selection", "offered"),
    [("groups", [128, 64, 32, 16]), ("topk", [4, 8, 16, 32, 64, 128]), ("random", [1024, 512, 256, 128, 64, 32, 16])],
)
def test_votes_take_five_times_the_bytes_if_joiners_have_room_and_places_are_sent(
    selection: str, offered: list[int]
) -> None:
    run = RunConfig.model_validate({"optimizer": {"selection": selection}})
    form = demo_config(run.optimizer, run.optimizer.vote_size, bytes(32)).form
    sizes = {size: form.body_bytes(100, size) for size in form.sizes}
    free = following(run, BUDGET, sizes, metered=False)
    assert free is not None
    assert (free._order, free.size) == (offered, run.optimizer.vote_size)
    assert free.most_bytes == sizes[offered[-1]]
    assert following(run, None, sizes, metered=False) is None
    full = run.model_copy(update={"clock": ClockConfig(snapshot_every=10**8)})
    kept = following(full, BUDGET, sizes, metered=False)
    assert kept is not None
    assert kept._order[-1] == run.optimizer.vote_size, "joiners would find that votes are gone"
    free.size = offered[-1]
    assert free.fit(lambda _: None, COMPUTED_MS, run.clock, 2) == offered[-1]
    assert free.fit(lambda _: None, COMPUTED_MS, full.clock, 2) == run.optimizer.vote_size, (
        "the operator changed the run"
    )
    assert free.fit(lambda _: None, COMPUTED_MS, run.clock, 2) == run.optimizer.vote_size
    assert free.most_bytes == sizes[offered[-1]], "and changed it back"
    metered = following(run, BUDGET, sizes, metered=True)
    assert metered is not None
    assert metered._order[-1] == run.optimizer.vote_size, "the month's bytes would be gone in a fifth of the time"


@given(st.integers(128, 10**9), st.integers(1, 2048), st.integers(1, 1000))
def test_the_votes_of_those_who_are_here_have_room_at_each_peer(parameters: int, peers: int, every: int) -> None:
    own = max(parameters // 128, 1)
    most = most_bytes(own, "groups", every, peers)
    assert own <= most <= GROWTH_MAX * own
    assert most == own or peers * most * PERIODS_KEPT * every <= PAYLOADS_GB * 10**9


def test_two_peers_send_more_though_a_run_would_take_many() -> None:
    """The bound was that of `max_peers` peers, 256 by default: votes of 23 M parameters or more did not grow for anybody."""
    run = RunConfig()
    sizes = {size: 100_000 * BYTES[size] // 100 for size in BYTES}
    chooser = following(run, BUDGET, sizes, metered=False)
    assert chooser is not None
    near = Took(20.0, 20.0)
    for peers, expected in ((2, 16), (50, 16), (60, 32), (256, 128), (2, 16)):
        for _ in range(40):
            chooser.arrived(chooser.size, near)
            chooser.fit(lambda _: None, COMPUTED_MS, run.clock, peers)
        assert chooser.size == expected, peers
