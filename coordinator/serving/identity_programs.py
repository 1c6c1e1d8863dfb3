"""Programs that join with one identity: two at the same time are a home that was copied to another machine.

Each program names a random token when it joins. A program that joins again after another one took its place proves that
both run. Bounded and in memory. Refuses nobody: the newest session counts, as always.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from protos.address import Network
from protos.amounts import duration

IDENTITIES_MAX: Final = 16_384
KEPT: Final = 4
"""Programs of one identity that are remembered."""


@dataclass(frozen=True)
class _Program:
    token: bytes
    network: Network
    at_ms: int


class IdentityPrograms:
    """Of all runs."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, bytes], tuple[_Program, ...]] = OrderedDict()

    def joined(
        self, identity: tuple[bytes, bytes], token: bytes, network: Network, now_ms: int, *, connected: bool
    ) -> str:
        """A program joined. Returns why its identity seems to be in use twice; empty if it does not.

        `identity`: run and public key; `connected`: a peer with this identity has an open stream.
        """
        if not token:  # of an older version
            return ""
        before = self._seen.pop(identity, ())
        others = tuple(it for it in before if it.token != token)
        self._seen[identity] = (*others, _Program(token, network, now_ms))[-KEPT:]
        if len(self._seen) > IDENTITIES_MAX:
            self._seen.popitem(last=False)
        last = before[-1] if before else None
        if last is None or last.token == token:
            return ""
        place = f"from {last.network}" if last.network else "from an unknown address"
        if len(others) < len(before):
            return f"another program uses it, too: it joined {duration((now_ms - last.at_ms) / 1000)} ago {place}"
        return f"a program that uses it is connected now, {place}" if connected else ""
