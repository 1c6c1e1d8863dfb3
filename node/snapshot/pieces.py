"""A snapshot: the replicated state as one safetensors file with the same bytes on every machine, cut in pieces.

The file holds the fp32 parameters and the base optimizer's state in order of their names, tied parameters once, and no
metadata. The file holds no buffers of the model, because they are no part of the replicated state. The manifest names the
pieces by sha256, and its own sha256 is the snapshot's root.

A fork's state of step 0 is a snapshot of its parent run: the same pieces under two manifests. The genesis names the parent
run's manifest by its root. The fork's own manifest has the fork's run id and step 0. Each follows from the other, so
a peer that has the fork's snapshot of step 0 serves the parent run's snapshot, too. ADR 5.

Refuses manifests beyond the limits or not in canonical form, pieces that the manifest does not name, and files that do not fit
the model. Each is a `protos.errors.Refusal` with its reason. The model changes only after all checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from google.protobuf.message import DecodeError
from torch import Tensor, nn

from node.optim.spread import Pieces
from protos import limits as contract
from protos.errors import Reason, Refusal
from protos.start import StartingState
from protos.v1 import snapshot_pb2

NAMES_SHOWN_MAX: Final = 4  # in an error about names that do not fit


@dataclass(frozen=True)
class SnapshotLimits:
    """The largest values that a manifest may name."""

    manifest_bytes_max: int = contract.MANIFEST_BYTES_MAX
    piece_bytes_max: int = contract.SNAPSHOT_PIECE_BYTES
    pieces_max: int = contract.SNAPSHOT_PIECES_MAX
    step_max: int = contract.STEP_MAX

    @property
    def total_bytes_max(self) -> int:
        return self.piece_bytes_max * self.pieces_max


@dataclass(frozen=True)
class SnapshotManifest:
    """A snapshot's table of contents; made by `describe`, or by `open_manifest` from a stranger's bytes."""

    run_id: bytes
    step: int
    """The step after which the state was taken."""
    entry_hash: bytes
    layout_digest: bytes
    total_bytes: int
    piece_bytes: int
    piece_hashes: tuple[bytes, ...]

    def piece_length(self, index: int) -> int:
        """Bytes of a piece; only the last may be shorter."""
        return min(self.piece_bytes, self.total_bytes - index * self.piece_bytes)

    @cached_property
    def encoded(self) -> bytes:
        """The canonical protobuf bytes."""
        message = snapshot_pb2.SnapshotManifest(
            run_id=self.run_id,
            step=self.step,
            entry_hash=self.entry_hash,
            layout_digest=self.layout_digest,
            total_bytes=self.total_bytes,
            piece_bytes=self.piece_bytes,
            piece_hashes=self.piece_hashes,
        )
        return bytes(message.SerializeToString(deterministic=True))

    @cached_property
    def root(self) -> bytes:
        """32 bytes: the sha256 of the canonical bytes."""
        return hashlib.sha256(self.encoded).digest()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, tied ones once under their first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def pack(state: Mapping[str, Tensor]) -> bytes:
    """The safetensors file of fp32 tensors: equal bits give equal bytes. The file has tied tensors once, under their first
    name."""
    from safetensors.torch import save

    seen: set[tuple[Any, ...]] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}: master weights are fp32"
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        unique[name] = tensor.detach().cpu().contiguous()
    return save(unique)


def iterate_pieces(data: bytes, piece_bytes: int) -> Iterator[bytes]:
    """The pieces one at a time: all but the last have `piece_bytes`."""
    assert piece_bytes > 0
    for start in range(0, len(data), piece_bytes):
        yield data[start : start + piece_bytes]


def describe(
    data: bytes,
    *,
    run_id: bytes,
    step: int,
    entry_hash: bytes,
    layout_digest: bytes,
    piece_bytes: int = contract.SNAPSHOT_PIECE_BYTES,
) -> SnapshotManifest:
    """The manifest of our own snapshot."""
    hashes = tuple(hashlib.sha256(piece).digest() for piece in iterate_pieces(data, piece_bytes))
    return SnapshotManifest(run_id, step, entry_hash, layout_digest, len(data), piece_bytes, hashes)


def open_manifest(data: bytes, limits: SnapshotLimits | None = None) -> SnapshotManifest:
    """The one door for a stranger's manifest: size, parse, form, range. Raises Refusal with the reason."""
    limits = limits or SnapshotLimits()
    if len(data) > limits.manifest_bytes_max:
        raise Refusal(Reason.TOO_LARGE, f"manifest of {len(data)} bytes, at most {limits.manifest_bytes_max}")
    message = snapshot_pb2.SnapshotManifest()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Refusal(Reason.MALFORMED, f"manifest is not protobuf: {error}") from error
    manifest = SnapshotManifest(
        message.run_id,
        message.step,
        message.entry_hash,
        message.layout_digest,
        message.total_bytes,
        message.piece_bytes,
        tuple(message.piece_hashes),
    )
    _check_manifest(manifest, limits)
    if manifest.encoded != data:
        raise Refusal(Reason.MALFORMED, "manifest is not in canonical form, so its root is ambiguous")
    return manifest


