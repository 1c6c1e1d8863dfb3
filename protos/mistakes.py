"""Mistakes in settings that people write: the keys that a mistake is about, and an example in place of each pattern. Pure.

`toml_file` makes messages of both. Refuses nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from protos.address import is_web, web_problem

PEER = "12D3KooWBU5jnp4mGFF8nVLZyiH22cX9W8ta8yFtjVBuaS9t2vUq"
RUN_NAME: Final = r"^[\w .-]+$"
FACTORY: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
SOURCE_NAME: Final = r"^[a-z0-9][a-z0-9_-]{0,31}$"
SHA256: Final = r"^[0-9a-f]{64}$"
WEB: Final = r"^(?i:https?)://"
MIRROR: Final = r"^((https?|s3|hf|file)://[^\s]+|/.+)$"
PEER_ADDRESS: Final = r"^/.+/p2p/[1-9A-HJ-NP-Za-km-z]+$"
PEER_LISTEN: Final = r"^(\[[0-9a-fA-F:]+\]|\d+\.\d+\.\d+\.\d+):\d{1,5}$"
PEER_LISTEN_OR_ALL: Final = rf"^({PEER_LISTEN[1:-1]}|\*:\d{{1,5}})(/tcp)?$"
LISTEN: Final = r"^(\[[0-9a-fA-F:]+\]|[^\s:\[\]]+):\d{1,5}$"
LISTEN_OR_NONE: Final = LISTEN + "|^none$"
ADVERTISED: Final = rf"{LISTEN[:-1]}(,{LISTEN[1:-1]}){{0,3}}$"
LICENCE: Final = r"^[a-z0-9][a-z0-9.-]{0,63}$"
OWN_TEXT: Final = "own"
"""A `data.source` that is no place: each peer brings text, with --data, and it stays on that machine."""
NO_LICENCE: Final = "unknown"
"""As the Hugging Face hub spells it."""
PROXY_HOST: Final = r"^[A-Za-z0-9.-]{1,253}(:\d{1,5})?$"

EXAMPLES: Final[Mapping[str, tuple[str, str]]] = {
    RUN_NAME: ("letters, digits, spaces, dots, dashes and underscores", "shakespeare 2"),
    FACTORY: ("a module, a colon and a function", "my_models.small:build"),
    SOURCE_NAME: ("at most 32 small letters, digits, dashes and underscores", "code"),
    SHA256: ("64 hex digits, as `swarmentum data build` prints them", "9f" * 32),
    WEB: ("an address of the web", "https://example.org/text"),
    MIRROR: (
        "https://, s3://, hf:// or file:// and a place, or a whole path of a folder",
        "https://example.org/states",
    ),
    PEER_ADDRESS: ("an address of a peer", f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"),
    PEER_LISTEN: ("an IP address and a port", "0.0.0.0:4001"),
    PEER_LISTEN_OR_ALL: ("an IP address and a port; * is every address", "*:4001"),
    LISTEN: ("a host and a port; an IPv6 address stands in brackets", "[::1]:7700"),
    LISTEN_OR_NONE: ("a host and a port, or none", "127.0.0.1:7780"),
    ADVERTISED: ("one to four of host:port, with commas between them", "swarm.example:7700,[2001:db8::7]:7700"),
    LICENCE: ("a licence as the Hugging Face hub spells it", "apache-2.0"),
    PROXY_HOST: ("a name, perhaps with a port", "swarm.example"),
}
"""Pattern -> what it expects, and an example that fits."""

REMOVED: Final[Mapping[str, str]] = {
    "reflection": "does nothing any more: the service is described by the .proto files in protos/v1; remove it",
}
"""Settings and options of earlier versions -> what to say to a person who still gives them."""


class Mistake(ValueError):  # noqa: N818 - it is a value with keys; pydantic wants an exception
    """Settings that do not fit together.

    `keys`: the settings, dotted below the section that refuses them; the first is the one to look at.
    """

    def __init__(self, text: str, *keys: str) -> None:
        super().__init__(text)
        self.keys = keys


def expected(pattern: str) -> str:
    """What a text that does not fit a pattern should have been."""
    if pattern not in EXAMPLES:
        return f"expected a text that fits {pattern}"
    what, example = EXAMPLES[pattern]
    return f"expected {what}, for example {example!r}"


def check_web(source: str, sha256: str | None, mirrors: tuple[str, ...]) -> None:
    """Mistake for a source on the web without a hash, for addresses that no peer can use, and for mirrors of another source."""
    for number, address in enumerate((source, *mirrors)):
        if why := web_problem(address):
            key = f"mirrors.{number - 1}" if number else "source"
            raise Mistake(f"`{key}` = {address!r} is no address that a peer can use: {why}", key.partition(".")[0])
    on_the_web = is_web(source)
    if on_the_web and sha256 is None:
        raise Mistake(
            "`source` is on the web: give `sha256` too, which `swarmentum data build` prints", "source", "sha256"
        )
    if mirrors and not on_the_web:
        raise Mistake(
            "`mirrors` are other addresses of a `source` on the web, and this `source` is none", "mirrors", "source"
        )


_NOT_WITH_OWN_TEXT: Final = {
    "data.mix": "nobody knows the sources of a peer's text; give it alone",
    "data.sha256": "peers' texts have no common hash",
    "trust.enabled": "a check computes with the checked peer's samples, which no other peer has",
    "evaluation.every": "each peer would hold out samples of another text, and their losses cannot be compared",
}


def has_own_text(sources: Iterable[tuple[str, object, object]]) -> bool:
    """Whether each peer brings its own text, which stays with it. `sources`: of the run, the name first."""
    return any(source == OWN_TEXT for source, _, _ in sources)


def own_text_misfits(sources: Iterable[tuple[str, object, object]], *given: object) -> Iterator[Mistake]:
    """What a run of own text cannot have. `given`: its mixture, hash, checks and evaluation, each false if it has none."""
    for (key, why), has in zip(_NOT_WITH_OWN_TEXT.items(), given, strict=True):
        if has and has_own_text(sources):
            yield Mistake(f'`{key}` does not work with `source = "{OWN_TEXT}"`: {why}', key, "data.source")
