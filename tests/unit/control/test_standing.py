"""What became of a peer's votes, step by step, from the facts that the training thread saw."""

from __future__ import annotations

from node.control.standing import STEPS_KEPT, Standing


def test_each_step_says_what_became_of_it_and_why() -> None:
    standing = Standing()
    standing.opened(1, asked=True)
    standing.announced(1, 16)
    standing.opened(2, asked=True)  # comes with the entry of step 1
    standing.decided(1, accepted=True, samples=64, peers=4)
    standing.announced(2, 16)
    standing.decided(2, accepted=False, samples=48, peers=3)
    standing.opened(3, asked=True)
    standing.decided(3, accepted=False, samples=48, peers=3)
    standing.opened(4, asked=True)
    standing.skipped(4, "the owner paused the peer during the step", "paused")
    standing.decided(4, accepted=False, samples=48, peers=3)
    standing.opened(5, asked=False)
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


def test_a_step_that_opens_again_keeps_what_was_announced() -> None:
    standing = Standing()
    standing.opened(1, asked=True)
    standing.announced(1, 16)
    standing.opened(1, asked=True)
    standing.decided(1, accepted=True, samples=16, peers=1)
    assert standing.last(1)[0]["outcome"] == "accepted"
    assert standing.share() == 1.0


def test_only_the_last_steps_are_kept() -> None:
    standing = Standing()
    for step in range(1, 3 * STEPS_KEPT):
        standing.opened(step, asked=True)
        standing.decided(step, accepted=False, samples=1, peers=1)
    assert len(standing.last()) == STEPS_KEPT
    assert standing.last(1)[0]["step"] == 3 * STEPS_KEPT - 1
    assert Standing().share() == 0.0
