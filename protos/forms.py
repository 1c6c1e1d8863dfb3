"""The forms of text in settings: patterns, and what each expects in words, for the person who wrote something else."""

from __future__ import annotations

PEER_ADDRESS = r"^/.+/p2p/[1-9A-HJ-NP-Za-km-z]+$"
SHA256 = r"^[0-9a-f]{64}$"
WEB_ADDRESS = r"^https?://"
RUN_NAME = r"^[\w .-]+$"
SOURCE_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
LISTEN = r"^(\[[0-9a-fA-F:]+\]|\d+\.\d+\.\d+\.\d+):\d{1,5}$"
LISTEN_OR_ALL = rf"{LISTEN}|^\*:\d{{1,5}}$"
HOST = r"^(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):\d{1,5}$"
HOST_OR_NONE = HOST + "|^none$"
HOSTS = rf"{HOST[:-1]}(,{HOST[1:-1]}){{0,3}}$"
WEB_HOST = r"^[A-Za-z0-9.-]{1,253}(:\d{1,5})?$"

_LISTEN_WORDS = "an IP address and a port, such as 0.0.0.0:4001 or [::]:4001"
_HOST_WORDS = "a host and a port, such as runs.example.org:7700, 203.0.113.5:7700 or [2001:db8::5]:7700"
EXPECTED = {
    PEER_ADDRESS: "an address of a peer with its id, such as /ip4/203.0.113.5/tcp/4001/p2p/12D3KooW...",
    SHA256: "a SHA-256 of 64 hex digits in small letters",
    WEB_ADDRESS: "an address that begins with https:// or http://",
    RUN_NAME: "letters, digits, spaces, and the signs . _ -",
    SOURCE_NAME: "at most 32 small letters, digits, and the signs _ -, a letter or digit first",
    FUNCTION: "module:function, such as mymodels.nets:make",
    LISTEN: _LISTEN_WORDS,
    LISTEN_OR_ALL: f"{_LISTEN_WORDS}; or *:4001 for IPv4 and IPv6",
    HOST: _HOST_WORDS,
    HOST_OR_NONE: f"{_HOST_WORDS}; or none",
    HOSTS: f"{_HOST_WORDS}; up to four, with commas between them",
    WEB_HOST: "a host name, with a port where it is not the usual one, such as runs.example.org:8443",
}


def expected(pattern: str) -> str:
    """What a pattern expects, in words; the pattern itself where it has none."""
    return EXPECTED.get(pattern, f"text that fits the pattern {pattern}")
