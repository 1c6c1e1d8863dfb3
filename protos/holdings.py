"""Held payloads of a step in few bytes: a bit for each place of the roster, and one hash over the payloads.

The hash covers the payload that each author announced, so that an author that announced two is detected. Refuses nothing:
the coordinator compares the bits with its roster (`coordinator/clock/reports.py`). ADR 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator


def mask_of(places: Iterable[int]) -> int:
    """The bit mask of these places."""
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def places_of(mask: int) -> Iterator[int]:
    """The places in a bit mask, in order."""
    for place, digit in enumerate(reversed(f"{mask:b}")):
        if digit == "1":
            yield place


def mask_bytes(mask: int) -> bytes:
    """The mask as it travels: place 8 j + i is bit i of byte j; no zero bytes at the end."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def mask_from_bytes(data: bytes) -> int:
    """Inverse of `mask_bytes`."""
    return int.from_bytes(data, "little")


def digest_of(payloads: Iterable[bytes]) -> bytes:
    """sha256 over payload hashes (32 bytes each), in the order of their authors' places."""
    return hashlib.sha256(b"".join(payloads)).digest()
