"""Finds the invite link in what a person pasted: a whole command, a chat's line, a mail that broke or encoded the link.

The first scheme counts, in any case. The link ends where its checksum holds: words may follow it, and line breaks may be in it.
Refuses to guess: a link with a changed character has no checksum that holds, and is damaged.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from typing import Final
from urllib.parse import unquote

from protos.errors import OperatorError
from protos.limits import INVITE_BYTES_MAX

SCHEME: Final = "swarmentum://"
ANCHOR_SCHEME: Final = "swarmentum-anchor://"
"""Of the secret link that makes anchors, so that it is not mistaken for the link that everybody may have."""
CHECKSUM_BYTES: Final = 4
PASTED_CHARACTERS_MAX: Final = 4 * INVITE_BYTES_MAX
WORDS_MAX: Final = 256
CODED_CHARACTERS_MIN: Final = 120
"""The shortest link holds a run id, a key and a hash of a certificate."""
_SCHEME = re.compile(r"swarmentum(?:-anchor)?://", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_-]+")
DAMAGED: Final = "the invite link is damaged or cut off; copy it again, whole"


def is_link(text: str) -> bool:
    """Whether an invite link is in a text, which otherwise is a path, a name or an id."""
    return bool(_SCHEME.search(_plain(text)))


def link_bytes(text: str) -> bytes:
    """What the link in a pasted text holds, without its checksum. OperatorError says what is wrong with it."""
    plain = _plain(text)
    found = list(_SCHEME.finditer(plain))
    if not found:
        return _without_scheme(text, plain)
    ends = [one.start() for one in found[1:]] + [len(plain)]
    parts = [plain[one.end() : end] for one, end in zip(found, ends, strict=True)]
    real = [rest for rest in parts if len("".join(_WORD.findall(rest)[:WORDS_MAX])) >= CODED_CHARACTERS_MIN]
    if not real:
        shown = plain[found[0].start() :][:40].split("\n")[0].strip()
        raise OperatorError(
            f"the invite link is damaged or cut off, or it is the example of the docs: {shown!r}. Put the whole link there "
            "that the run's operator sent; it has more than a hundred characters"
        )
    data = _checked(_WORD.findall(real[0])[:WORDS_MAX])
    if data is None:
        raise OperatorError(DAMAGED)
    return data


def _without_scheme(text: str, plain: str) -> bytes:
    """A link whose scheme was not copied is still one: its checksum says so."""
    for word in _WORD.findall(plain)[:WORDS_MAX]:
        data = _checked([word]) if len(word) >= CODED_CHARACTERS_MIN else None
        if data is not None:
            return data
    raise OperatorError(f"not an invite link: it starts with {SCHEME}, got {text[:32]!r}")


def _plain(text: str) -> str:
    """Without what does not show (a chat's zero-width spaces, a soft hyphen), and without percent signs of a browser."""
    if len(text) > PASTED_CHARACTERS_MAX:
        raise OperatorError(
            f"not an invite link: {len(text)} characters, of which a link has at most {INVITE_BYTES_MAX}"
        )
    shown = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return unquote(shown) if "%" in shown else shown


def _checked(words: list[str]) -> bytes | None:
    """The bytes of the first words that together have the right checksum; None if none do."""
    coded = ""
    for word in words:
        coded += word
        if len(coded) > INVITE_BYTES_MAX:
            return None
        if len(coded) < CODED_CHARACTERS_MIN or len(coded) % 4 == 1:
            continue
        data = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
        if hashlib.sha256(data[:-CHECKSUM_BYTES]).digest()[:CHECKSUM_BYTES] == data[-CHECKSUM_BYTES:]:
            return data[:-CHECKSUM_BYTES]
    return None
