"""Whether a text is an address of the web, and whole: the one parser for settings, consent, downloads and cards. Pure.

Schemes have any case (RFC 3986). A text that one reader takes for an address and another for a path has no hash and is
downloaded: a run's text could then be another one for each peer.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

SCHEMES: Final = ("https", "http")


def is_web(source: str) -> bool:
    """Whether a source is on the web, and no path. Also for an address that cannot be used (`web_problem`)."""
    return _scheme_of(source) in SCHEMES


def web_problem(source: str) -> str:
    """Why an address of the web cannot be used; empty if it can, and for a source that is none."""
    if not is_web(source):
        return ""
    if source != source.strip() or not source.isprintable() or " " in source:
        return "it has spaces or control characters"
    try:
        parts = urlsplit(source)
        named, _ = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    return "" if named and "://" in source else "it names no host: give https://HOST/PATH"


def _scheme_of(source: str) -> str:
    """In small letters; empty for a path. As a browser does, urlsplit leaves out some characters that do not print."""
    try:
        return urlsplit(source).scheme.lower()
    except ValueError:  # a bracket that does not close: the scheme is before it
        return source.partition(":")[0].strip().lower()
