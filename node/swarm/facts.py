"""Facts that a peer reports to the coordinator: frozen values, each a name for one thing that a report can carry.

The outbox compares facts to know which ones the coordinator has. A fact holds no more than that comparison needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protos.owner import Owner
from protos.slices import Aggregate


@dataclass(frozen=True)
class Published:
    """This peer has announced a payload for a step; `envelope` is the signed announcement."""

    step: int
    envelope: bytes


@dataclass(frozen=True)
class Abstained:
    """This peer sends no votes for a step; `reason` is one printable line."""

    step: int
    reason: str


@dataclass(frozen=True)
class Held:
    """This peer holds the payload with hash `payload_sha256` by `author` (a public key)."""

    author: bytes
    payload_sha256: bytes


@dataclass(frozen=True)
class Applied:
    """This peer has applied a step; `digest` is the digest of the state after it."""

    step: int
    digest: bytes


@dataclass(frozen=True)
class Stored:
    """This peer knows the root of its snapshot after a step; `kept` says whether other peers can pull its pieces here."""

    step: int
    root: bytes
    kept: bool


@dataclass(frozen=True)
class FoundBad:
    """An agreed snapshot does not hold the state that the log names."""

    step: int
    root: bytes


@dataclass(frozen=True)
class Checked:
    """This peer has checked the votes of `subject` (a public key) for a step."""

    step: int
    subject: bytes


@dataclass(frozen=True)
class Accused:
    """`author` (a public key) announced two payloads for one step."""

    author: bytes


@dataclass(frozen=True)
class Reachable:
    """Other peers can dial this peer at these multiaddresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Paused:
    """This peer's owner has paused it, or lets it take part again."""

    paused: bool


@dataclass(frozen=True)
class Owned:
    """This peer names its owner."""

    owner: Owner


@dataclass(frozen=True)
class EvaluatedState:
    """This peer has evaluated the state after a step."""

    step: int


@dataclass(frozen=True)
class VotesSummed:
    """This peer has added up the votes of one attempt at a step: `payloads` is the digest over their hashes."""

    step: int
    attempt: int
    payloads: bytes
    aggregate: Aggregate


@dataclass(frozen=True)
class FoundFalse:
    """This peer added the range `number` of a step up again: the entry's sum is not that of its votes."""

    step: int
    number: int


Fact: TypeAlias = (
    Published
    | Abstained
    | Held
    | Applied
    | Stored
    | FoundBad
    | Checked
    | EvaluatedState
    | Accused
    | Reachable
    | Paused
    | Owned
    | VotesSummed
    | FoundFalse
)
