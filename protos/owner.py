"""The owner that a peer names: a claim, which nobody checks. ADR 35. Pure.

One door for the bytes of strangers: `owner_from_body`. Refuses names that do not print on one line: control characters, and
marks that turn the direction of writing. Keys of owners signed names in earlier versions; they count as no more than the name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from protos.errors import Reason, Refusal
from protos.limits import OWNER_CHARACTERS_MAX
from protos.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Owner:
    """`name` is empty for a peer that names nobody."""

    name: str = ""


NOBODY = Owner()


@dataclass(frozen=True)
class Group:
    """The peers that name one owner."""

    owner: Owner
    peers: list[bytes] = field(default_factory=list)


def name_of(text: str) -> str:
    """The name as a person wrote it, in the one spelling that Unicode calls NFC. ValueError says what is wrong."""
    name = unicodedata.normalize("NFC", text.strip())
    if not 1 <= len(name) <= OWNER_CHARACTERS_MAX:
        raise ValueError(f"{len(name)} characters; a name has 1 to {OWNER_CHARACTERS_MAX}")
    wrong = next((c for c in name if not c.isprintable()), None)
    if wrong is not None:
        kind = unicodedata.name(wrong, "a control character")
        raise ValueError(f"the character U+{ord(wrong):04X} ({kind}) does not print; leave it out")
    return name


def owner_body(owner: Owner) -> pb.Owner:
    """As a message."""
    return pb.Owner(name=owner.name)


def owner_from_body(body: pb.Owner) -> Owner:
    """The owner that a peer names. Refusal for a wrong name."""
    name: str = body.name
    if not name:
        return NOBODY
    if len(name) > OWNER_CHARACTERS_MAX:  # Unicode's forms take quadratic time: a stranger's 1 MB is minutes
        raise Refusal(Reason.TOO_LARGE, f"the owner's name has more than {OWNER_CHARACTERS_MAX} characters")
    try:
        usual = name_of(name)
    except ValueError as error:
        raise Refusal(Reason.OUT_OF_RANGE, f"the owner's name: {error}") from error
    if usual != name:
        raise Refusal(Reason.MALFORMED, "the owner's name has spaces around it, or is not in Unicode's form NFC")
    return Owner(name)


def shown_owner(body: pb.Owner) -> Owner:
    """For a reader, who trusts no coordinator: an owner that would not pass the door is nobody."""
    try:
        return owner_from_body(body)
    except Refusal:
        return NOBODY


def owners_of(peers: Iterable[pb.PeerStatus]) -> dict[bytes, Owner]:
    """Public key of a peer -> its owner, for those that name one."""
    found = {peer.public_key: shown_owner(peer.owner) for peer in peers}
    return {public_key: owner for public_key, owner in found.items() if owner.name}


def groups(owners: Mapping[bytes, Owner], weight: Callable[[bytes], float]) -> list[Group]:
    """The peers of each owner, the owner with the largest sum of weights first."""
    found: dict[str, Group] = {}
    for public_key, owner in owners.items():
        found.setdefault(owner.name, Group(owner)).peers.append(public_key)
    return sorted(found.values(), key=lambda group: (-sum(map(weight, group.peers)), group.owner.name))
