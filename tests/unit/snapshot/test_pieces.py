"""Snapshots: the same bytes for the same bits, a strict door, and all or nothing."""

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from node.model.spec import ModelSpec, build
from node.snapshot.pieces import (
    SnapshotLimits,
    SnapshotManifest,
    check_piece,
    describe,
    iterate_pieces,
    load,
    open_manifest,
    pack,
    parameters_of,
)
from protos.errors import Reason, Refusal
from tests.unit.model.test_spec import TINY

RUN, ENTRY, LAYOUT = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
LIMITS = SnapshotLimits(manifest_bytes_max=4096, piece_bytes_max=64, pieces_max=20, step_max=1000)
# The bytes of a small snapshot, which are part of the protocol whatever the version of the library that writes them:
# length of the header, header padded with spaces to a multiple of 8, little-endian floats.
FROZEN = (
    b"p\0\0\0\0\0\0\0"
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]}}  '
    b"\0\0\0\x80\0\0\x80\x7f"
    b"\0\0\0\0\0\0\x80?\0\0\0@\0\0@@"
)


def manifest_of(data: bytes, piece_bytes: int = 16) -> SnapshotManifest:
    return describe(data, run_id=RUN, step=7, entry_hash=ENTRY, layout_digest=LAYOUT, piece_bytes=piece_bytes)


def refusal(call: object, *args: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args)
    return caught.value


def test_bytes_are_frozen() -> None:
    state = {"b": torch.arange(4.0).reshape(2, 2), "a": torch.tensor([-0.0, float("inf")])}
    packed = pack(state)
    assert packed == pack(dict(reversed(state.items()))), "the order of the mapping does not matter"
    assert packed == FROZEN


def test_round_trip_is_bit_exact_and_tied_weights_are_there_once() -> None:
    model, other = build(ModelSpec(TINY), 1), build(ModelSpec(TINY), 2)
    with torch.no_grad():
        next(model.parameters())[0, :3] = torch.tensor([-0.0, float("nan"), 1e-42])
    data = pack(parameters_of(model))
    assert data == pack(model.state_dict()), "a state dict with both names of a tied weight is the same snapshot"
    load(data, parameters_of(other))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert pack(parameters_of(other)) == data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "bias"}, "lacks parameters: 1 in all, such as bias"),
        (lambda s: {**s, "more": torch.zeros(1)}, "holds parameters that the model lacks.*more"),
        (lambda s: {**s, "bias": torch.zeros(4)}, r"bias as torch.float32 \(4,\), the model as torch.float32 \(3,\)"),
        (lambda s: {**s, "bias": torch.zeros(3, dtype=torch.bfloat16)}, "bias as torch.bfloat16"),
    ],
)
def test_what_does_not_fit_changes_nothing(change: object, words: str) -> None:
    model = nn.Linear(2, 3)
    before = pack(parameters_of(model))
    strange = save(change({name: torch.ones_like(p) for name, p in parameters_of(model).items()}))
    caught = refusal(load, strange, parameters_of(model))
    assert caught.reason is Reason.WRONG_LAYOUT
    with pytest.raises(Refusal, match=words):
        load(strange, parameters_of(model))
    assert pack(parameters_of(model)) == before


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_snapshot(data: bytes) -> None:
    assert refusal(load, data, parameters_of(nn.Linear(2, 3))).reason in (Reason.MALFORMED, Reason.WRONG_LAYOUT)


@settings(max_examples=80, deadline=None)
@given(data=st.binary(min_size=1, max_size=300), piece_bytes=st.integers(16, 64))
def test_pieces_are_the_whole_and_pass_the_door(data: bytes, piece_bytes: int) -> None:
    manifest, pieces = manifest_of(data, piece_bytes), list(iterate_pieces(data, piece_bytes))
    assert [len(piece) for piece in pieces] == [manifest.piece_length(i) for i in range(len(pieces))]
    for index, piece in enumerate(pieces):
        check_piece(manifest, index, piece)
    assert b"".join(pieces) == data
    received = open_manifest(manifest.encoded, LIMITS)
    assert received == manifest
    assert received.root == manifest.root == hashlib.sha256(manifest.encoded).digest()


def test_wrong_pieces() -> None:
    data = bytes(range(100))
    manifest, pieces = manifest_of(data), list(iterate_pieces(data, 16))
    assert refusal(check_piece, manifest, 0, pieces[1]).reason is Reason.HASH_MISMATCH
    assert "has 15 bytes" in refusal(check_piece, manifest, 0, pieces[0][1:]).detail
    assert "not what the manifest says" in refusal(check_piece, manifest, 0, pieces[0][::-1]).detail


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"run_id": b"short"}, Reason.MALFORMED, "run_id has 5 bytes"),
        ({"entry_hash": b""}, Reason.MALFORMED, "entry_hash has 0"),
        ({"layout_digest": b"x" * 33}, Reason.MALFORMED, "layout has 33"),
        ({"piece_hashes": (b"x" * 32,) * 6 + (b"",)}, Reason.MALFORMED, "hash of piece 6 has 0"),
        ({"piece_bytes": 0}, Reason.OUT_OF_RANGE, "piece_bytes 0"),
        ({"piece_bytes": 65}, Reason.OUT_OF_RANGE, "piece_bytes 65, expected 1..64"),
        ({"total_bytes": 0}, Reason.OUT_OF_RANGE, "total_bytes 0"),
        ({"total_bytes": 2**63}, Reason.OUT_OF_RANGE, "total_bytes 9223372036854775808"),
        ({"total_bytes": 113}, Reason.OUT_OF_RANGE, "7 pieces, expected 8"),
        ({"total_bytes": 96}, Reason.OUT_OF_RANGE, "7 pieces, expected 6"),
        ({"total_bytes": 1280, "piece_bytes": 32}, Reason.OUT_OF_RANGE, "expected 40 and at most 20"),
        ({"step": 1001}, Reason.OUT_OF_RANGE, "step 1001"),
    ],
)
def test_door_names_its_reason(change: dict[str, object], reason: Reason, words: str) -> None:
    strange = replace(manifest_of(bytes(100)), **change)
    caught = refusal(open_manifest, strange.encoded, LIMITS)
    assert caught.reason is reason
    assert words in caught.detail


def test_door_for_other_forms() -> None:
    good = manifest_of(bytes(100)).encoded
    assert refusal(open_manifest, bytes(4097), LIMITS).reason is Reason.TOO_LARGE
    assert refusal(open_manifest, good[:-1], LIMITS).reason is Reason.MALFORMED
    assert "canonical" in refusal(open_manifest, good + b"\x78\x01", LIMITS).detail, "an unknown field"
    assert "canonical" in refusal(open_manifest, good + good[:34], LIMITS).detail, "a field twice"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    refusal(open_manifest, data, LIMITS)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_changed_byte_changes_the_root_or_is_refused(place: int, value: int) -> None:
    manifest = manifest_of(bytes(100))
    changed = bytearray(manifest.encoded)
    changed[place % len(changed)] = value
    try:
        received = open_manifest(bytes(changed), LIMITS)
    except Refusal:
        return
    assert (received.root == manifest.root) == (bytes(changed) == manifest.encoded)
