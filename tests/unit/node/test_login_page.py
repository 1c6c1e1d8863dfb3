"""A network that answers everything itself, as a hotel's does until somebody logs in: it is not the coordinator."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from node.doctor.doctor_facts import Fault
from node.doctor.swarm import way_to
from protos.calls import fetch_certificate
from protos.errors import NetworkError
from protos.invite import Invite


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Please log in</html>")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_is_told_by_what_it_is(page: str) -> None:
    with pytest.raises(NetworkError, match=rf"no coordinator answers at {page}: .*this network's login page"):
        fetch_certificate(page, bytes(32))


@pytest.mark.parametrize("reason", ["WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"])
def test_so_it_is_with_the_words_of_each_openssl(page: str, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def refuses(*_: object, **__: object) -> None:
        error = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1000)")
        error.reason = reason
        raise error

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", refuses)
    with pytest.raises(NetworkError, match="this network's login page"):
        fetch_certificate(page, bytes(32))


def test_the_doctor_calls_it_a_problem_and_not_a_coordinator(page: str) -> None:
    """It said `coordinator ok`, and that this machine can take part."""
    found = asyncio.run(way_to(Invite(b"r" * 32, (page,), b"k" * 32, bytes(32), (), "lab")))
    assert isinstance(found.round_trip_ms, Fault)
    assert "login page" in found.round_trip_ms.why
