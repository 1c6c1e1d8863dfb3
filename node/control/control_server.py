"""The control door of a running peer: a port of this machine alone, and a file in the home with the port and a secret. ADR 35.

A request is one line of JSON with the secret; so is the answer. Only a person who can read the home's files has the secret.
Refuses requests without it, lines over REQUEST_BYTES_MAX, and requests that are not whole after REQUEST_SECONDS_MAX. Any user
of the machine can connect, so a caller that comes while CALLERS_MAX others are still sending takes the oldest one's place: the
owner's request is one packet and is whole at once.

The door writes what the owner wants (`OwnerRequests`); `node/training/loop.py` acts on it, between micro-batches.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import re
import secrets
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final

import structlog

from protos.console import home_is_held
from protos.disk import remove_at_end, writing
from protos.errors import NetworkError, OperatorError

DOOR_FILE = "control.json"
REQUEST_BYTES_MAX = 4096
REQUEST_SECONDS_MAX = 5.0
CALLERS_MAX = 8
STOP_SECONDS_MAX = 5.0
LOOK_SECONDS = 0.1
"""How often the door looks whether it is to close."""
Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
"""A command's answer to its request. It is called on the door's thread; ValueError is an answer, too."""


class ControlServer:
    """Serves `commands` until `close`; the file is there meanwhile."""

    def __init__(self, home: Path, commands: Mapping[str, Answer]) -> None:
        self._path, self._secret = home / DOOR_FILE, secrets.token_hex(32)
        self._commands = commands
        self._lock = threading.Lock()
        self._sending: OrderedDict[socket.socket, None] = OrderedDict()
        door = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                door._handle(self.request)

        class ControlListener(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            # With the usual 5, the kernel lets the next caller wait for a second or more
            request_queue_size = 8 * CALLERS_MAX

            def handle_error(self, request: Any, client_address: Any) -> None:
                structlog.get_logger("control").exception("a command of the owner failed: a bug of this program")

        self._server = ControlListener(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_SECONDS,), name="control door", daemon=True
        )
        self._thread.start()
        self._write()

    def _handle(self, caller: socket.socket) -> None:
        try:
            line = self._request(caller)
            if line is not None:
                answer = answered(line, self._secret, self._commands)
                caller.settimeout(REQUEST_SECONDS_MAX)
                caller.sendall(json.dumps(answer, allow_nan=False).encode() + b"\n")
        except OSError:
            pass  # the caller is gone

    def _request(self, caller: socket.socket) -> bytes | None:
        """The caller's line, or what it sent up to REQUEST_BYTES_MAX; None if it was too slow, or lost its place."""
        with self._lock:
            if len(self._sending) >= CALLERS_MAX:
                oldest, _ = self._sending.popitem(last=False)
                _hang_up(oldest)
            self._sending[caller] = None
        deadline, line = time.monotonic() + REQUEST_SECONDS_MAX, bytearray()
        try:
            while b"\n" not in line and len(line) < REQUEST_BYTES_MAX:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                caller.settimeout(left)
                part = caller.recv(REQUEST_BYTES_MAX - len(line))
                if not part:
                    return None
                line += part
            return bytes(line.partition(b"\n")[0])
        finally:
            with self._lock:
                self._sending.pop(caller, None)

    def _write(self) -> None:
        """The file, for its owner alone, before there is a secret in it."""
        with writing(self._path):
            self._path.unlink(missing_ok=True)
            self._path.touch(mode=0o600, exist_ok=False)
            self._path.write_text(json.dumps({"port": self._server.server_address[1], "secret": self._secret}))

    def close(self) -> None:
        """Remove the file, and serve no more."""
        remove_at_end(self._path)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_SECONDS_MAX)


