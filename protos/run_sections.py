"""The sections `model`, `admission`, `operators` and `snapshots` of run.toml. See `run_config`.

They say who may take part, whose orders the run obeys, and which places beside the peers have the agreed snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from protos.address import web_problem
from protos.identity import public_key_of
from protos.limits import ENTRY_CONTRIBUTIONS_MAX, OPERATORS_MAX
from protos.mistakes import FACTORY, MIRROR, Mistake
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


# The section [model] of a run.toml: which network is trained, and the loss that peers compare with their own (ADR 53).


class ReferenceLoss(Section):
    """A loss that peers compare with their own before they train: other versions of a library may compute another one."""

    config: dict[str, Any] | None = None
    """The small copy of `model.config` that it is of; without it, the model itself."""

    loss: float
    """Of a fixed batch, in nats a token, with the weights that seed 0 gives."""

    made_with: str = Field(max_length=200)
    """The versions of the libraries that computed it."""


class ModelConfig(Section):
    """Which network is trained; by default a small byte-level Llama of 0.89 M parameters."""

    config: dict[str, Any] | None = None
    """A transformers AutoConfig as a table: `model_type` and whatever that type takes."""

    factory: str | None = Field(default=None, pattern=FACTORY)
    """`module:function` that returns a torch.nn.Module; every peer must have the module installed."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    reference: ReferenceLoss | None = None
    """`run create` fills this in after its dry run; leave it out."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As before there was a reference, so that runs without one keep their bytes."""
        values: dict[str, Any] = inner(self)
        return values if self.reference is not None else {k: v for k, v in values.items() if k != "reference"}

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.config is not None and self.factory is not None:
            raise Mistake("give either `config` or `factory`, not both", "factory", "config")
        if self.kwargs and self.factory is None:
            raise Mistake("`kwargs` are the factory's: give `factory` too", "kwargs", "factory")
        return self


@dataclass(frozen=True)
class LayoutFacts:
    """`votes` and `payload_bytes`: of one payload, at the run's own group size or k; 32 bytes of digest as hex.

    `state_bytes`: memory of a peer whatever its micro-batch; `sample_bytes`: activations of one sample; `disk_bytes`: on its
    disk; `snapshot_bytes`: one snapshot; `copies_bytes`: main memory of the copies that are written to the disk.
    `least_state_bytes`: with memory = small; `least_sample_bytes`: with activation checkpointing. `host_card_bytes` and
    `host_main_bytes`: with memory = host, of one such sample at a time; `stream_card_bytes`: with memory = stream, which takes
    as much main memory. None if they are not known before the model is built, or the model cannot stream.
    """

    layout_digest: str
    parameters: int
    votes: int
    payload_bytes: int
    state_bytes: int | None = None
    sample_bytes: int | None = None
    disk_bytes: int | None = None
    snapshot_bytes: int | None = None
    copies_bytes: int | None = None
    least_state_bytes: int | None = None
    least_sample_bytes: int | None = None
    host_card_bytes: int | None = None
    host_main_bytes: int | None = None
    stream_card_bytes: int | None = None
    untried: str = ""
    """Why the dry run was not made, if it was not."""
    notes: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None
    """What peers compare theirs with: see `ReferenceLoss`."""