def _check_manifest(manifest: SnapshotManifest, limits: SnapshotLimits) -> None:
    named = (("run_id", manifest.run_id), ("entry_hash", manifest.entry_hash), ("layout", manifest.layout_digest))
    for name, value in (*named, *((f"hash of piece {i}", h) for i, h in enumerate(manifest.piece_hashes))):
        if len(value) != contract.HASH_BYTES:
            raise Refusal(Reason.MALFORMED, f"manifest: {name} has {len(value)} bytes, expected {contract.HASH_BYTES}")
    if not 0 < manifest.piece_bytes <= limits.piece_bytes_max:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"manifest: piece_bytes {manifest.piece_bytes}, expected 1..{limits.piece_bytes_max}"
        )
    if not 0 < manifest.total_bytes <= limits.total_bytes_max:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"manifest: total_bytes {manifest.total_bytes}, expected 1..{limits.total_bytes_max}"
        )
    if manifest.step > limits.step_max:
        raise Refusal(Reason.OUT_OF_RANGE, f"manifest: step {manifest.step}, at most {limits.step_max}")
    count, expected = len(manifest.piece_hashes), -(-manifest.total_bytes // manifest.piece_bytes)
    if count != expected or count > limits.pieces_max:
        raise Refusal(
            Reason.OUT_OF_RANGE, f"manifest: {count} pieces, expected {expected} and at most {limits.pieces_max}"
        )


def check_piece(manifest: SnapshotManifest, index: int, piece: bytes) -> None:
    """Raises Refusal unless these bytes are piece `index` of the snapshot."""
    assert 0 <= index < len(manifest.piece_hashes), index
    if len(piece) != manifest.piece_length(index):
        raise Refusal(
            Reason.HASH_MISMATCH,
            f"piece {index} has {len(piece)} bytes, the manifest says {manifest.piece_length(index)}",
        )
    if hashlib.sha256(piece).digest() != manifest.piece_hashes[index]:
        raise Refusal(Reason.HASH_MISMATCH, f"piece {index} is not what the manifest says")


@torch.no_grad()
def load(data: bytes | Path, state: Mapping[str, Tensor | Pieces]) -> None:
    """Write the snapshot's tensors into those of the replicated state, bit for bit. A file is mapped, not read.

    Raises Refusal, the state untouched, unless both have the same names, shapes and dtypes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as parse
    from safetensors.torch import load_file

    try:
        tensors = load_file(data) if isinstance(data, Path) else parse(data)
    except SafetensorError as error:
        raise Refusal(Reason.MALFORMED, f"snapshot is not a safetensors file: {error}") from error
    except (KeyError, ValueError) as error:
        raise Refusal(Reason.MALFORMED, f"snapshot holds tensors that torch does not know: {error!r}") from error
    _check_fit(tensors, state)
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


def _check_fit(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor | Pieces]) -> None:
    for names, what in (
        (parameters.keys() - tensors.keys(), "lacks parameters"),
        (tensors.keys() - parameters.keys(), "holds parameters that the model lacks"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:NAMES_SHOWN_MAX])
            raise Refusal(Reason.WRONG_LAYOUT, f"snapshot {what}: {len(names)} in all, such as {shown}")
    for name, parameter in parameters.items():
        found = tensors[name]
        if found.dtype != parameter.dtype or tuple(found.shape) != tuple(parameter.shape):
            raise Refusal(
                Reason.WRONG_LAYOUT,
                f"snapshot has {name} as {found.dtype} {tuple(found.shape)}, "
                f"the model as {parameter.dtype} {tuple(parameter.shape)}",
            )


def of_parent(own: SnapshotManifest, start: StartingState) -> SnapshotManifest:
    """The parent run's manifest of the pieces that the fork's own manifest of step 0 names."""
    return replace(own, run_id=start.run_id, step=start.step, entry_hash=start.entry_hash)


def of_fork(manifest: SnapshotManifest, run_id: bytes) -> SnapshotManifest:
    """The fork's own manifest of step 0, from the parent run's."""
    return replace(manifest, run_id=run_id, step=0, entry_hash=run_id)


def is_start(own: SnapshotManifest, start: StartingState) -> bool:
    """Whether this manifest of step 0 names the pieces that the genesis names."""
    return of_parent(own, start).root == start.root and own.total_bytes == start.total_bytes


def check_start(manifest: SnapshotManifest, start: StartingState, layout_digest: bytes) -> None:
    """Raises Refusal unless this is the manifest of the parent run that the genesis names, in this run's layout."""
    if manifest.root != start.root or (manifest.run_id, manifest.step) != (start.run_id, start.step):
        raise Refusal(Reason.HASH_MISMATCH, f"the starting state is not that of {start}")
    if manifest.entry_hash != start.entry_hash or manifest.total_bytes != start.total_bytes:
        raise Refusal(Reason.HASH_MISMATCH, "the starting state has another size or entry than the genesis says")
    if manifest.layout_digest != layout_digest:
        raise Refusal(Reason.WRONG_LAYOUT, "the starting state has another parameter layout than this run's model")
