"""Two programs with one identity are told apart from one that starts again."""

from ipaddress import ip_address

from coordinator.serving import sessions
from coordinator.serving.sessions import IdentityPrograms

ADA = b"run", b"ada"
HERE, THERE = ip_address("192.0.2.1"), ip_address("192.0.2.2")


def test_a_program_that_comes_back_after_another_took_its_place_proves_two() -> None:
    seen = IdentityPrograms()
    assert seen.joined(ADA, b"1", HERE, 0, connected=False) == ""
    assert seen.joined(ADA, b"1", HERE, 5_000, connected=True) == "", "the same program joins again"
    assert "connected now, from 192.0.2.1" in seen.joined(ADA, b"2", THERE, 60_000, connected=True)
    assert "another program uses it, too: it joined 3 s ago from 192.0.2.2" in seen.joined(
        ADA, b"1", HERE, 63_000, connected=True
    )
    assert "from 192.0.2.1" in seen.joined(ADA, b"2", THERE, 64_000, connected=False)


def test_a_program_that_was_started_again_is_no_second_one() -> None:
    seen = IdentityPrograms()
    for number in range(20):
        assert seen.joined(ADA, bytes([number]), HERE, 1000 * number, connected=False) == ""
    assert seen.joined((b"run", b"bob"), b"1", THERE, 0, connected=True) == ""


def test_older_versions_and_too_many_identities_are_bounded() -> None:
    seen = IdentityPrograms()
    assert seen.joined(ADA, b"", HERE, 0, connected=True) == ""
    assert seen.joined(ADA, b"", THERE, 0, connected=True) == ""
    assert not seen._seen
    for number in range(sessions.IDENTITIES_MAX + 10):
        seen.joined((b"run", number.to_bytes(4, "big")), b"1", None, 0, connected=False)
    assert len(seen._seen) == sessions.IDENTITIES_MAX
