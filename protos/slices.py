"""Payloads of a step as bytes, and as few bytes name them: the slices of one, and those that a peer holds.

A payload, or a sum, has a slice for each range of the model's chunks. A list names them, and the list's hash is the name. A run
with `clock.ranges` of 1 has no lists: there a payload's name is the hash of its bytes. In other runs a payload is its list, and
then its slices, in order. The list and each slice also travel alone, by hash: an aggregator takes the slices of its ranges
alone, and checks them by the list whose hash the author signed. Refuses to read votes. ADR 33.

Held payloads are a bit for each place of the roster, and one hash over the payloads. The hash covers the payload that each
author announced, so that an author that announced two is detected. The coordinator compares the bits with its roster
(`coordinator/clock/reports.py`). ADR 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protos.errors import Reason, Refusal
from protos.limits import HASH_BYTES, PAYLOAD_BYTES_MAX, RANGES_MAX, UPDATE_HEADER_BYTES_MAX
from protos.v1 import log_pb2, update_pb2

_DOMAIN = b"swarmentum/v1/slices\0"
_LENGTH_BYTES = 4
_NAMED_BYTES = HASH_BYTES + _LENGTH_BYTES


@dataclass(frozen=True)
class Update:
    """One peer's votes of one step, as the optimizer takes them."""

    step: int
    size: int
    """Group size, or k of top-k."""
    votes: bytes


def encode_update(run_id: bytes, layout_digest: bytes, update: Update) -> bytes:
    """A payload, or a slice: exactly the packed votes and a header of at most UPDATE_HEADER_BYTES_MAX bytes."""
    data = update_pb2.UpdatePayload(
        run_id=run_id,
        step=update.step,
        layout_digest=layout_digest,
        size=update.size,
        votes=update.votes,
    ).SerializeToString(deterministic=True)
    assert len(data) - len(update.votes) <= UPDATE_HEADER_BYTES_MAX, "the header outgrew its bound"
    return data


@dataclass(frozen=True)
class Slice:
    """A slice, by the sha256 and the length of its bytes."""

    sha256: bytes
    total_bytes: int


def slice_of(data: bytes) -> Slice:
    """The name of these bytes."""
    return Slice(hashlib.sha256(data).digest(), len(data))


def list_bytes(ranges: int) -> int:
    """Bytes of a list of so many slices; 0 for one, which has no list."""
    return len(_DOMAIN) + ranges * _NAMED_BYTES if ranges > 1 else 0


def slice_bytes_max(ranges: int) -> int:
    """The longest slice of a sum: so many of these are no longer than a payload may be."""
    return (PAYLOAD_BYTES_MAX - list_bytes(ranges)) // ranges


def list_of(slices: Iterable[Slice]) -> bytes:
    """The list of these slices."""
    return _DOMAIN + b"".join(it.sha256 + it.total_bytes.to_bytes(_LENGTH_BYTES, "big") for it in slices)


def open_list(data: bytes) -> tuple[Slice, ...]:
    """The inverse of `list_of`; raises `Refusal`."""
    named = data[len(_DOMAIN) :]
    if not data.startswith(_DOMAIN) or not named or len(named) % _NAMED_BYTES:
        raise Refusal(Reason.MALFORMED, f"{len(data)} bytes that are no list of slices")
    starts = range(0, len(named), _NAMED_BYTES)
    found = tuple(
        Slice(named[at : at + HASH_BYTES], int.from_bytes(named[at + HASH_BYTES : at + _NAMED_BYTES], "big"))
        for at in starts
    )
    if not all(it.total_bytes for it in found):
        raise Refusal(Reason.OUT_OF_RANGE, "a slice of no bytes")
    if total_bytes(found) > PAYLOAD_BYTES_MAX:
        raise Refusal(Reason.TOO_LARGE, f"slices of {total_bytes(found)} bytes, at most {PAYLOAD_BYTES_MAX}")
    return found


def total_bytes(slices: Sequence[Slice]) -> int:
    """Bytes of a payload in these slices, with its list."""
    return len(_DOMAIN) + len(slices) * _NAMED_BYTES + sum(it.total_bytes for it in slices)


@dataclass(frozen=True)
class Aggregate:
    """The sum of a set of votes, by the sha256 and the length of its bytes. ADR 33."""

    sha256: bytes
    total_bytes: int
    payloads_sha256: bytes = b""
    """In an entry: the hash over the hashes of these votes' payloads, which the contributions then do not have."""
    slices: bytes = b""
    """The list of its slices (protos/slices.py), whose hash is `sha256`; empty in a run of one range."""

    @property
    def parts(self) -> tuple[Slice, ...]:
        """Its slices; of a sum without a list, the sum itself."""
        return open_list(self.slices) if self.slices else (Slice(self.sha256, self.total_bytes),)


