"""An owner's name: what the door lets through, and how readers group peers."""

import pytest

from protos import accounts as owners
from protos.accounts import NOBODY, Owner, groups, name_of, owner_body, owner_from_body, shown_owner
from protos.errors import Refusal
from protos.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize("text", ["Ada", "  Ada Lovelace ", "e\u0301", "x" * 64, "山田 ☕", "[bold]<b>"])
def test_a_name_that_prints(text: str) -> None:
    name = name_of(text)
    assert name == name_of(name)
    assert owner_from_body(pb.Owner(name=name)) == Owner(name)


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
            owner_from_body(pb.Owner(name=text))
        assert shown_owner(pb.Owner(name=text)) == NOBODY


def test_a_long_name_is_refused_before_its_unicode_form_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of 1 MB of marks takes minutes. A stranger's join held the coordinator's clock up that long."""
    monkeypatch.setattr(owners, "name_of", lambda text: pytest.fail(f"{len(text)} characters were normalised"))
    with pytest.raises(Refusal, match="more than 64 characters"):
        owner_from_body(pb.Owner(name="a" + "\u0301" * 1000 + "\u0316" * 1000))


def test_a_key_of_an_earlier_version_adds_nothing_to_a_name() -> None:
    body = pb.Owner(name="Ada", public_key=bytes(32), signature=bytes(64))
    assert owner_body(owner_from_body(body)) == pb.Owner(name="Ada")


def test_peers_that_name_one_owner_are_a_group() -> None:
    found = groups(
        {b"1": Owner("Ada"), b"2": Owner("Bob"), b"3": Owner("Ada")}, {b"1": 1, b"2": 5, b"3": 1}.__getitem__
    )
    assert [(group.owner.name, group.peers) for group in found] == [("Bob", [b"2"]), ("Ada", [b"1", b"3"])]
