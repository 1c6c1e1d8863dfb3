"""Invite links: round trip; what is damaged on the way is said so."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import OperatorError
from protos.identity import Identity
from protos.invite import ANCHOR_SCHEME, SCHEME, Invite, Ticket, seal_ticket
from protos.limits import INVITE_BYTES_MAX, TICKET_BYTES_MAX, TICKET_LABEL_BYTES_MAX, TICKET_USES_MAX, UNIX_MS_MAX

deterministic = settings(derandomize=True, deadline=None)
hashes = st.binary(min_size=32, max_size=32)
texts = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40), max_size=3).map(tuple)
INVITE = Invite(bytes([1]) * 32, ("[::1]:7700", "host:1"), bytes([2]) * 32, bytes([3]) * 32, ("/ip4/1.2.3.4",), "tiny")


@given(
    invite=st.builds(
        Invite, hashes, texts.filter(bool), hashes, hashes, texts, st.text(st.characters(codec="utf-8"), max_size=64)
    )
)
@deterministic
def test_round_trip(invite: Invite) -> None:
    link = invite.link()
    assert Invite.parse(f"  {link}\n") == invite
    assert not set(link) & set(" \t\"'$&;|<>()*?!`\\"), "a shell changes nothing in it"


@pytest.mark.parametrize(
    "pasted", ["'{}'", '"{}"', "{}.", "<{}>", "({}),", "`{}`", "\u201c{}\u201d", " {}\r\n", "\u00ab {} \u00bb"]
)
def test_what_surrounds_a_pasted_link_is_not_of_it(pasted: str) -> None:
    link = INVITE.link()
    assert Invite.parse(pasted.format(link)) == INVITE
    broken = link[:40] + "\n" + link[40:70] + " \r\n  " + link[70:]
    assert Invite.parse(pasted.format(broken)) == INVITE


@given(at=st.integers(0, 1 << 16), character=st.characters(codec="utf-8"))
@deterministic
def test_damage_is_told(at: int, character: str) -> None:
    link = INVITE.link()
    at %= len(link)
    damaged = link[:at] + character + link[at + 1 :]
    try:
        opened = Invite.parse(damaged)
    except OperatorError as error:
        opened, words = None, str(error)
    if opened is None:
        assert "invite link" in words
    else:  # the same character, or bits of the last one that mean nothing
        assert opened == INVITE


def test_every_truncation_is_told() -> None:
    link = INVITE.link()
    for length in range(len(link)):
        with pytest.raises(OperatorError, match="invite link"):
            Invite.parse(link[:length])


@given(text=st.text(max_size=100))
@deterministic
def test_any_text_is_told(text: str) -> None:
    for link in (text, SCHEME + text):
        with pytest.raises(OperatorError):
            Invite.parse(link)


@pytest.mark.parametrize("field", ["run_id", "coordinators", "coordinator_public_key", "certificate_sha256"])
def test_a_missing_field_is_another_version(field: str) -> None:
    old = replace(INVITE, **{field: () if field == "coordinators" else b""})  # type: ignore[arg-type]
    with pytest.raises(OperatorError, match="another version"):
        Invite.parse(old.link())


def test_too_long_is_refused() -> None:
    with pytest.raises(OperatorError):
        Invite.parse(SCHEME + "A" * INVITE_BYTES_MAX)
    coordinator = Identity.from_seed(bytes(32))
    long = Ticket(bytes(16), UNIX_MS_MAX, TICKET_USES_MAX, "l" * TICKET_LABEL_BYTES_MAX)
    ticket, addresses = seal_ticket(coordinator, bytes(32), long), ("/" + "a" * 255,) * 16
    assert len(ticket) <= TICKET_BYTES_MAX
    key = coordinator.public_key
    largest = Invite(bytes(32), ("h" * 60 + ":7700",), key, bytes(32), addresses, "n" * 64, ticket)
    assert Invite.parse(largest.link()) == largest, "what the limits allow fits"


def test_a_ticket_travels_and_has_to_be_the_coordinators() -> None:
    coordinator = Identity.from_seed(bytes([5]) * 32)
    plain = replace(INVITE, coordinator_public_key=coordinator.public_key)
    ticket = seal_ticket(coordinator, plain.run_id, Ticket(bytes(16), 1, 1, "lab"))
    assert Invite.parse(replace(plain, ticket=ticket).link()).ticket == ticket, "also an expired one: its clock decides"
    assert Invite.parse(plain.link()).ticket == b""
    for wrong in (
        seal_ticket(Identity.generate(), plain.run_id, Ticket(bytes(16), 0, 1)),
        seal_ticket(coordinator, bytes(32), Ticket(bytes(16), 0, 1)),
        b"nonsense",
    ):
        with pytest.raises(OperatorError, match="ticket is not its coordinator's"):
            Invite.parse(replace(plain, ticket=wrong).link())


def test_the_link_of_an_older_version_is_what_it_was() -> None:
    assert INVITE.link() == (
        "swarmentum://CiABAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBARIKWzo6MV06NzcwMBIGaG9zdDoxGiACAgICAgICAgICAgICAgIC"
        "AgICAgICAgICAgICAgICAiIgAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMqDC9pcDQvMS4yLjMuNDIEdGlueVwqzQU"
    )


LINK = INVITE.link()


@pytest.mark.parametrize(
    "pasted",
    [
        f"swarmentum join {LINK}",
        f"$ swarmentum join --home /data '{LINK}' --yes",
        LINK.replace("swarmentum://", "SWARMENTUM://"),
        LINK.replace("swarmentum://", "Swarmentum://"),
        LINK.replace("://", "%3A%2F%2F"),
        f"https://chat.example/redirect?to={LINK.replace('://', '%3a%2f%2f')}&from=ada",
        f"<{LINK}> and then come to the channel",
        f"{LINK}\nSee you there, it has 64 peers!",
        f"{LINK} {LINK}",
        f"The docs say swarmentum://... and yours is {LINK}",
        f"> {LINK[:60]}\n> {LINK[60:]}\n> Ada",
        f"{LINK[:50]}\u200b{LINK[50:]}\u00ad",
        "\ufeff" + LINK,
        LINK.removeprefix(SCHEME),
        f"join {LINK.removeprefix(SCHEME)} please",
    ],
)
def test_the_first_link_of_what_was_pasted_counts(pasted: str) -> None:
    assert Invite.parse(pasted) == INVITE


@pytest.mark.parametrize(
    "pasted", ["swarmentum://...", "swarmentum join swarmentum://...", "swarmentum://LINK", SCHEME]
)
def test_the_example_of_the_docs_is_told_to_be_one(pasted: str) -> None:
    with pytest.raises(OperatorError, match="the example of the docs"):
        Invite.parse(pasted)


@pytest.mark.parametrize("pasted", [f"x{'y' * 200_000}", "swarmentum://" + "a b " * 8000, "%" * 9000])
def test_a_long_text_is_refused_soon(pasted: str) -> None:
    with pytest.raises(OperatorError, match="invite link"):
        Invite.parse(pasted)


def test_the_link_that_makes_anchors_has_a_scheme_of_its_own_and_older_ones_are_known_by_their_ticket() -> None:
    coordinator = Identity.generate()
    peers, anchors = (
        replace(
            INVITE,
            coordinator_public_key=coordinator.public_key,
            ticket=seal_ticket(coordinator, INVITE.run_id, Ticket(bytes(16), 0, 1, anchor=anchor)),
        )
        for anchor in (False, True)
    )
    assert peers.link().startswith(SCHEME)
    assert peers.public("join") is peers
    assert anchors.link().startswith(ANCHOR_SCHEME)
    for link in (anchors.link(), anchors.link().replace(ANCHOR_SCHEME, SCHEME)):
        assert Invite.parse(link) == anchors
        with pytest.raises(OperatorError, match=r"makes anchors.*begins with swarmentum://"):
            Invite.parse(link).public("`swarmentum join`")
