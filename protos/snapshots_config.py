"""The section `snapshots` of run.toml: places that have the agreed snapshots, beside the peers. See `run_config`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, field_validator

from protos.mistakes import MIRROR
from protos.optimizer_config import Section
from protos.web_address import web_problem

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
