"""What became of a peer's votes, step by step, from the facts that the training thread saw."""

from node.control.vote_history import OPEN_KEPT, STEPS_KEPT, VoteHistory
from node.swarm.facts import NotCounted, Waiting
from protos.assignment import Range


def test_each_step_says_what_became_of_it_and_why() -> None:
    standing = VoteHistory()
    standing.opened(1, 0, asked=True)
    standing.announced(1, 16)
    standing.opened(2, 1, asked=True)  # comes with the entry of step 1
    standing.decided(1, accepted=True, samples=64, peers=4)
    standing.announced(2, 16)
    standing.decided(2, accepted=False, samples=48, peers=3)
    standing.opened(3, 2, asked=True)
    standing.decided(3, accepted=False, samples=48, peers=3)
    standing.opened(4, 3, asked=True)
    standing.skipped(4, "the owner paused the peer during the step", "paused")
    standing.decided(4, accepted=False, samples=48, peers=3)
    standing.opened(5, 4, asked=False)
    standing.decided(5, accepted=False, samples=64, peers=4)
    standing.decided(6, accepted=False, samples=64, peers=4)
    told = {fate["step"]: (fate["outcome"], fate["why"]) for fate in standing.last()}
    assert list(told) == [6, 5, 4, 3, 2, 1]
    assert told[1] == ("accepted", "")
    assert told[2][0] == "refused"
    assert "3 peers" in told[2][1]
    assert told[3] == ("late", "the step was decided before the votes were announced")
    assert told[4] == ("paused", "the owner paused the peer during the step")
    assert told[5][0] == "not asked"
    assert told[6][0] == "replayed"
    assert standing.share() == 16 / (64 + 48 + 48 + 48 + 64 + 64)


def test_the_coordinator_s_reason_is_told_whether_it_comes_before_or_after_the_entry() -> None:
    standing = VoteHistory()
    for step, early in ((1, True), (2, False)):
        standing.opened(step, step - 1, asked=True)
        standing.announced(step, 16)
        if early:
            standing.told(NotCounted(step, "held by 3 of 8 peers, quorum 5"))
        standing.decided(step, accepted=False, samples=48, peers=3)
        if not early:
            assert standing.last(1)[0]["why"] == "decided without them; the step counts the votes of 3 peers"
            standing.told(NotCounted(step, "held by 3 of 8 peers, quorum 5"))
        assert standing.last(1)[0]["why"] == "held by 3 of 8 peers, quorum 5"
    standing.opened(3, 2, asked=True)
    standing.announced(3, 16)
    standing.decided(3, accepted=True, samples=48, peers=3)
    standing.told(NotCounted(3, "a coordinator that contradicts its log"))
    assert standing.last(1)[0]["why"] == ""
    for step in range(4, 100):
        standing.told(NotCounted(step, "of steps that never come"))
    assert len(standing._whys) == OPEN_KEPT


def test_a_late_peer_is_told_by_how_much() -> None:
    standing = VoteHistory()
    for step, done, wanted, why in (
        (
            1,
            6,
            8,
            "late by about 0.7 s: the step was decided before the votes were announced, with 6 of 8 samples computed",
        ),
        (2, 0, 8, "the step was decided before the votes were announced, with 0 of 8 samples computed in 2.0 s"),
        (3, 8, 8, "the step was decided before the votes were announced, with 8 of 8 samples computed in 2.0 s"),
    ):
        standing.opened(step, step - 1, asked=True)
        standing.late(step, done, (Range(0, 4), Range(20, 16 + wanted)), 2.0)
        standing.decided(step, accepted=False, samples=48, peers=3)
        assert standing.last(1)[0]["outcome"] == "late"
        assert standing.last(1)[0]["why"].startswith(why)


