"""The figures of a run: equal to the log's, whatever the peers claim, and without a clock of their own."""

import json
import math
from dataclasses import replace

import pytest

from node.web.run_stats import EVENTS_MAX, LATE_STEPS, SHARE_STEPS, RunStats
from protos.accounts import loss_of
from protos.evaluation import Evaluation, seal_evaluation
from protos.identity import peer_id
from protos.log import Exclusion
from tests.unit.web.logs import PEERS, RUN, contribution, entry, signed_log


def book_of(steps: int, *, every: float | None = None) -> RunStats:
    """`every`: seconds between two entries that were seen to come."""
    book = RunStats(RUN)
    for signed in signed_log(steps):
        seen = None if every is None else 1000.0 + every * signed.entry.step
        book.add(signed.entry, seen)
        if seen is not None:
            book.looked(seen)
    return book


def test_the_sums_are_those_of_the_log() -> None:
    log = [signed.entry for signed in signed_log(30)]
    book = book_of(30)
    counted = [c for it in log for c in it.contributions]
    assert book.head == 30
    assert (book.votes, book.tokens) == (len(counted), sum(c.tokens for c in counted))
    assert book.payload_bytes == sum(c.payload_bytes for c in counted)
    assert book.loss == loss_of(log[-1].contributions)
    for account in book.accounts.by_key.values():
        mine = [c for c in counted if peer_id(c.public_key) == account.id]
        assert (account.votes_accepted, account.samples) == (len(mine), sum(c.samples for c in mine))
        assert (account.first_step, account.last_step, account.uptime) == (1, 30, 1.0)


@pytest.mark.parametrize("points_max", [1, 2, 7, 30, 31, 600])
def test_fewer_points_keep_the_sums_and_the_means(points_max: int) -> None:
    book = book_of(30)
    exact, few = book.points(1, 30, 30), book.points(1, 30, points_max)
    assert exact.steps == list(range(1, 31))
    assert len(few.steps) <= points_max
    assert few.steps[-1] == 30
    assert (few.tokens[-1], few.payload_bytes[-1]) == (book.tokens, book.payload_bytes)
    begin = 0
    for index, end in enumerate(few.steps):
        losses = [value for value in exact.loss[begin:end] if value is not None]
        assert few.loss[index] == pytest.approx(sum(losses) / len(losses))
        begin = end


def test_a_part_of_the_steps() -> None:
    book = book_of(30)
    assert book.points(11, 20, 100).steps == list(range(11, 21))
    assert book.points(31, 99, 100).steps == []
    assert book.points(0, 1 << 50, 100).steps == list(range(1, 31))
    assert RunStats(RUN).points(1, 10, 10).steps == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_a_gap_and_not_an_error(loss: float) -> None:
    book = RunStats(RUN)
    book.add(entry(1, RUN), None)
    book.add(entry(2, RUN, loss), None)
    points = book.points(1, 2, 2)
    assert points.loss[0] == pytest.approx(4.0)
    assert points.loss[1] is None or math.isfinite(points.loss[1])
    assert book.loss is None or math.isfinite(book.loss)
    json.dumps(points.model_dump(), allow_nan=False)


def test_the_speed_is_that_of_the_entries_that_were_seen() -> None:
    assert book_of(30).speed(1e9) is None, "nobody saw these entries come"
    book = book_of(30, every=2.0)
    steps, tokens = book.speed(1000.0 + 60.0) or (0.0, 0.0)
    assert steps == pytest.approx(0.5)
    assert tokens == pytest.approx(0.5 * 3 * 512)


def test_a_run_that_stands_still_becomes_slower() -> None:
    book = book_of(30, every=2.0)
    after = [(book.speed(1060.0 + wait) or (0.0, 0.0))[0] for wait in (0.0, 5.0, 60.0, 6000.0)]
    assert after[0] == after[1] == pytest.approx(0.5)
    assert after[1] > after[2] > after[3]
    assert after[3] < 0.01


def test_the_share_is_of_the_last_steps_samples() -> None:
    book = book_of(2 * SHARE_STEPS)
    shares = book.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[PEERS[2].public_key] == pytest.approx(6 / 15)
    for step in range(1, SHARE_STEPS + 1):
        alone = replace(entry(2 * SHARE_STEPS + step, RUN), contributions=(contribution(0, step),))
        book.add(alone, None)
    assert book.shares() == {PEERS[0].public_key: 1.0}


def test_the_feed_says_what_the_log_says_and_is_bounded() -> None:
    book = book_of(1)
    assert [event.kind for event in book.events] == ["first vote"] * 3
    out = Exclusion(PEERS[0].public_key, "noise \x1b[2J\u202e", by_operator=True)
    book.add(entry(2, RUN, exclusions=(out,)), 5.0)
    last = book.events[-1]
    assert (last.kind, last.step, last.seen) == ("excluded", 2, 5.0)
    assert last.text.isprintable()
    assert "noise ?[2J?" in last.text
    book.add(replace(entry(3, RUN), readmitted=(PEERS[0].public_key,)), None)
    assert book.events[-1].kind == "readmitted"
    for number in range(2 * EVENTS_MAX):
        book.tell("joined", f"peer {number}", None)
    assert len(book.events) == EVENTS_MAX
    numbers = [event.number for event in book.events]
    assert numbers == list(range(numbers[0], numbers[0] + EVENTS_MAX))


def test_of_snapshots_in_a_row_only_the_newest_is_told() -> None:
    book = RunStats(RUN)
    for step in range(5):
        book.tell("snapshot", f"snapshot {step}", None)
    assert [event.text for event in book.events] == ["snapshot 4"]


def test_held_out_losses_of_entries_and_facts_are_thinned_and_damaged_ones_left_out() -> None:
    book = RunStats(bytes(32))
    for step in range(1, 301):
        for number, peer in enumerate(PEERS[:2]):
            made = Evaluation(b"", step, 2.0 + 0.002 * number, 64, bytes(32), "cpu")
            book.take([seal_evaluation(peer, bytes(32), made), b"damaged"])
    shown = book.held_out(120)
    assert len(shown) == 100
    assert (shown[-1].step, shown[-1].count, shown[-1].agrees) == (300, 2, False)


def test_what_the_model_wrote_is_told_once_a_state_the_newest_first() -> None:
    book = RunStats(bytes(32))
    assert list(book.written()) == []
    for step, text in ((10, "old"), (20, "a\nb"), (30, "")):
        made = Evaluation(b"", step, 2.0, 64, bytes(32), "cpu", text)
        book.take([seal_evaluation(PEERS[0], bytes(32), made)])
        book.take([seal_evaluation(PEERS[1], bytes(32), replace(made, sample="of another peer" if text else ""))])
    found = [(it.step, it.author, it.sample) for it in book.written()]
    assert found == [(20, PEERS[0].public_key, "a\nb"), (10, PEERS[0].public_key, "old")]


def test_a_peer_whose_votes_do_not_count_any_more_is_told_once_in_a_while() -> None:
    book, parent = RunStats(RUN), RUN
    for step in range(1, 1 + 3 * LATE_STEPS):
        made = entry(step, parent)
        absent = step % 2 == 0  # the third peer is in every other step
        book.add(replace(made, contributions=made.contributions[: 2 if absent else 3]), 7.0)
    told = [(event.step, event.text) for event in book.events if event.kind == "late"]
    assert [step for step, _ in told] == [2, 2 + LATE_STEPS, 2 + 2 * LATE_STEPS]
    assert told[0][1] == f"no votes of {peer_id(PEERS[2].public_key)} count in step 2: late, paused or gone"
