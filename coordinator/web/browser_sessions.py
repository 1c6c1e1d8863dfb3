"""Sessions of the operator's page, in memory: hashes of what a browser holds, until they are too old. The time is given.

A session has two secrets. The cookie holds one. The page's script holds the other, the token, and sends it with each request.
Browsers send cookies of a host to all its ports, so the runs' page on another port may see the cookie. It never sees the token.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from coordinator.store.logins import SECRET_BYTES, hash_of
from protos.rate_limiter import RateLimiter

SESSIONS_MAX: Final = 4
"""A new login ends the oldest session."""
SESSION_SECONDS_MAX: Final = 8 * 3600.0
NAME_DIGITS: Final = 8
REQUESTS_AT_ONCE, REQUEST_EACH_MS = 120, 250.0
ACTIONS_AT_ONCE, ACTION_EACH_MS = 20, 3_000.0
NO_SESSION: Final = "you are not logged in: `swarmentum-coordinator web login` prints a link"
WRONG_TOKEN: Final = "the request has no token of this session: log in again, with a new link"  # noqa: S105 - words
TOO_OFTEN: Final = "too many requests: wait a moment, and try again"


@dataclass(frozen=True)
class NewSession:
    """What a browser gets once: both secrets."""

    cookie: str
    token: str
    name: str
    """The name of the session in the log of actions. It opens nothing."""


@dataclass(frozen=True)
class _BrowserSession:
    name: str
    token_hash: str
    ends: float


class BrowserSessions:
    """The open sessions, at most SESSIONS_MAX, by the hash of their cookie."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _BrowserSession] = OrderedDict()
        self._requests = RateLimiter(REQUESTS_AT_ONCE, REQUEST_EACH_MS, SESSIONS_MAX)
        self._actions = RateLimiter(ACTIONS_AT_ONCE, ACTION_EACH_MS, SESSIONS_MAX)

    def open(self, now: float) -> NewSession:
        """A new session. `now`: seconds of a clock that never goes back."""
        cookie, token = secrets.token_urlsafe(SECRET_BYTES), secrets.token_urlsafe(SECRET_BYTES)
        name = secrets.token_hex(NAME_DIGITS // 2)
        self._open[hash_of(cookie)] = _BrowserSession(name, hash_of(token), now + SESSION_SECONDS_MAX)
        while len(self._open) > SESSIONS_MAX:
            self._open.popitem(last=False)
        return NewSession(cookie, token, name)

    def end(self, cookie: str) -> None:
        """The session ends."""
        self._open.pop(hash_of(cookie), None)

    def check(self, cookie: str, token: str, now: float, *, acts: bool) -> tuple[str, int, str]:
        """(name, 200, ""), or ("", status, why not). `acts`: the request changes something."""
        found = self._open.get(hash_of(cookie))
        if found is None or now > found.ends:
            self.end(cookie)
            return "", 401, NO_SESSION
        if not hmac.compare_digest(found.token_hash, hash_of(token)):
            return "", 403, WRONG_TOKEN
        rate = self._actions if acts else self._requests
        if not rate.allow(found.name, 1000 * now):
            return "", 429, TOO_OFTEN
        return found.name, 200, ""

    def seconds_left(self, cookie: str, now: float) -> float:
        """Until the session ends by itself; 0 for none."""
        found = self._open.get(hash_of(cookie))
        return 0.0 if found is None else max(found.ends - now, 0.0)
