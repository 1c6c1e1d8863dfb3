"""The control door of a running peer: a port of this machine alone, and a file in the home with the port and a secret. ADR 35.

A request is one line of JSON with the secret; so is the answer. Only a person who can read the home's files has the secret.
Refuses requests without it, lines over REQUEST_BYTES_MAX, and requests that are not whole after REQUEST_SECONDS_MAX. Any user
of the machine can connect, so a caller that comes while CALLERS_MAX others are still sending takes the oldest one's place: the
owner's request is one packet and is whole at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from protos.disk import writing
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
        self._path.unlink(missing_ok=True)
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
        raise NetworkError(
            f"no peer runs with the home {home}: start it with `swarmentum join`, or give its --home (a start takes a minute)"
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
