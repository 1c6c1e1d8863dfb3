"""Which programs understand each other: the format of a run, and the releases of swarmentum that know a format.

A run has one format for life (Genesis.format_version). Refuses nothing itself: `misfit` gives the reason, and both sides of a
join refuse with it. Pure, but for `software_version`, which reads the version that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from protos.log import FORMAT_VERSION
from protos.text import printable
from protos.v1 import log_pb2

RELEASES: Mapping[int, str] = {1: "0.1.0"}
"""The first release that knows a format."""

UNNAMED_FORMAT = 1
"""The format of a peer that names none: such peers are older than the field."""

VERSION_CHARACTERS_MAX = 32


def software_version() -> str:
    """This package's version."""
    try:
        return version("swarmentum")
    except PackageNotFoundError:
        return "unknown"


def release_of(genesis: log_pb2.Genesis) -> str:
    """The first release that can take part in a run, as its genesis says; else as this program knows."""
    named = printable(genesis.software_version_min, VERSION_CHARACTERS_MAX)
    return named or RELEASES.get(genesis.format_version, "")


def misfit(genesis: log_pb2.Genesis, speaks: int, installed: str) -> str:
    """Why a peer that speaks this format, with this release, cannot take part, and what to install; empty: it can.

    A format of 0 in a genesis is one that nobody wrote: only tests have it, and it counts as the first.
    """
    needs, installed = (
        genesis.format_version or UNNAMED_FORMAT,
        printable(installed, VERSION_CHARACTERS_MAX) or "unknown",
    )
    if speaks == needs:
        return ""
    formats = f"the run has format {needs}, this peer speaks {speaks}"
    if speaks < needs:
        release = release_of(genesis) or "a newer version"
        return f"this run needs swarmentum >= {release}, installed is {installed} ({formats}): upgrade swarmentum"
    release = release_of(genesis) or "an older version"
    return f"this run needs swarmentum {release}, installed is {installed}, which is too new for it ({formats})"


def own_misfit(genesis: log_pb2.Genesis) -> str:
    """`misfit` of this program."""
    return misfit(genesis, FORMAT_VERSION, software_version())
