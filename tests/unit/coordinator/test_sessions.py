"""Limits of those who ask to join: by network address, and of what is remembered."""

from __future__ import annotations

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
