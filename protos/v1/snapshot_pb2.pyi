from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotManifest(_message.Message):
    __slots__ = ("run_id", "step", "entry_hash", "layout_digest", "total_bytes", "piece_bytes", "piece_hashes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENTRY_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_HASHES_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    step: int
    entry_hash: bytes
    layout_digest: bytes
    total_bytes: int
    piece_bytes: int
    piece_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run_id: _Optional[bytes] = ..., step: _Optional[int] = ..., entry_hash: _Optional[bytes] = ..., layout_digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., piece_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...
