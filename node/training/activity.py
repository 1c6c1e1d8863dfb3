"""What a peer does in its run, as one state, and the table of legal moves. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Activity(Enum):
    """What a peer does in its run now."""

    LOADING = "loading"
    """Its momentum is not here yet, and may not be saved."""
    FOLLOWING = "following"
    """It applies the log, and has not voted since it came, went on after a pause, or jumped to another state."""
    VOTING = "voting"
    PAUSED = "paused"
    """By its owner or a condition, and the coordinator knows."""


MOVES: Final = {
    Activity.LOADING: {Activity.FOLLOWING},
    Activity.FOLLOWING: {Activity.VOTING, Activity.PAUSED},
    Activity.VOTING: {Activity.FOLLOWING, Activity.PAUSED},
    Activity.PAUSED: {Activity.FOLLOWING},
}


def move(now: Activity, then: Activity) -> Activity:
    """The next state. An illegal move is our own mistake."""
    assert then in MOVES[now], f"a peer that is {now.value} cannot be {then.value} next"
    return then
