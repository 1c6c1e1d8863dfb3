"""Requests of the page's process: size, form, session, rate; then the log of actions, and the action. ADR 43.

That process is not trusted: it speaks with browsers. It has no key and no list of sessions. So each request carries the two
secrets of the browser, and this module alone decides. The cookie holds one secret. The page's script holds the other, the
token: browsers send cookies of a host to all its ports, so the runs' page on another port may see the cookie, never the token.
An action runs on a thread: it calls the coordinator over gRPC, as the operator's commands do.

`Record` is the log of actions: from which session one came, when, and what became of it. A line is on the disk before the
action begins, and another one after it. An action whose line cannot be written is not done. The file is bounded: a full one is
X before that goes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.commands.operator import Operator
from coordinator.serving.throttled_log import ThrottledLog
from coordinator.store import home_files
from coordinator.store.home_files import SECRET_BYTES, hash_of
from coordinator.web.actions import ALL, Values, What
from protos import toml_file
from protos.errors import NetworkError, OperatorError, RefusedError, SwarmentumError
from protos.limits import RateLimiter
from protos.text import printable

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


SECRET_CHARACTERS_MAX: Final = 128
THREADS: Final = 4
UNDER_WAY_MAX: Final = 8
LOG: Final = "log"
"""What a request asks for to read the log of actions."""
DONE: Final = "done"
BUSY: Final = "the coordinator is busy with other requests of this page: try again in a moment"


class Request(BaseModel):
    """What the page's process asks: a login with the link's secret, a request in a session, or the session's end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    do: Literal["login", "logout", "ask"]
    address: str = Field(default="", max_length=64)
    secret: str = Field(default="", max_length=SECRET_CHARACTERS_MAX)
    cookie: str = Field(default="", max_length=SECRET_CHARACTERS_MAX)
    token: str = Field(default="", max_length=SECRET_CHARACTERS_MAX)
    what: str = Field(default="", max_length=32)
    run: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    values: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class OperatorReply:
    """A status of HTTP, and what the page gets as JSON. `cookie`: a session begins; the page's process sets it."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)
    cookie: str = ""


def no(status: int, why: str) -> OperatorReply:
    """A refusal with its reason."""
    return OperatorReply(status, {"error": why})


class Requests:
    """The requests of one page. `operator`: makes the caller of the coordinator. The clocks give seconds."""

    def __init__(
        self,
        home: Path,
        operator: Callable[[], Operator] | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._wall, self._clock = home, wall, clock
        self._operator = operator or (lambda: Operator(home))
        self._sessions, self._record = BrowserSessions(), Record(home)
        self._threads = ThreadPoolExecutor(THREADS, "operator's page")
        self._under_way = 0
        self._log = structlog.get_logger("operator-page")
        self._caused = ThrottledLog(self._log)

    async def answer(self, data: bytes) -> OperatorReply:
        """The answer to a request."""
        try:
            request = Request.model_validate_json(data)
        except ValidationError as error:
            return no(400, toml_file.describe(error))
        if request.do == "login":
            return self._login(request)
        if request.do == "ask" and self._under_way >= UNDER_WAY_MAX:
            return no(503, BUSY)
        self._under_way += 1
        try:
            return await self._in_session(request)
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """Begin no further action."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _login(self, request: Request) -> OperatorReply:
        try:
            why = home_files.take(self._home, request.secret, self._wall())
            if why:
                self._caused.warning(
                    "a login at the operator's page was refused", "logins", why=why, address=request.address
                )
                return no(401, why)
            opened = self._sessions.open(self._clock())
            number = self._record.begin(opened.name, "login", "", {"address": request.address}, self._wall())
            self._record.end(number, DONE)
        except OSError as error:
            return no(503, f"the home cannot be read or written: {error.strerror or error}")
        self._log.info("somebody logged in at the operator's page", session=opened.name, address=request.address)
        left = self._sessions.seconds_left(opened.cookie, self._clock())
        return OperatorReply(200, {"token": opened.token, "session": opened.name, "seconds_left": left}, opened.cookie)

    async def _in_session(self, request: Request) -> OperatorReply:
        what = ALL.get(request.what)
        acts = what is not None and what.acts
        name, status, why = self._sessions.check(request.cookie, request.token, self._clock(), acts=acts)
        if not name:
            return no(status, why)
        if request.do == "logout":
            self._sessions.end(request.cookie)
            return OperatorReply(200, {"said": "You are logged out."})
        if request.what == LOG:
            left = self._sessions.seconds_left(request.cookie, self._clock())
            return OperatorReply(200, {"actions": self._record.newest(), "session": name, "seconds_left": left})
        if what is None:
            return no(404, f"this page cannot {request.what!r}; it can {', '.join(ALL)}")
        try:
            values = what.values.model_validate(request.values)
        except ValidationError as error:
            return no(400, toml_file.describe(error))
        if not acts:
            return await self._done(what, request.run, values)
        return await self._recorded(name, request, what, values)

    async def _recorded(self, session: str, request: Request, what: What, values: Values) -> OperatorReply:
        """An action between its two lines of the log."""
        told = values.told()
        try:
            number = self._record.begin(session, request.what, request.run, told, self._wall())
        except OSError as error:
            return no(503, f"nothing was done: the log of actions cannot be written: {error.strerror or error}")
        answer = await self._done(what, request.run, values)
        outcome = str(answer.body["error"]) if "error" in answer.body else DONE
        self._log.info(
            "an action of the operator's page", number=number, session=session, action=request.what, run=request.run[:16],
            values=told, outcome=outcome,
        )  # fmt: skip
        try:
            self._record.end(number, outcome)
        except OSError as error:
            self._log.error("the outcome of an action is not in the log of actions", number=number, why=str(error))
        return answer

    async def _done(self, what: What, run: str, values: Values) -> OperatorReply:
        work = partial(_answered, self._operator, what, run, values)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _answered(operator: Callable[[], Operator], what: What, run: str, values: Values) -> OperatorReply:
    """The answer, or whose fault it is that there is none."""
    try:
        return OperatorReply(200, what.answer(operator(), run, values))
    except OperatorError as error:
        return no(400, str(error))
    except RefusedError as error:
        return no(409, str(error))
    except NetworkError as error:
        return no(502, str(error))
    except SwarmentumError as error:
        return no(409, str(error))
    except (ValueError, RecursionError) as error:
        structlog.get_logger("operator-page").exception(
            "a request of the operator's page has a value that nothing expects"
        )
        return no(400, f"the request has a value that cannot be used: {type(error).__name__}")
    except OSError as error:
        return no(503, f"this machine cannot do that now: {error.strerror or error}")