def test_a_peer_that_no_roster_names_is_told_why() -> None:
    standing = VoteHistory()
    standing.opened(3, 0, asked=False)
    standing.decided(3, accepted=False, samples=8, peers=1)
    assert standing.last(1)[0]["why"].endswith(": this peer had 2 steps to apply when the step was opened")
    standing.opened(4, 3, asked=True)
    standing.announced(4, 8)
    standing.decided(4, accepted=False, samples=8, peers=1, tried=True)
    standing.opened(5, 4, asked=False)
    standing.decided(5, accepted=False, samples=8, peers=1)
    assert standing.last(1)[0]["why"].endswith(": newcomers take turns until their checks are passed")


def test_a_step_that_opens_again_keeps_what_was_announced() -> None:
    standing = VoteHistory()
    standing.opened(1, 0, asked=True)
    standing.announced(1, 16)
    standing.opened(1, 0, asked=True)
    standing.decided(1, accepted=True, samples=16, peers=1)
    assert standing.last(1)[0]["outcome"] == "accepted"
    assert standing.share() == 1.0


def test_only_the_last_steps_are_kept() -> None:
    standing = VoteHistory()
    for step in range(1, 3 * STEPS_KEPT):
        standing.opened(step, step - 1, asked=True)
        standing.decided(step, accepted=False, samples=1, peers=1)
    assert len(standing.last()) == STEPS_KEPT
    assert standing.last(1)[0]["step"] == 3 * STEPS_KEPT - 1
    assert VoteHistory().share() == 0.0


def test_a_peer_on_probation_is_told_so_and_not_that_its_payload_was_lost() -> None:
    standing = VoteHistory()
    standing.opened(1, 0, asked=True)
    standing.announced(1, 16, 512)
    standing.decided(1, accepted=False, samples=48, peers=3, tried=True)
    fate = standing.last(1)[0]
    assert (fate["outcome"], fate["samples"], fate["tokens"], fate["peers"]) == ("probation", 0, 0, 3)
    assert "do not count yet" in fate["why"]


def test_what_was_given_is_of_the_steps_that_the_peer_was_there_for() -> None:
    standing = VoteHistory()
    standing.decided(1, accepted=False, samples=1000, peers=3)  # replayed
    for step, accepted in ((2, True), (3, False), (4, True)):
        standing.opened(step, step - 1, asked=True)
        standing.announced(step, 16, 512)
        standing.decided(step, accepted=accepted, samples=64, peers=4, loss=5.0 - step)
    given = standing.given
    assert (given.samples, given.tokens, given.all_samples) == (32, 1024, 192)
    assert given.share == 32 / 192
    assert standing.losses() == [0.0, 3.0, 2.0, 1.0]


def test_the_pace_is_that_of_the_last_steps_and_begins_anew_after_a_wait() -> None:
    now = [100.0]
    standing = VoteHistory(lambda: now[0])

    def decide(step: int, seconds: float) -> None:
        now[0] += seconds
        standing.opened(step, step - 1, asked=True)
        standing.decided(step, accepted=False, samples=1, peers=1, loss=float("nan"))

    assert standing.step_seconds() is None
    decide(1, 0.0)
    assert standing.step_seconds() is None
    for step in range(2, 40):
        decide(step, 2.0)
    assert standing.step_seconds() == 2.0
    standing.told(Waiting("1 of 2 peers"))
    assert (standing.waiting, standing.step_seconds()) == ("1 of 2 peers", None)
    decide(40, 1000.0)
    decide(41, 3.0)
    assert (standing.waiting, standing.step_seconds()) == ("", 3.0)
    assert standing.losses() == [], "JSON has no NaN"


def test_steps_of_the_log_that_a_paused_peer_applies_are_told_as_paused() -> None:
    standing = VoteHistory()
    standing.paused = True
    standing.decided(1, accepted=False, samples=8, peers=1)
    standing.paused = False
    standing.decided(2, accepted=False, samples=8, peers=1)
    assert [fate["outcome"] for fate in standing.last()] == ["replayed", "paused"]
