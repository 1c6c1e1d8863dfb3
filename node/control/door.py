"""The control door of a running peer: a port of this machine alone, and a file in the home with the port and a secret. ADR 35.

A request is one line of JSON with the secret; so is the answer. Only a person who can read the home's files has the secret.
Refuses requests without it, lines over REQUEST_BYTES_MAX, and callers that say nothing for REQUEST_SECONDS_MAX.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protos.disk import writing

DOOR_FILE = "control.json"
REQUEST_BYTES_MAX = 4096
REQUEST_SECONDS_MAX = 5.0
CALLERS_MAX = 8
STOP_SECONDS_MAX = 5.0

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]
"""A command's answer to its request. It is called on the door's thread; ValueError is an answer, too."""


class Door:
    """Serves `commands` until `close`; the file is there meanwhile."""

    def __init__(self, home: Path, commands: Mapping[str, Answer]) -> None:
        self._path, self._secret = home / DOOR_FILE, secrets.token_hex(32)
        self._commands = commands
        self._room = threading.BoundedSemaphore(CALLERS_MAX)
        door = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = REQUEST_SECONDS_MAX

            def handle(self) -> None:
                if not door._room.acquire(blocking=False):
                    return
                try:
                    answer = answered(self.rfile.readline(REQUEST_BYTES_MAX), door._secret, door._commands)
                    self.wfile.write(json.dumps(answer).encode() + b"\n")
                except OSError:
                    pass  # the caller is gone, or said nothing
                finally:
                    door._room.release()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A caller's connection broke: nobody is there to be told."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="control door", daemon=True)
        self._thread.start()
        self._write()

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
