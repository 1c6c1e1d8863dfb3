"""Who is served blobs when more come than can be."""

import pytest

from node.blobs import turns as audience_module
from node.blobs.turns import Audience, ServedStream

MEMBER = "member"


def seated(audience: Audience, remote: str, now: float, ended: list[str]) -> ServedStream | None:
    return audience.admit(remote, lambda: ended.append(remote), now)


def test_members_have_streams_that_no_stranger_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "STRANGERS_STREAMS_MAX", 4)
    monkeypatch.setattr(audience_module, "STREAMS_A_PEER_MAX", 3)
    audience, ended = Audience(frozenset({MEMBER})), list[str]()
    for number in range(20):
        assert seated(audience, f"stranger-{number}", number, ended)
    assert len(audience) == 4
    assert [seated(audience, MEMBER, 99, ended) is not None for _ in range(4)] == [True, True, True, False]
    assert ended == [f"stranger-{number}" for number in range(16)], "who kept us waiting longest went"
    audience.members = frozenset()
    assert seated(audience, "late", 100, ended), "a member that left the roster is one of the strangers"
    assert len(audience) == 7 - 1 + 1


def test_a_stranger_that_waits_for_us_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "STRANGERS_STREAMS_MAX", 2)
    audience, ended = Audience(frozenset()), list[str]()
    first, second = seated(audience, "a", 0, ended), seated(audience, "b", 1, ended)
    assert second is not None
    first.waits_since = None
    assert seated(audience, "c", 2, ended)
    assert ended == ["b"], "a is being sent what it asked for"
    for seat in audience._seats:
        seat.waits_since = None
    assert seated(audience, "d", 3, ended) is None


def test_strangers_with_many_streams_make_room_for_one_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in a test of an attack: all places waited for their turn, and a joiner lost its stream before it could ask."""
    monkeypatch.setattr(audience_module, "STRANGERS_STREAMS_MAX", 6)
    audience, ended = Audience(frozenset()), list[str]()
    for number in range(6):
        seat = seated(audience, f"greedy-{number % 2}", number, ended)
        seat.waits_since = None  # it has asked, and waits for its turn
    assert seated(audience, "joiner", 10, ended)
    assert [name[:6] for name in ended] == ["greedy"]
    assert seated(audience, "greedy-0", 11, ended) is None
    assert "joiner" not in ended, "its new stream is the only one that the server waits for"


def test_one_stranger_has_few_streams_and_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "STREAMS_A_STRANGER_MAX", 2)
    audience, ended = Audience(frozenset()), list[str]()
    seated(audience, "other", 0, ended)
    for now in range(1, 5):
        assert seated(audience, "greedy", now, ended)
    assert ended == ["greedy", "greedy"]


def test_blobs_for_strangers_take_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience_module, "STRANGERS_BYTES_HELD_MAX", 100)
    audience, ended = Audience(frozenset({MEMBER})), list[str]()
    for now, (remote, size) in enumerate((("a", 60), ("b", 30), (MEMBER, 500), ("c", 30), ("d", 500))):
        seat = seated(audience, remote, now, ended)
        assert seat is not None
        audience.hold(seat, size)
    assert ended == ["a", "b", "c"], "one that is larger than all may be is sent alone"


def test_strangers_get_what_is_left() -> None:
    audience = Audience(frozenset({MEMBER}))
    stranger, member = audience.admit("a", lambda: None, 0), audience.admit(MEMBER, lambda: None, 0)
    assert stranger is not None
    assert member is not None
    rate, busy = audience_module.STRANGERS_BYTES_A_SECOND, audience_module.STRANGERS_BYTES_A_SECOND_BUSY
    assert audience.delay(stranger, rate, 10.0) == 0
    assert audience.delay(stranger, rate, 10.0) == pytest.approx(1.0)
    assert audience.delay(member, 10 * rate, 20.0) == 0
    assert audience.delay(member, 10 * rate, 20.0) == 0
    assert audience.delay(stranger, busy, 20.0) == 0
    assert audience.delay(stranger, busy, 20.5) == pytest.approx(0.5)
    assert audience.delay(stranger, rate, 30.0) == 0


def test_a_member_on_a_slow_link_goes_before_strangers_between_two_parts_of_its_blob() -> None:
    audience = Audience(frozenset({MEMBER}))
    stranger, member = audience.admit("a", lambda: None, 0), audience.admit(MEMBER, lambda: None, 0)
    assert stranger is not None
    assert member is not None
    busy = audience_module.STRANGERS_BYTES_A_SECOND_BUSY
    audience.hold(member, 1000)
    audience.delay(member, 500, 10.0)
    assert audience.delay(stranger, busy, 10.2) == 0
    assert audience.delay(stranger, busy, 10.2) == pytest.approx(1.0), "half of the blob is on its way"
    audience.delay(member, 500, 20.0)
    audience.hold(member, 0)
    assert audience.delay(stranger, busy, 20.1) == 0
    assert audience.delay(stranger, busy, 20.1) < 0.1, "the member has its blob"
    audience.hold(member, 1000)
    assert audience.delay(stranger, busy, 30.0) == 0
    assert audience.delay(stranger, busy, 30.0) < 0.1, "a member that reads nothing more holds up nobody for long"
