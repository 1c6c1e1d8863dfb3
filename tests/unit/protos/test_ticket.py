"""Tickets: the same after the way out and in; what the coordinator did not sign, or what is out of range, is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.envelope import Kind, seal
from protos.errors import Refusal
from protos.identity import Identity
from protos.invite import Ticket, open_ticket, seal_ticket
from protos.limits import TICKET_BYTES_MAX, TICKET_USES_MAX, UNIX_MS_MAX
from protos.v1 import ticket_pb2

COORDINATOR, STRANGER = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)
RUN = bytes([3]) * 32
GOOD = {"ticket_id": bytes(16), "expires_unix_ms": 5, "uses": 1, "label": "lab machines"}


def opened(data: bytes) -> Ticket:
    return open_ticket(data, run_id=RUN, coordinator=COORDINATOR.public_key)


@given(
    ticket=st.builds(
        Ticket,
        st.binary(min_size=16, max_size=16),
        st.integers(0, UNIX_MS_MAX),
        st.integers(1, TICKET_USES_MAX),
        st.text(max_size=32).filter(str.isprintable),
    )
)
@settings(derandomize=True, deadline=None)
def test_round_trip(ticket: Ticket) -> None:
    sealed = seal_ticket(COORDINATOR, RUN, ticket)
    assert len(sealed) <= TICKET_BYTES_MAX
    assert opened(sealed) == ticket
    assert seal_ticket(COORDINATOR, RUN, ticket) == sealed


@pytest.mark.parametrize(("changed", "reason"), [
    ({"ticket_id": b"short"}, "malformed"), ({"uses": 0}, "out_of_range"), ({"uses": TICKET_USES_MAX + 1}, "out_of_range"),
    ({"expires_unix_ms": UNIX_MS_MAX + 1}, "out_of_range"), ({"label": "l" * 129}, "out_of_range"),
    ({"label": "two\nlines"}, "out_of_range"), ({"label": "\x1b[2J"}, "out_of_range"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused_though_it_is_signed(changed: dict[str, object], reason: str) -> None:
    body = ticket_pb2.Ticket(**{**GOOD, **changed})  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=reason):
        opened(seal(COORDINATOR, Kind.KIND_TICKET, RUN, body).SerializeToString())


def test_what_the_coordinator_did_not_sign_is_refused() -> None:
    body, good = ticket_pb2.Ticket(**GOOD), seal_ticket(COORDINATOR, RUN, Ticket(**GOOD))  # type: ignore[arg-type]
    for data, reason in (
        (seal(STRANGER, Kind.KIND_TICKET, RUN, body).SerializeToString(), "unknown_signer"),
        (seal(COORDINATOR, Kind.KIND_TICKET, bytes(32), body).SerializeToString(), "wrong_run"),
        (seal(COORDINATOR, Kind.KIND_ADMIN, RUN, body).SerializeToString(), "wrong_kind"),
        (good[:-1] + bytes([good[-1] ^ 1]), "bad_signature"),
        (good + bytes(TICKET_BYTES_MAX), "too_large"),
        (b"nonsense", "malformed"),
    ):
        with pytest.raises(Refusal, match=reason):
            opened(data)
