"""Places for calls: nobody who is far away locks out the operator on the coordinator's own machine."""

from coordinator.serving.call_limits import LIMITS, LOOPBACK, Caller, CallSlot, Lane, Places


def taken(places: Places, lane: Lane, where: str, count: int) -> int:
    return sum(isinstance(places.acquire(lane, Caller(where, f"{where}:{n}"), 0.0), CallSlot) for n in range(count))


def test_strangers_in_the_operators_lane_leave_its_own_machine_room() -> None:
    """Four addresses with eight slow calls each took all 32 places."""
    places, limits = Places(), LIMITS[Lane.OPERATOR]
    assert sum(taken(places, Lane.OPERATOR, f"192.0.2.{n}", 99) for n in range(9)) == limits.all_max
    assert taken(places, Lane.OPERATOR, LOOPBACK, 99) == limits.loopback_max


def test_other_lanes_have_one_limit_for_all() -> None:
    places, limits = Places(), LIMITS[Lane.JOINING]
    assert sum(taken(places, Lane.JOINING, f"192.0.2.{n}", 99) for n in range(20)) == limits.all_max
    assert taken(places, Lane.JOINING, LOOPBACK, 9) == 0
