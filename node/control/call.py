"""One call to the control door of a peer that runs on this machine. Knows no command."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from node.control.control_server import DOOR_FILE
from protos.errors import NetworkError, OperatorError

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
