"""HTTP for browsers: a socket that listens, and a uvicorn server with this project's limits. Knows no routes and no runs.

The page of the runs (serve.py) and the operator's page (node/operator_page) are served this way.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn

from node.web.http_guard import Timed
from protos.errors import OperatorError

LISTEN: Final = "127.0.0.1:7780"
CONNECTIONS_MAX: Final = 2048
DESCRIPTORS_KEPT: Final = 256
STOP_SECONDS_MAX: Final = 2
HEAD_BYTES_MAX: Final = 16 << 10


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: this program has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def listening(listen: str) -> socket.socket:
    """A socket that listens at `host:port`; OperatorError says why there is none."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise OperatorError(f"--listen {listen}: expected host:port, for example {LISTEN}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(512)
    except OSError as error:
        made.close()
        text = f"--listen {listen}: cannot listen there ({error.strerror}); choose another port, or 0 for a free one"
        raise OperatorError(text) from error
    return made


def url_of(made: socket.socket) -> str:
    """Where a browser on this machine finds the page."""
    host, port = made.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def raise_descriptors() -> None:
    """Let this process have a descriptor for each connection, if the system allows so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + DESCRIPTORS_KEPT
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def server_of(app: Any, connections_max: int = CONNECTIONS_MAX) -> Server:
    """A server of the app. `serve(sockets=[made])` runs it, and `should_exit` ends it."""
    return Server(
        uvicorn.Config(
            app,
            http=Timed,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=connections_max,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=STOP_SECONDS_MAX,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
    )
