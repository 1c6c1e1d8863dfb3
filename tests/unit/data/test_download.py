"""Shards from real HTTP servers: resumed, from another mirror, hashed; addresses of a home are refused."""

import contextlib
import gzip
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from node.data import download
from node.data.download import Mirrors, WebReader, is_public
from node.data.shards import MANIFEST, Shard, sha256_of
from protos.address import is_web
from protos.errors import DataError, NetworkError
from tests.system.web_folder import WebServer

DATA = bytes(range(256)) * 4000
SHARD = Shard("0.bin", len(DATA), sha256_of(DATA))


class Server(WebServer):
    """A web server that can break off, know no ranges, lie, or send people elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.url += "/set"
        self.files = {"/set/0.bin": DATA, f"/set/{MANIFEST}": b"the manifest"}
        self.break_after = list[int]()
        self.ranges, self.status, self.location = True, 200, ""
        self.redirect_bytes = 0
        self.trickle, self.headers = 0.0, dict[str, str]()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        data = self.files.get(request.path)
        if self.location or data is None or self.status != 200:
            request.send_response(302 if self.location else 404 if data is None else self.status)
            request.send_header("Location", self.location)
            request.send_header("Content-Length", str(self.redirect_bytes))
            request.end_headers()
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        for name, value in self.headers.items():
            request.send_header(name, value)
        request.end_headers()
        most = self.break_after.pop(0) if self.break_after else len(data)
        if self.trickle:
            with contextlib.suppress(OSError):
                for at in range(start, len(data)):
                    request.wfile.write(data[at : at + 1])
                    time.sleep(self.trickle)
            return
        request.wfile.write(data[start : start + most])
        if most < len(data) - start:
            request.connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "WAIT_SECONDS_MIN", 0.01)


def fetched(mirrors: Mirrors, path: Path) -> bytes:
    assert mirrors.fetch(SHARD, 1, path, lambda done: True)
    assert list(path.parent.iterdir()) == [path], "a part was left"
    return path.read_bytes()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_breaks_off_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.break_after, server.ranges = [300_000, 300_000, 200_000], ranges
    assert fetched(Mirrors([server.url], private=True), tmp_path / "0.bin") == DATA
    begun = [int(wanted.removeprefix("bytes=").rstrip("-")) for _, wanted in server.asked if wanted]
    assert begun == sorted(begun)
    assert begun[0] > 0, "it began again"


def test_another_mirror_is_taken_if_one_is_away_or_lies(server: Server, tmp_path: Path) -> None:
    liar, log = Server(), list[dict[str, Any]]()
    try:
        liar.files["/set/0.bin"] = DATA[:-1] + b"x"
        away = "http://127.0.0.1:1/set/"
        mirrors = Mirrors(
            [away, liar.url, server.url + "/" + MANIFEST], private=True, log=lambda _, **it: log.append(it)
        )
        assert fetched(mirrors, tmp_path / "0.bin") == DATA
        assert [it["url"] for it in log] == [f"{away}0.bin", f"{liar.url}/0.bin"]
        assert "not those that the manifest names" in log[1]["why"]
    finally:
        liar.http.shutdown()
        liar.http.server_close()


def test_a_server_that_sends_more_than_promised_is_cut_off(server: Server, tmp_path: Path) -> None:
    log = list[str]()
    server.files["/set/0.bin"] = DATA * 3
    asked = iter([True] * 30)
    mirrors = Mirrors([server.url], private=True, log=lambda _, **it: log.append(it["why"]))
    assert not mirrors.fetch(SHARD, 1, tmp_path / "0.bin", lambda done: next(asked, False))
    assert "larger than was promised" in log[0]
    assert (tmp_path / "0.bin.part").stat().st_size <= len(DATA)


def test_a_server_that_trickles_is_left_for_another(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read succeeds, so no timeout of the connection ends it."""
    monkeypatch.setattr(download, "RATE_SECONDS", 0.3)
    slow, log = Server(), list[str]()
    slow.trickle = 0.02
    try:
        mirrors = Mirrors([slow.url, server.url], private=True, log=lambda _, **it: log.append(it["why"]))
        assert fetched(mirrors, tmp_path / "0.bin") == DATA
        assert "too slow" in log[0]
        assert mirrors.manifest(None) == b"the manifest"
    finally:
        slow.http.shutdown()
        slow.http.server_close()


def test_what_a_server_packed_is_not_unpacked(server: Server, tmp_path: Path) -> None:
    """A shard of a few kB that unpacks to gigabytes."""
    packed, log = gzip.compress(bytes(len(DATA))), list[str]()
    server.files["/set/0.bin"], server.headers = packed, {"Content-Encoding": "gzip"}
    asked = iter([True] * 12)
    mirrors = Mirrors([server.url], private=True, log=lambda _, **it: log.append(it["why"]))
    assert not mirrors.fetch(SHARD, 1, tmp_path / "0.bin", lambda done: next(asked, False))
    assert "not those that the manifest names" in log[0]


def test_nobody_wants_it_any_more(server: Server, tmp_path: Path) -> None:
    assert not Mirrors([server.url], private=True).fetch(SHARD, 1, tmp_path / "0.bin", lambda done: done < 500_000)
    assert 500_000 <= (tmp_path / "0.bin.part").stat().st_size < len(DATA)
    assert fetched(Mirrors([server.url], private=True), tmp_path / "0.bin") == DATA


