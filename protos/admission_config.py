"""The sections `admission` and `operators` of run.toml: who may take part, and whose orders the run obeys. See `run_config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from protos.identity import public_key_of
from protos.limits import ENTRY_CONTRIBUTIONS_MAX, OPERATORS_MAX
from protos.mistakes import Mistake
from protos.optimizer_config import Section


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