def _hang_up(caller: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it hung up itself
        caller.shutdown(socket.SHUT_RDWR)


def answered(line: bytes, secret: str, commands: Mapping[str, Answer]) -> dict[str, Any]:
    """The answer to one request: `ok` with what the command gives, or `error` with what is wrong with the request."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return {"error": "the request is no line of JSON"}
    if not isinstance(request, dict) or not isinstance(request.get("secret"), str):
        return {"error": "the request has no secret"}
    if not hmac.compare_digest(request["secret"].encode(errors="replace"), secret.encode()):
        return {"error": "the secret is not this peer's: it was started again; try once more"}
    command = commands.get(str(request.get("command")))
    if command is None:
        return {"error": f"this peer knows no command {request.get('command')!r}; it knows {', '.join(commands)}"}
    try:
        return {"ok": command(request)}
    except ValueError as error:
        return {"error": str(error)}


# One call to the control door of a peer that runs on this machine. Knows no command.

CALL_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 1 << 20


def call(home: Path, command: str, **values: Any) -> dict[str, Any]:
    """The answer of the peer with this home. NetworkError if none runs, OperatorError if it refuses."""
    path = home / DOOR_FILE
    try:
        door = json.loads(path.read_text())
        address, secret = ("127.0.0.1", int(door["port"])), str(door["secret"])
    except FileNotFoundError:
        if home_is_held(home):
            raise NetworkError(
                f"the peer with the home {home} takes no commands now: it is starting or ending, or it waits for room on its "
                "full disk. Its log says which; Ctrl-C or SIGTERM ends it"
            ) from None
        raise NetworkError(
            f"no peer runs with the home {home}: start it with `swarmentum join`, or give its --home"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorError(f"{path}: cannot be read: {error}; start the peer again, which writes it anew") from error
    try:
        with socket.create_connection(address, timeout=CALL_SECONDS_MAX) as connection:
            connection.sendall(json.dumps({"secret": secret, "command": command, **values}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline(ANSWER_BYTES_MAX)
    except OSError as error:
        raise NetworkError(
            f"the peer with the home {home} does not answer ({error.strerror or error}): it is ending, or was killed"
        ) from error
    if not line:
        raise NetworkError(f"the peer with the home {home} closed the call: try again")
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise NetworkError(f"the peer with the home {home} answered something else than JSON: try again") from error
    if "error" in answer:
        raise OperatorError(f"the peer with the home {home} refuses: {answer['error']}")
    found: dict[str, Any] = answer["ok"]
    return found


UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SECONDS_MAX: Final = 30 * 86400


def seconds_of(length: str | None, until: str | None, now: datetime) -> float | None:
    """Seconds from `now` (local time) on; None if neither is given. Raises OperatorError."""
    if length is not None and until is not None:
        raise OperatorError("--for and --until are two ways to say one thing: give one of them")
    if until is not None:
        return _until(until, now)
    return None if length is None else _length(length)


def _length(text: str) -> float:
    found = re.fullmatch(r"(\d{1,7})([smhd])", text.strip())
    seconds = int(found[1]) * UNIT_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= SECONDS_MAX:
        raise OperatorError(f"--for {text}: expected a number and s, m, h or d, such as 90m or 2h; at most 30d")
    return float(seconds)


def _until(text: str, now: datetime) -> float:
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip())
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise OperatorError(f"--until {text}: expected a time of the day such as 18:00")
    then = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    if then <= now:
        then += timedelta(days=1)
    return then.timestamp() - now.timestamp()  # on a day with a change of the clock, too


BY_OWNER = "paused by its owner"


def awake_or_asleep() -> float:
    """Seconds that nobody sets back, and that go on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS counts its sleep in both


class Ending(Enum):
    """How the owner wants the peer to end."""

    FINISH = "finish"
    """After the open step, when this peer's votes of it are decided."""
    LEAVE = "leave"
    """Now, as after Ctrl-C."""


class OwnerRequests:
    """One peer's. Each is a single value, and each change sets it whole: no lock is needed. The last command wins."""

    def __init__(self, clock: Callable[[], float] = awake_or_asleep) -> None:
        self._clock, self._until, self._why = clock, -math.inf, BY_OWNER
        self.held = ""
        """Why a condition of the owner's settings pauses the peer; empty: none does. `ConditionWatch` writes it."""
        self.ending: Ending | None = None

    def pause(self, why: str = BY_OWNER, seconds: float = math.inf) -> None:
        """Apply the log, and train in no step, for so many seconds. `why`: for the log."""
        self._until, self._why = self._clock() + seconds, why

    def resume(self) -> None:
        """Train again, as far as the conditions let the peer."""
        self._until = -math.inf

    @property
    def by_owner(self) -> bool:
        """Whether the owner's own pause goes on."""
        return self.pause_seconds_left > 0

    @property
    def pause_seconds_left(self) -> float:
        """Of the owner's own pause; infinite for one without an end, 0 without a pause."""
        return max(self._until - self._clock(), 0.0)

    def hold(self, why: str) -> None:
        """A condition pauses the peer, or (with an empty text) none does. The owner's own pause stays."""
        self.held = why

    @property
    def paused(self) -> bool:
        """Whether the peer trains in no step now."""
        return self.by_owner or bool(self.held)

    def words(self) -> str:
        """Whether the peer works, and why not, for the log."""
        if self.by_owner:
            return self._why
        return f"paused: {self.held}" if self.held else "goes on"

    def ends(self, *, awaits_entry: bool) -> bool:
        """Whether the peer ends now. `awaits_entry`: the log has not decided about votes that the peer announced."""
        return self.ending is Ending.LEAVE or (self.ending is Ending.FINISH and not awaits_entry)

    def end(self, how: Ending) -> None:
        """End the peer. A paused peer has no step to finish: it ends at once."""
        self.ending = how
