"""The sections `admission`, `operators` and `snapshots` of run.toml. See `run_config`.

They say who may take part, whose orders the run obeys, and which places beside the peers have the agreed snapshots.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from protos.identity import public_key_of
from protos.limits import ENTRY_CONTRIBUTIONS_MAX, OPERATORS_MAX
from protos.mistakes import MIRROR, Mistake
from protos.optimizer_config import Section
from protos.web_address import web_problem


class AdmissionConfig(Section):
    """The peers that may take part."""

    mode: Literal["open", "allow_list", "invite"] = "open"
    """`open`: whoever holds the invite; `allow_list`: only the peer ids below; `invite`: only with a ticket, which
    `swarmentum-coordinator invite create` makes (docs/operating.md)."""

    allowed: list[str] = Field(default_factory=list, max_length=ENTRY_CONTRIBUTIONS_MAX)
    """Peer ids (12D3Koo...)."""

    @field_validator("allowed")
    @classmethod
    def _peer_ids(cls, allowed: list[str]) -> list[str]:
        for peer in allowed:
            public_key_of(peer)  # an OperatorError is a ValueError: it becomes an error of this key
        return allowed


class OperatorsConfig(Section):
    """The operators' keys, without which nobody excludes a peer, changes a setting or ends the run. By default the
    coordinator's own key does all of this alone."""

    keys: list[str] = Field(default_factory=list, max_length=OPERATORS_MAX)
    """Ids (12D3Koo...) of the operators' keys, as `swarmentum-coordinator order key FILE` prints them."""

    needed: int = Field(default=2, ge=1, le=OPERATORS_MAX)
    """So many of these keys have to sign the same order."""

    @field_validator("keys")
    @classmethod
    def _key_ids(cls, keys: list[str]) -> list[str]:
        for key in keys:
            public_key_of(key)
        return keys

    @model_validator(mode="after")
    def _enough(self) -> OperatorsConfig:
        if len(set(self.keys)) < len(self.keys):
            raise Mistake("the same key stands twice in `keys`: name each operator once", "keys")
        if self.keys and self.needed > len(self.keys):
            raise Mistake(f"{self.needed} keys are needed, and `keys` has {len(self.keys)}", "needed", "keys")
        return self

    @property
    def public_keys(self) -> frozenset[bytes]:
        """The keys themselves; none: the coordinator's own key orders alone."""
        return frozenset(map(public_key_of, self.keys))


MIRROR_CHARACTERS_MAX: Final = 2048
SNAPSHOT_MIRRORS_MAX: Final = 8


class SnapshotsConfig(Section):
    """Other places that have the agreed snapshots, beside the peers."""

    mirrors: tuple[Annotated[str, Field(max_length=MIRROR_CHARACTERS_MAX, pattern=MIRROR)], ...] = Field(
        default=(), max_length=SNAPSHOT_MIRRORS_MAX
    )
    """Places that an anchor writes to (`anchor --mirror`): https://, s3://, hf://, file:// or a folder. Joining peers
    take pieces from there, too, and check each by its hash."""

    @field_validator("mirrors")
    @classmethod
    def _usable(cls, mirrors: tuple[str, ...]) -> tuple[str, ...]:
        for address in mirrors:
            if why := web_problem(address):
                raise ValueError(f"{address!r} is no address that a peer can use: {why}")
        return mirrors
