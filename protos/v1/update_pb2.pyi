from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class UpdatePayload(_message.Message):
    __slots__ = ("run_id", "step", "layout_digest", "size", "votes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    step: int
    layout_digest: bytes
    size: int
    votes: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., step: _Optional[int] = ..., layout_digest: _Optional[bytes] = ..., size: _Optional[int] = ..., votes: _Optional[bytes] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("step", "parent_hash", "payload_sha256", "payload_bytes", "samples", "tokens", "loss", "compute_ms")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    step: int
    parent_hash: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    compute_ms: int
    def __init__(self, step: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., payload_sha256: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., compute_ms: _Optional[int] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("addresses", "sequence")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    sequence: int
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., sequence: _Optional[int] = ...) -> None: ...

class BlobRequest(_message.Message):
    __slots__ = ("sha256", "offset", "previous_ms")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MS_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    previous_ms: int
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., previous_ms: _Optional[int] = ...) -> None: ...

class BlobResponse(_message.Message):
    __slots__ = ("found", "total_bytes", "remaining_bytes")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    found: bool
    total_bytes: int
    remaining_bytes: int
    def __init__(self, found: _Optional[bool] = ..., total_bytes: _Optional[int] = ..., remaining_bytes: _Optional[int] = ...) -> None: ...