RECORD_FILE: Final = "actions.jsonl"
OLDER_FILE: Final = "actions.1.jsonl"
FILE_BYTES_MAX: Final = 1 << 20
SHOWN_MAX: Final = 100
OUTCOME_CHARACTERS_MAX: Final = 400
PRIVATE: Final = 0o600
BEGUN: Final = "begun"
"""The outcome of an action whose end is not known: it is under way, or the page's process ended meanwhile."""


class Record:
    """The log of actions of one home. Raises OSError where the disk refuses."""

    def __init__(self, home: Path) -> None:
        self._path, self._older = home / RECORD_FILE, home / OLDER_FILE
        self._newest: OrderedDict[int, dict[str, Any]] = OrderedDict()
        for path in (self._older, self._path):
            if path.is_file():
                for line in path.read_bytes()[-2 * FILE_BYTES_MAX :].splitlines():
                    self._read(line)
        self._next = max(self._newest, default=0) + 1

    def begin(self, session: str, action: str, run: str, values: Mapping[str, Any], now: float) -> int:
        """An action begins; its number. `now`: seconds since 1970."""
        number, self._next = self._next, self._next + 1
        asked = {"session": session, "action": action, "run": run, "values": dict(values)}
        self._write({"number": number, "time": round(now, 3), **asked, "outcome": BEGUN})
        return number

    def end(self, number: int, outcome: str) -> None:
        """What became of an action: `done`, or why not."""
        self._write({"number": number, "outcome": printable(outcome, OUTCOME_CHARACTERS_MAX)})

    def newest(self) -> list[dict[str, Any]]:
        """The last actions, newest first."""
        return list(reversed(self._newest.values()))

    def _read(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            number = int(values["number"])
        except (ValueError, TypeError, KeyError):
            return  # the end of a line that a full disk cut off
        if number in self._newest:
            self._newest[number] |= values
        elif "action" in values:
            self._newest[number] = values
        while len(self._newest) > SHOWN_MAX:
            self._newest.popitem(last=False)

    def _write(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, ensure_ascii=True).encode("ascii") + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            if os.fstat(descriptor).st_size and self._cut_off():
                line = b"\n" + line
            if os.write(descriptor, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
            full = os.fstat(descriptor).st_size >= FILE_BYTES_MAX
        finally:
            os.close(descriptor)
        if full:
            self._path.replace(self._older)
        self._read(line)

    def _cut_off(self) -> bool:
        """Whether the file ends within a line."""
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
