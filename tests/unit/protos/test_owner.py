"""An owner's name and its signature: what the door lets through, and how readers group peers."""

import pytest

from protos import owner as owners
from protos.errors import Refusal
from protos.identity import Identity
from protos.owner import NOBODY, Owner, name_of, owner_body, owner_from_body, shown_owner
from protos.v1 import coordinator_pb2 as pb


def signed_by(key: Identity, name: str, public_key: bytes) -> Owner:
    """As `swarmentum owner add` of earlier versions signed."""
    return Owner(name, key.public_key, key.sign(b"swarmentum/v1/owner\0" + public_key + name.encode()))


KEY, PEER, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))


@pytest.mark.parametrize("text", ["Ada", "  Ada Lovelace ", "e\u0301", "x" * 64, "山田 ☕", "[bold]<b>"])
def test_a_name_that_prints(text: str) -> None:
    name = name_of(text)
    assert name == name_of(name)
    assert owner_from_body(pb.Owner(name=name), PEER.public_key) == Owner(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 characters"),
        ("   ", "0 characters"),
        ("x" * 65, "65 characters; a name has 1 to 64"),
        ("a\nb", "U+000A (a control character) does not print"),
        ("\x1b[2J", "U+001B"),
        ("a\u202eb", "U+202E (RIGHT-TO-LEFT OVERRIDE) does not print"),
        ("a\u200bb", "U+200B (ZERO WIDTH SPACE)"),
    ],
)
def test_a_name_that_does_not_print_is_refused_at_both_doors(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="character") as caught:
        name_of(text)
    assert words in str(caught.value)
    if text:
        with pytest.raises(Refusal):
            owner_from_body(pb.Owner(name=text), PEER.public_key)
        assert shown_owner(pb.Owner(name=text), PEER.public_key) == NOBODY


def test_a_long_name_is_refused_before_its_unicode_form_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of 1 MB of marks takes minutes. A stranger's join held the coordinator's clock up that long."""
    monkeypatch.setattr(owners, "name_of", lambda text: pytest.fail(f"{len(text)} characters were normalised"))
    with pytest.raises(Refusal, match="more than 64 characters"):
        owner_from_body(pb.Owner(name="a" + "\u0301" * 1000 + "\u0316" * 1000), PEER.public_key)


def test_a_signature_counts_for_one_peer_and_one_name() -> None:
    signed = signed_by(KEY, "Ada", PEER.public_key)
    assert owner_from_body(owner_body(signed), PEER.public_key).standing == "signed"
    wrong = (
        (owner_body(signed), OTHER.public_key),
        (pb.Owner(name="Bob", public_key=signed.public_key, signature=signed.signature), PEER.public_key),
        (pb.Owner(name="Ada", public_key=OTHER.public_key, signature=signed.signature), PEER.public_key),
        (pb.Owner(name="Ada", public_key=signed.public_key), PEER.public_key),
        (pb.Owner(name="Ada", public_key=b"short", signature=b"x"), PEER.public_key),
    )
    for body, public_key in wrong:
        with pytest.raises(Refusal):
            owner_from_body(body, public_key)


def test_a_claimed_name_does_not_join_the_group_of_a_signed_one() -> None:
    found = owners.groups(
        {
            PEER.public_key: signed_by(KEY, "Ada", PEER.public_key),
            KEY.public_key: signed_by(KEY, "Ada", KEY.public_key),
            OTHER.public_key: Owner("Ada"),
        },
        lambda key: 1.0,
    )
    assert [(str(group.owner), len(group.peers)) for group in found] == [("Ada (signed)", 2), ("Ada (claimed)", 1)]
    assert found[0].key_id == KEY.peer_id
