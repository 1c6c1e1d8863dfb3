"""Limits of those who ask to join: by network address, and of what is remembered."""

import ipaddress

import pytest

from coordinator.serving import sessions
from coordinator.serving.sessions import ADDRESS_CHALLENGE_MS, ADDRESS_CHALLENGES_MAX, Sessions


def test_one_address_gets_its_challenges_and_then_as_many_as_time_allows() -> None:
    door = Sessions()
    assert sum(door.may_ask("ipv4:192.0.2.1", 1_000) for _ in range(10_000)) == ADDRESS_CHALLENGES_MAX
    assert door.may_ask("ipv4:192.0.2.2", 1_000), "others are not in its way"
    later = 1_000 + 10 * ADDRESS_CHALLENGE_MS
    assert sum(door.may_ask("ipv4:192.0.2.1", later) for _ in range(10_000)) == 10


def test_addresses_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ADDRESSES_KEPT", 8)
    door = Sessions()
    for number in range(100):
        assert door.may_ask(f"ipv6:{number}", 0)
    assert len(door._asking._paid_until) == 8


def test_who_asks_for_many_challenges_forgets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight addresses asked for 4,096 in a second: nobody's challenge lived until its join."""
    monkeypatch.setattr(sessions, "CHALLENGES_MAX", 16)
    door = Sessions()
    honest = door.challenge(1_000, "192.0.2.1")
    for number in range(200):
        door.challenge(1_000, f"198.51.100.{number % 8}")
    door.answer(honest, 1_001)
    assert len(door._challenges) <= 16
    assert sum(door._challenged.values()) == len(door._challenges)


def test_who_opens_many_sessions_ends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSIONS_MAX", 8)
    door, run = Sessions(), bytes(32)
    honest = door.open(run, b"a" * 32, ipaddress.ip_address("192.0.2.1"))
    for number in range(100):
        door.open(run, number.to_bytes(32, "big"), ipaddress.ip_address("198.51.100.7"))
    assert door.check(honest, run, b"a" * 32, 1)
    assert len(door._sessions) == 8
    door.forget()
    assert not door._sites
