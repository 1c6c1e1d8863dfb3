"""Challenges, sessions and sequence numbers, so that no captured request can be played again; and identities in use twice.

Everything is bounded and in memory: after a restart peers simply join again. Two programs with one identity at the same time
are a home that was copied to another machine: each names a random token when it joins, and one that joins again after another
took its place proves that both run. That refuses nobody: the newest session counts.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from protos.address import Network, site
from protos.errors import Reason, Refusal
from protos.limits import CHALLENGE_BYTES, SESSION_ID_BYTES, RateLimiter
from protos.text import duration

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


CHALLENGES_MAX = 4096
CHALLENGE_MS_MAX = 60_000
SESSIONS_MAX = 16_384
ADMIN_NONCES_MAX = 4096
# One network address may have this number of challenges at once, and one more each ADDRESS_CHALLENGE_MS. A peer needs two
# (it asks before it builds its model), and a NAT with hundreds of peers passes.
ADDRESS_CHALLENGES_MAX = 600
ADDRESS_CHALLENGE_MS = 100
ADDRESSES_KEPT = 4096
# One connection may send this number of reports at once, and one more each CONNECTION_REPORT_MS. A peer makes some three a
# step.
CONNECTION_REPORTS_MAX = 1000
CONNECTION_REPORT_MS = 5
COPIED = (
    "this peer's session went on without it, in a copy of its machine, or before the machine went back to an earlier state. "
    "If no copy runs, start the peer again"
)
# Requests of one session may overtake each other by this much (a report in flight while the stream is opened again).
SEQUENCE_WINDOW = 64


def _fewer(counted: Counter[str], where: str) -> None:
    """Count one less; nothing is kept of a site without any."""
    counted[where] -= 1
    if not counted[where]:
        del counted[where]


@dataclass
class _Session:
    run_id: bytes
    public_key: bytes
    network: Network
    sequence: int = 0
    seen: int = 0  # bit i: sequence - i was used


class Sessions:
    """Single-use challenges, one session a peer and run, single-use sequence numbers and operator nonces."""

    def __init__(self) -> None:
        self._challenges: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # when it was given, and to which site
        self._challenged: Counter[str] = Counter()
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._ids: dict[tuple[bytes, bytes], bytes] = {}
        self._networks: dict[bytes, dict[bytes, Network]] = {}  # by run and peer
        self._sites: Counter[str] = Counter()
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        self._asking = RateLimiter(ADDRESS_CHALLENGES_MAX, ADDRESS_CHALLENGE_MS, ADDRESSES_KEPT)
        self._reporting = RateLimiter(CONNECTION_REPORTS_MAX, CONNECTION_REPORT_MS, SESSIONS_MAX)

    def may_ask(self, address: str, now_ms: int) -> bool:
        """Whether a network address may have one more challenge."""
        return self._asking.allow(address, now_ms)

    def may_report(self, connection: str, now_ms: int) -> bool:
        """Whether one more report may come over a connection. Call it before the check of the report's signature."""
        return self._reporting.allow(connection, now_ms)

    def challenge(self, now_ms: int, where: str = "") -> bytes:
        """A new challenge for a site. If there are too many, the site with the most forgets its oldest unanswered one."""
        value = secrets.token_bytes(CHALLENGE_BYTES)
        self._challenges[value] = now_ms, where
        self._challenged[where] += 1
        while len(self._challenges) > CHALLENGES_MAX:
            most = self._challenged.most_common(1)[0][0]
            self._used(next(key for key, (_, asked) in self._challenges.items() if asked == most))
        return value

    def _used(self, challenge: bytes) -> int | None:
        """When the challenge was given; None if it is not known. It is forgotten."""
        given, where = self._challenges.pop(challenge, (None, ""))
        if given is not None:
            _fewer(self._challenged, where)
        return given

    def answer(self, challenge: bytes, now_ms: int) -> None:
        """Use a challenge up. Raises Refusal REPLAYED if the challenge is unknown, used or too old."""
        given = self._used(challenge)
        if given is None or now_ms - given > CHALLENGE_MS_MAX:
            raise Refusal(Reason.REPLAYED, "the challenge is unknown, used or too old; ask for a new one")

    def open(self, run_id: bytes, public_key: bytes, network: Network = None) -> bytes:
        """A new session of a peer that comes from `network`; the peer's earlier session of the run ends."""
        self.end(run_id, public_key)
        session_id = secrets.token_bytes(SESSION_ID_BYTES)
        self._sessions[session_id] = _Session(run_id, public_key, network)
        self._ids[run_id, public_key] = session_id
        self._networks.setdefault(run_id, {})[public_key] = network
        self._sites[site(network)] += 1
        while len(self._sessions) > SESSIONS_MAX:
            most = self._sites.most_common(1)[0][0]
            self._drop(next(key for key, held in self._sessions.items() if site(held.network) == most))
        return session_id

    def end(self, run_id: bytes, public_key: bytes) -> None:
        """The peer has no session of the run any more: it has to join again."""
        session_id = self._ids.get((run_id, public_key))
        if session_id is not None:
            self._drop(session_id)

    def _drop(self, session_id: bytes) -> None:
        session = self._sessions.pop(session_id)
        del self._ids[session.run_id, session.public_key]
        del self._networks[session.run_id][session.public_key]
        if not self._networks[session.run_id]:
            del self._networks[session.run_id]
        _fewer(self._sites, site(session.network))

    def networks(self, run_id: bytes) -> Mapping[bytes, Network]:
        """The network address of each peer of a run that has a session."""
        return self._networks.get(run_id, {})

    def at(self, where: str) -> bool:
        """Whether a peer with a session comes from this site."""
        return where in self._sites

    def check(self, session_id: bytes, run_id: bytes, public_key: bytes, sequence: int) -> bool:
        """False: no such session (join again). Raises Refusal REPLAYED for a number that was used before, or is far behind."""
        session = self._sessions.get(session_id)
        if session is None or (session.run_id, session.public_key) != (run_id, public_key):
            return False
        behind = session.sequence - sequence
        if sequence < 1 or behind >= SEQUENCE_WINDOW or (behind >= 0 and session.seen >> behind & 1):
            raise Refusal(Reason.REPLAYED, f"sequence {sequence} after {session.sequence}: {COPIED}")
        if behind < 0:
            session.seen = (session.seen << min(-behind, SEQUENCE_WINDOW)) & ((1 << SEQUENCE_WINDOW) - 1)
            session.sequence, behind = sequence, 0
        session.seen |= 1 << behind
        return True

    def forget(self) -> None:
        """Another coordinator acted meanwhile: every peer joins again."""
        self._challenges.clear()
        self._challenged.clear()
        for session_id in list(self._sessions):
            self._drop(session_id)

    def use_nonce(self, nonce: bytes) -> None:
        """Refusal REPLAYED if an operator request with this nonce was seen."""
        if nonce in self._nonces:
            raise Refusal(Reason.REPLAYED, "this operator request was made before")
        self._nonces[nonce] = None
        while len(self._nonces) > ADMIN_NONCES_MAX:
            self._nonces.popitem(last=False)
