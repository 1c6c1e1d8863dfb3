"""Variables of the environment that nobody reads: a mistyped SWARMENTUM_DEVCE would be a setting without effect, in silence.

Refuses none of them: they may belong to somebody's script, or to a newer version.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Final

from protos.text import printable

PEER: Final = "SWARMENTUM_"
COORDINATOR: Final = "SWARMENTUM_COORDINATOR_"
BACKEND: Final = "SWARMENTUM_OPTIM_BACKEND"
IDLE_COMMAND: Final = "SWARMENTUM_IDLE_COMMAND"
"""A command of the owner; the last number that it prints is the idle time in milliseconds. A variable of the environment
alone: a swarmentum.toml of a working folder may be somebody else's, and starts no program."""
OTHERS: Final = ("SWARMENTUM_BIN", "SWARMENTUM_TEST_", "SWARMENTUM_BENCH_")
"""deploy/peers and the tests read these."""
NEAR: Final = 0.7
NEAR_WHOLE: Final = 0.9
"""Of whole names, most of which is the same in all."""
SHOWN_MAX: Final = 20
_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Kubernetes gives each pod such variables for every service, also for one that is called swarmentum-coordinator."""


def unread(present: Iterable[str], prefix: str, settings: Collection[str]) -> Iterator[str]:
    """A sentence for each variable that looks like ours, and that a program with this prefix and settings does not read."""
    known = {prefix + key.upper() for key in (*settings, "config")} | {BACKEND, IDLE_COMMAND}
    for name in sorted(present):
        upper = name.upper()
        if upper in known or upper.startswith(OTHERS) or _KUBERNETES.search(upper) or not upper.startswith("SWARM"):
            continue
        ours = upper.startswith(prefix)
        if ours and prefix != COORDINATOR and upper.startswith(COORDINATOR):
            continue
        near = (
            near_to(upper, known, prefix) if ours else difflib.get_close_matches(upper, known, n=1, cutoff=NEAR_WHOLE)
        )
        if near:
            yield f"environment: {printable(name)} does nothing. Did you mean {' or '.join(near)}? Correct it, or unset it"
        elif ours:
            yield f"environment: {printable(name)} is no variable of this version and does nothing. Correct it, or unset it"


def near_to(name: str, known: Iterable[str], prefix: str) -> list[str]:
    """The known names that a mistyped one is near to. The prefix says nothing about which is meant."""
    bare = {it.removeprefix(prefix).removeprefix(PEER): it for it in known}
    return [bare[it] for it in difflib.get_close_matches(name.removeprefix(prefix), bare, n=2, cutoff=NEAR)]


def tell_unread(present: Iterable[str], prefix: str, settings: Collection[str], only: str = "") -> None:
    """Prints these sentences on stderr, each once in a process. `only`: those that name this variable."""
    for sentence in [it for it in unread(present, prefix, settings) if only in it][:SHOWN_MAX]:
        _tell(sentence)


@cache
def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
