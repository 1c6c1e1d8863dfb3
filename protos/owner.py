"""The owner that a peer names: a claim, which keys signed in earlier versions. ADR 35. Pure.

One door for the bytes of strangers: `owner_from_body`. Refuses names that do not print on one line: control characters, and
marks that turn the direction of writing. Refuses a signature that is not the key's, so a wrong one never passes for a claim.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from protos.errors import Reason, Refusal
from protos.identity import peer_id, verify
from protos.limits import OWNER_CHARACTERS_MAX
from protos.v1 import coordinator_pb2 as pb

SIGNED, CLAIMED = "signed", "claimed"
_DOMAIN = b"swarmentum/v1/owner\0"


@dataclass(frozen=True)
class Owner:
    """`name` is empty for a peer that names nobody. `public_key` (32 bytes) and `signature` (64 bytes): empty for a claim."""

    name: str = ""
    public_key: bytes = b""
    signature: bytes = b""

    @property
    def standing(self) -> str:
        """`signed`, `claimed`, or empty without a name."""
        return "" if not self.name else SIGNED if self.signature else CLAIMED

    def __str__(self) -> str:
        return f"{self.name} ({self.standing})" if self.name else ""


NOBODY = Owner()


@dataclass(frozen=True)
class Group:
    """The peers of one owner. Peers with one name and different keys, or without a key, are different groups."""

    owner: Owner
    peers: list[bytes] = field(default_factory=list)

    @property
    def key_id(self) -> str:
        """The owner's key, spelled as a peer id; empty for a claim."""
        return peer_id(self.owner.public_key) if self.owner.public_key else ""


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


@lru_cache(maxsize=4096)  # readers ask again at each look
def is_signed_for(owner: Owner, public_key: bytes) -> bool:
    """Whether the owner's key signed for this peer under this name."""
    return verify(owner.public_key, owner.signature, _DOMAIN + public_key + owner.name.encode())


def owner_body(owner: Owner) -> pb.Owner:
    """As a message."""
    return pb.Owner(name=owner.name, public_key=owner.public_key, signature=owner.signature)


def owner_from_body(body: pb.Owner, public_key: bytes) -> Owner:
    """The owner that the peer with this public key names. Refusal for a wrong name, and for a signature that does not hold."""
    owner = Owner(body.name, body.public_key, body.signature)
    if not owner.name:
        return NOBODY
    if len(owner.name) > OWNER_CHARACTERS_MAX:  # Unicode's forms take quadratic time: a stranger's 1 MB is minutes
        raise Refusal(Reason.TOO_LARGE, f"the owner's name has more than {OWNER_CHARACTERS_MAX} characters")
    try:
        usual = name_of(owner.name)
    except ValueError as error:
        raise Refusal(Reason.OUT_OF_RANGE, f"the owner's name: {error}") from error
    if usual != owner.name:
        raise Refusal(Reason.MALFORMED, "the owner's name has spaces around it, or is not in Unicode's form NFC")
    if (owner.public_key or owner.signature) and not is_signed_for(owner, public_key):
        raise Refusal(Reason.BAD_SIGNATURE, "the owner's key did not sign for this peer under this name")
    return owner


def shown_owner(body: pb.Owner, public_key: bytes) -> Owner:
    """For a reader, who trusts no coordinator: an owner that would not pass the door is nobody."""
    try:
        return owner_from_body(body, public_key)
    except Refusal:
        return NOBODY


def owners_of(peers: Iterable[pb.PeerStatus]) -> dict[bytes, Owner]:
    """Public key of a peer -> its owner, for those that name one."""
    found = {peer.public_key: shown_owner(peer.owner, peer.public_key) for peer in peers}
    return {public_key: owner for public_key, owner in found.items() if owner.name}


def groups(owners: Mapping[bytes, Owner], weight: Callable[[bytes], float]) -> list[Group]:
    """The peers of each owner, the owner with the largest sum of weights first. One key under two names is two."""
    found: dict[tuple[bytes, str], Group] = {}
    for public_key, owner in owners.items():
        found.setdefault((owner.public_key, owner.name), Group(owner)).peers.append(public_key)
    return sorted(found.values(), key=lambda group: (-sum(map(weight, group.peers)), group.owner.name, group.key_id))
