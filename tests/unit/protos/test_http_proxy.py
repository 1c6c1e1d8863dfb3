"""The HTTP proxy that the environment names: which one, when it is asked, and what comes through it."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from protos.http_proxy import HttpProxy, proxy_for, way_to
from tests.unit.connect_proxy import connect_proxy, speaks_first

NAMES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
AWAY = "nobody.invalid"


@pytest.fixture(autouse=True)
def _no_proxy_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "at"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy.campus:3128"}, "proxy.campus:3128"),
        ({"HTTPS_PROXY": "proxy.campus:3128"}, "proxy.campus:3128"),
        ({"all_proxy": "http://proxy.campus"}, "proxy.campus:80"),
        ({"https_proxy": "http://[2001:db8::1]:8080/"}, "[2001:db8::1]:8080"),
        ({"https_proxy": "http://a:b@proxy.campus:3128"}, "proxy.campus:3128"),
        ({"https_proxy": "http://proxy.campus:3128", "no_proxy": "nobody.invalid"}, None),
        ({"https_proxy": "http://proxy.campus:3128", "NO_PROXY": ".invalid"}, None),
        ({"https_proxy": "socks5://proxy.campus:1080"}, None),
        ({"https_proxy": "https://proxy.campus"}, None),
        ({"https_proxy": "http://proxy.campus:port"}, None),
        ({"https_proxy": " http://proxy.campus:3128\n"}, "proxy.campus:3128"),
        ({"https_proxy": "http://pröxy.campus:3128"}, "xn--prxy-6qa.campus:3128"),
        ({"https_proxy": "http://..:3128"}, None),
        ({"https_proxy": f"http://{'x' * 64}.campus:3128"}, None),
        ({"https_proxy": "http://a%00b:3128"}, None),
        ({"https_proxy": "http://[fe80::1%eth0]:3128"}, None),
        ({"https_proxy": "http://a:\udce4@proxy.campus:3128"}, None),
        ({"https_proxy": "\udce4:3128"}, None),
        ({"https_proxy": "http://"}, None),
        ({"https_proxy": ""}, None),
    ],
)
def test_what_the_environment_names(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], at: str | None) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for(AWAY)
    assert (None if found is None else found.at) == at
    assert "a:b" not in repr(found)


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("proxy.campus", "http://proxy.campus:80"),
        (" HTTP://Proxy.campus/a?b#c", "http://proxy.campus:80"),
        ("http://cam@proxy.campus", "http://cam:@proxy.campus:80"),
        ("http://cam:p%40s^s%@proxy.campus:1", "http://cam:p%40s%5Es%25@proxy.campus:1"),
        ("http://cam:%E4@[2001:db8::1]:1", "http://cam:%E4@[2001:db8::1]:1"),
    ],
)
def test_grpc_gets_an_address_that_it_reads_as_this_program_does(
    monkeypatch: pytest.MonkeyPatch, value: str, url: str
) -> None:
    """It took port 443 where none is named, and wrote what it could not read to stderr, with the password."""
    monkeypatch.setenv("https_proxy", value)
    found = proxy_for(AWAY)
    assert found.url == url


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org"])
def test_no_proxy_leads_to_a_host_that_cannot_be(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert way_to(host, 443) is None


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org", "a\r\nb", "a b", "h\x00", "\udce4", "fe80::1%eth0", "::x"])
def test_a_host_that_cannot_be_is_a_failure_of_the_network(host: str) -> None:
    with connect_proxy() as proxy:
        with pytest.raises(OSError, match=r"no name of a host|IPv6|hexadecimal|Only hex"):
            HttpProxy("127.0.0.1", proxy.port, proxy.url).connect(host, 443, 5.0)
        assert proxy.asked == []


def test_nothing_of_what_the_other_side_says_first_is_lost() -> None:
    with connect_proxy() as proxy, speaks_first(b"\x13/multistream/1.0.0\n") as port:
        proxy.leads[f"{AWAY}:443"] = port
        way = HttpProxy("127.0.0.1", proxy.port, proxy.url.replace("://", "://cam%40pus:ses%3Aame@"))
        with way.connect(AWAY, 443, 5.0) as opened:
            assert opened.gettimeout() is None
            opened.sendall(b"and back")
            heard = b""
            while len(heard) < 28:
                heard += opened.recv(64)
        assert heard == b"\x13/multistream/1.0.0\nand back"
        [head] = proxy.asked
        assert head.startswith(f"CONNECT {AWAY}:443 HTTP/1.1\r\nHost: {AWAY}:443\r\n")
        assert "Proxy-Authorization: Basic Y2FtQHB1czpzZXM6YW1l\r\n" in head  # cam@pus:ses:ame


def test_a_proxy_that_refuses_is_quoted() -> None:
    with connect_proxy() as proxy, pytest.raises(OSError, match=r"it answered 'HTTP/1.0 403 Forbidden'"):
        HttpProxy("127.0.0.1", proxy.port, proxy.url).connect("2001:db8::1", 4001, 5.0)
    assert proxy.asked[0].startswith("CONNECT [2001:db8::1]:4001 HTTP/1.1\r\n")


@pytest.mark.parametrize("answer", [b"", b"x" * 20_000])
def test_what_is_no_proxy_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        with pytest.raises(OSError, match=r"no HTTP proxy|reset"):
            HttpProxy("127.0.0.1", server.getsockname()[1], "http://x").connect(AWAY, 443, 5.0)


def test_a_silent_proxy_has_a_deadline() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        HttpProxy("127.0.0.1", server.getsockname()[1], "http://x").connect(AWAY, 443, 0.2)
    assert time.monotonic() - began < 5


def test_the_direct_way_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        assert way_to(host, port) is None
    there = way_to(host, port)
    assert there.at == "127.0.0.1:9"


def _answer(server: socket.socket, data: bytes) -> None:
    stream, _ = server.accept()
    with stream, suppress(OSError):
        stream.sendall(data)
