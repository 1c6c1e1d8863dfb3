from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SampleRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("public_key", "payload_sha256", "payload_bytes", "samples", "tokens", "loss")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    def __init__(self, public_key: _Optional[bytes] = ..., payload_sha256: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("step", "parent_hash", "contributions", "lr_bits", "parent_state_digest", "returned_samples", "next_sample")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LR_BITS_FIELD_NUMBER: _ClassVar[int]
    PARENT_STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RETURNED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    step: int
    parent_hash: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    lr_bits: int
    parent_state_digest: bytes
    returned_samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    next_sample: int
    def __init__(self, step: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., lr_bits: _Optional[int] = ..., parent_state_digest: _Optional[bytes] = ..., returned_samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., next_sample: _Optional[int] = ...) -> None: ...

class RosterMember(_message.Message):
    __slots__ = ("public_key", "samples")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    samples: int
    def __init__(self, public_key: _Optional[bytes] = ..., samples: _Optional[int] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ("step", "parent_hash", "attempt", "roster", "pool", "lr_bits")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LR_BITS_FIELD_NUMBER: _ClassVar[int]
    step: int
    parent_hash: bytes
    attempt: int
    roster: _containers.RepeatedCompositeFieldContainer[RosterMember]
    pool: _containers.RepeatedCompositeFieldContainer[SampleRange]
    lr_bits: int
    def __init__(self, step: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., attempt: _Optional[int] = ..., roster: _Optional[_Iterable[_Union[RosterMember, _Mapping]]] = ..., pool: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., lr_bits: _Optional[int] = ...) -> None: ...

class Genesis(_message.Message):
    __slots__ = ("format_version", "config_json", "coordinator_public_key", "nonce")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    config_json: str
    coordinator_public_key: bytes
    nonce: bytes
    def __init__(self, format_version: _Optional[int] = ..., config_json: _Optional[str] = ..., coordinator_public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "coordinators", "coordinator_public_key", "certificate_sha256", "bootstrap", "run_name")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    coordinator_public_key: bytes
    certificate_sha256: bytes
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    run_name: str
    def __init__(self, run_id: _Optional[bytes] = ..., coordinators: _Optional[_Iterable[str]] = ..., coordinator_public_key: _Optional[bytes] = ..., certificate_sha256: _Optional[bytes] = ..., bootstrap: _Optional[_Iterable[str]] = ..., run_name: _Optional[str] = ...) -> None: ...