def open_aggregate(body: log_pb2.Aggregate) -> Aggregate:
    """The name of a sum of votes; raises `Refusal`."""
    _in_range(len(body.sha256) == HASH_BYTES, "hash length of an aggregate")
    _in_range(len(body.payloads_sha256) in (0, HASH_BYTES), "hash length of an aggregate's payloads")
    _in_range(0 < body.total_bytes <= PAYLOAD_BYTES_MAX, f"aggregate of {body.total_bytes} bytes")
    if body.slices:
        _in_range(len(body.slices) <= list_bytes(RANGES_MAX), f"list of slices of {len(body.slices)} bytes")
        listed = sum_in(open_list(body.slices))
        _in_range(
            (body.sha256, body.total_bytes) == (listed.sha256, listed.total_bytes), "a sum's list is of another sum"
        )
    return Aggregate(body.sha256, body.total_bytes, body.payloads_sha256, body.slices)


def sum_in(slices: Sequence[Slice]) -> Aggregate:
    """The sum in these slices, with its list."""
    listed = list_of(slices)
    return Aggregate(hashlib.sha256(listed).digest(), total_bytes(slices), slices=listed)


def _in_range(good: bool, detail: str) -> None:
    if not good:
        raise Refusal(Reason.OUT_OF_RANGE, detail)


def joined(parts: Sequence[bytes]) -> bytes:
    """The payload in these slices; of one, the slice itself."""
    return parts[0] if len(parts) == 1 else list_of(map(slice_of, parts)) + b"".join(parts)


def with_slices(data: bytes, ranges: int, which: Iterable[int]) -> bytes:
    """Of a whole payload that this peer made: its list, and the slices of these ranges alone."""
    if ranges == 1:
        return data
    at, parts = list_bytes(ranges), list[bytes]()
    for it in open_list(data[:at]):
        parts.append(data[at : at + it.total_bytes])
        at += it.total_bytes
    return data[: list_bytes(ranges)] + b"".join(parts[number] for number in which)


def split(data: bytes, ranges: int, which: Iterable[int] | None = None) -> list[bytes]:
    """The slices in a payload's bytes; `which`: it has those of these ranges alone. Raises `Refusal` for other bytes."""
    if ranges == 1:
        return [data]
    named, at, found = open_list(data[: list_bytes(ranges)]), list_bytes(ranges), []
    if len(named) != ranges:
        raise Refusal(Reason.OUT_OF_RANGE, f"a list of {len(named)} slices, in a run of {ranges} ranges")
    for number in range(ranges) if which is None else which:
        part = data[at : at + named[number].total_bytes]
        at += named[number].total_bytes
        if slice_of(part) != named[number]:
            raise Refusal(Reason.HASH_MISMATCH, f"slice {number} has other bytes than the list names")
        found.append(part)
    if at != len(data):
        raise Refusal(Reason.MALFORMED, f"{len(data) - at} bytes behind the last slice")
    return found


def blobs_of(data: bytes, ranges: int, which: Iterable[int] | None = None) -> list[tuple[bytes, bytes]]:
    """What travels of a payload, by hash: its list first, whose hash is its name, then its slices. Raises as `split` does."""
    parts = split(data, ranges, which)
    head = [data[: list_bytes(ranges)]] if ranges > 1 else []
    return [(hashlib.sha256(it).digest(), it) for it in (*head, *parts)]


def fitting(named: Sequence[Slice], longest: Sequence[int]) -> list[int]:
    """The ranges whose slice of a sum is no longer than a valid one: nobody asks for others, and they count as no votes."""
    return [number for number, it in enumerate(named) if it.total_bytes <= longest[number]]


def hash_of(data: bytes, ranges: int = 1, named_bytes: int | None = None, longest: Sequence[int] = ()) -> bytes:
    """A payload's name; empty if a slice has other bytes than its list names. `named_bytes`: the length that the log names.
    `longest`: it is a sum, and has no slice that is longer (`fitting`).

    Bytes that can be no payload in slices of this length are named by their own hash: they count as no votes.
    """
    try:
        named = () if ranges == 1 else open_list(data[: list_bytes(ranges)])
    except Refusal:
        named = ()
    if len(named) != ranges or total_bytes(named) != (len(data) if named_bytes is None else named_bytes):
        return hashlib.sha256(data).digest()
    try:
        split(data, ranges, fitting(named, longest) if longest and ranges > 1 else None)
    except Refusal:
        return b""
    return hashlib.sha256(data[: list_bytes(ranges)]).digest()


def mask_of(places: Iterable[int]) -> int:
    """The bit mask of these places."""
    mask = 0
    for place in places:
        mask |= 1 << place
    return mask


def places_of(mask: int) -> Iterator[int]:
    """The places in a bit mask, in order."""
    first = max((mask & -mask).bit_length() - 1, 0)
    for place, digit in enumerate(reversed(f"{mask >> first:b}"), first):
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
