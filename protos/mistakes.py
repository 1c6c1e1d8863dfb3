"""Mistakes in settings that people write: the keys that a mistake is about, an example in place of each pattern, and variables
of the environment that nobody reads.

`toml_file` makes messages of the first two. A mistyped SWARMENTUM_DEVCE would be a setting without effect, in silence. Refuses
nothing itself: a variable may belong to somebody's script, or to a newer version.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Final

from protos.address import is_web, web_problem
from protos.text import printable

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


PREFIX: Final = "SWARMENTUM_"
COORDINATOR: Final = "SWARMENTUM_COORDINATOR_"
BACKEND: Final = "SWARMENTUM_OPTIM_BACKEND"
IDLE_COMMAND: Final = "SWARMENTUM_IDLE_COMMAND"
"""A command of the owner; the last number that it prints is the idle time in milliseconds. A variable of the environment
alone: a swarmentum.toml of a working folder may be somebody else's, and starts no program."""
OTHERS: Final = ("SWARMENTUM_BIN", "SWARMENTUM_TEST_", "SWARMENTUM_BENCH_")
"""deploy/peers and the tests read these."""
NEAR: Final = 0.7
NEAR_WHOLE: Final = 0.9
"""Of whole names, most of which is the same in all."""
SHOWN_MAX: Final = 20
_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""Kubernetes gives each pod such variables for every service, also for one that is called swarmentum-coordinator."""


def unread(present: Iterable[str], prefix: str, settings: Collection[str]) -> Iterator[str]:
    """A sentence for each variable that looks like ours, and that a program with this prefix and settings does not read."""
    known = {prefix + key.upper() for key in (*settings, "config")} | {BACKEND, IDLE_COMMAND}
    for name in sorted(present):
        upper = name.upper()
        if upper in known or upper.startswith(OTHERS) or _KUBERNETES.search(upper) or not upper.startswith("SWARM"):
            continue
        ours = upper.startswith(prefix)
        if ours and prefix != COORDINATOR and upper.startswith(COORDINATOR):
            continue
        near = (
            near_to(upper, known, prefix) if ours else difflib.get_close_matches(upper, known, n=1, cutoff=NEAR_WHOLE)
        )
        if near:
            yield f"environment: {printable(name)} does nothing. Did you mean {' or '.join(near)}? Correct it, or unset it"
        elif ours:
            yield f"environment: {printable(name)} is no variable of this version and does nothing. Correct it, or unset it"


def near_to(name: str, known: Iterable[str], prefix: str) -> list[str]:
    """The known names that a mistyped one is near to. The prefix says nothing about which is meant."""
    bare = {it.removeprefix(prefix).removeprefix(PREFIX): it for it in known}
    return [bare[it] for it in difflib.get_close_matches(name.removeprefix(prefix), bare, n=2, cutoff=NEAR)]


def tell_unread(present: Iterable[str], prefix: str, settings: Collection[str], only: str = "") -> None:
    """Prints these sentences on stderr, each once in a process. `only`: those that name this variable."""
    for sentence in [it for it in unread(present, prefix, settings) if only in it][:SHOWN_MAX]:
        _tell(sentence)


@cache
def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