def test_the_manifest_has_the_hash_that_the_run_names(server: Server) -> None:
    mirrors = Mirrors([server.url], private=True)
    assert mirrors.manifest(sha256_of(b"the manifest")) == b"the manifest"
    with pytest.raises(DataError, match="is another set of shards"):
        mirrors.manifest("0" * 64)
    server.status = 503
    with pytest.raises(NetworkError, match="the server answers 503"):
        mirrors.manifest(None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "192.168.1.1", "10.0.0.1", "[::1]", "169.254.169.254"])
def test_a_run_cannot_make_a_peer_call_its_own_home(host: str) -> None:
    with pytest.raises(DataError, match="a private network; if you trust"):
        Mirrors([f"http://{host}:1/set"], private=False).manifest("0" * 64)


def test_nor_by_sending_it_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A public server answers with a redirect to the router."""
    server.location = "http://192.168.1.1/reboot"
    real = download.ipaddress.ip_address
    public = real("93.184.216.34")
    monkeypatch.setattr(download.ipaddress, "ip_address", lambda text: public if text == "127.0.0.1" else real(text))
    with pytest.raises(
        DataError, match=r"192\.168\.1\.1 is 192\.168\.1\.1, an address of this machine or of a private"
    ):
        Mirrors([server.url], private=False).manifest("0" * 64)
    assert [path for path, _ in server.asked] == [f"/set/{MANIFEST}"]
    server.location = "file:///etc/passwd"
    with pytest.raises(NetworkError):
        Mirrors([server.url], private=False).manifest("0" * 64)


def test_an_address_of_the_internet_leads_to_no_private_one_even_if_a_person_typed_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Server()
    try:
        server.location = f"{other.url}/{MANIFEST}"
        assert Mirrors([server.url], private=True).manifest(None) == b"the manifest", "both are private"
        real = download.ipaddress.ip_address
        public = real("93.184.216.34")
        monkeypatch.setattr(
            download.ipaddress, "ip_address", lambda text: public if text == "127.0.0.1" else real(text)
        )
        assert Mirrors([server.url], private=True).manifest(None) == b"the manifest", "both are public"
        server.location = "http://[::1]:1/reboot"
        with pytest.raises(
            DataError, match=r"127\.0\.0\.1 leads to ::1, which is ::1, .*; if you mean it, name ::1 itself"
        ):
            Mirrors([server.url], private=True).manifest(None)
    finally:
        other.http.shutdown()
        other.http.server_close()


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (HEAD + b"X-A: ", b"a"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nfour\r\n1;", b"a"),
        (HEAD + b"\r\nfour", b""),
    ],
    ids=["head", "103", "chunk", "silence"],
)
def test_a_server_that_never_ends_a_piece_has_a_deadline(
    first: bytes, again: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte began the HTTP client's own timeouts again, so `verify` waited for ever."""
    monkeypatch.setattr(download, "SILENCE_SECONDS_MAX", 0.6)
    monkeypatch.setattr(download, "LOOK_SECONDS", 0.05)
    ended = threading.Event()

    def answer() -> None:
        stream, _ = listening.accept()
        with stream, contextlib.suppress(OSError):
            stream.recv(65536)
            stream.sendall(first)
            while not ended.wait(0.05):
                stream.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, daemon=True).start()
        url, began, came = f"http://127.0.0.1:{listening.getsockname()[1]}/x", time.monotonic(), list[bytes]()
        try:
            with pytest.raises((OSError, httpx2.HTTPError), match=r"kept this program waiting for 1 s|timed out"):
                came.extend(WebReader(private=True).blocks(url, 0, 100))
        finally:
            ended.set()
    assert time.monotonic() - began < 10
    assert came == ([b"four"] if b"four" in first else [])


def test_the_body_of_a_redirect_is_not_read(server: Server) -> None:
    """It was read whole into memory, and unpacked."""
    server.location, server.redirect_bytes = server.url + "/elsewhere", 1 << 40
    with pytest.raises(OSError, match="more than 5 redirects"):
        list(WebReader(private=True).blocks(server.url, 0, 100))
    assert len(server.asked) == 1 + download.REDIRECTS_MAX


@pytest.mark.parametrize("private", [True, False])
def test_a_host_that_cannot_be_is_a_failure_of_the_network(private: bool) -> None:
    with pytest.raises(OSError, match="label empty"):
        list(WebReader(private=private).blocks("http://a..b/x", 0, 100))


def test_what_is_an_address() -> None:
    assert [is_web(it) for it in ("https://x/y", "http://x", "/x", "x", "stdlib", "file:///x", "ftp://x")] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::808:808", True),  # a network with IPv6 alone reaches 8.8.8.8 so
        ("64:ff9b::a00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::808:808", False),
        ("2002:a00:1::", False),
        ("2002:808:808::", True),
        ("::127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fec0::1", False),
        ("fe80::1%eth0", False),
        ("224.0.0.1", False),
        ("ff0e::1", False),
        ("169.254.169.254", False),
    ],
)
def test_an_address_that_a_gateway_turns_into_a_private_one_is_private(place: str, public: bool) -> None:
    """A redirect to 64:ff9b::10.0.0.1 passed the check, and reached 10.0.0.1 through a router with NAT64."""
    assert is_public(place) is public
