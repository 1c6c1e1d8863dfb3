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
    __slots__ = ("public_key", "payload_sha256", "payload_bytes", "samples", "tokens", "loss", "check_permille", "arrival")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    CHECK_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    payload_sha256: bytes
    payload_bytes: int
    samples: int
    tokens: int
    loss: float
    check_permille: int
    arrival: int
    def __init__(self, public_key: _Optional[bytes] = ..., payload_sha256: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., check_permille: _Optional[int] = ..., arrival: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("step", "checker", "subject", "payload_sha256", "own", "difference", "overlap", "like", "own_gain", "other_gain")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKER_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    LIKE_FIELD_NUMBER: _ClassVar[int]
    OWN_GAIN_FIELD_NUMBER: _ClassVar[int]
    OTHER_GAIN_FIELD_NUMBER: _ClassVar[int]
    step: int
    checker: bytes
    subject: bytes
    payload_sha256: bytes
    own: float
    difference: float
    overlap: float
    like: bytes
    own_gain: float
    other_gain: float
    def __init__(self, step: _Optional[int] = ..., checker: _Optional[bytes] = ..., subject: _Optional[bytes] = ..., payload_sha256: _Optional[bytes] = ..., own: _Optional[float] = ..., difference: _Optional[float] = ..., overlap: _Optional[float] = ..., like: _Optional[bytes] = ..., own_gain: _Optional[float] = ..., other_gain: _Optional[float] = ...) -> None: ...

class Equivocation(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: bytes
    second: bytes
    def __init__(self, first: _Optional[bytes] = ..., second: _Optional[bytes] = ...) -> None: ...

class Exclusion(_message.Message):
    __slots__ = ("public_key", "reason", "evidence", "equivocation", "by_operator")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    EQUIVOCATION_FIELD_NUMBER: _ClassVar[int]
    BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    reason: str
    evidence: _containers.RepeatedCompositeFieldContainer[Verdict]
    equivocation: Equivocation
    by_operator: bool
    def __init__(self, public_key: _Optional[bytes] = ..., reason: _Optional[str] = ..., evidence: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., equivocation: _Optional[_Union[Equivocation, _Mapping]] = ..., by_operator: _Optional[bool] = ...) -> None: ...

class Judged(_message.Message):
    __slots__ = ("verdicts", "arrival", "samples")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    arrival: _containers.RepeatedScalarFieldContainer[bytes]
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., arrival: _Optional[_Iterable[bytes]] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("step", "parent_hash", "contributions", "lr_bits", "parent_state_digest", "returned_samples", "next_sample", "trials", "exclusions", "readmitted", "settings", "evaluations", "aggregate", "orders")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LR_BITS_FIELD_NUMBER: _ClassVar[int]
    PARENT_STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RETURNED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIONS_FIELD_NUMBER: _ClassVar[int]
    READMITTED_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    parent_hash: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    lr_bits: int
    parent_state_digest: bytes
    returned_samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    next_sample: int
    trials: _containers.RepeatedCompositeFieldContainer[Contribution]
    exclusions: _containers.RepeatedCompositeFieldContainer[Exclusion]
    readmitted: _containers.RepeatedScalarFieldContainer[bytes]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    evaluations: _containers.RepeatedScalarFieldContainer[bytes]
    aggregate: Aggregate
    orders: _containers.RepeatedCompositeFieldContainer[SignedOrder]
    def __init__(self, step: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., lr_bits: _Optional[int] = ..., parent_state_digest: _Optional[bytes] = ..., returned_samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., next_sample: _Optional[int] = ..., trials: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., exclusions: _Optional[_Iterable[_Union[Exclusion, _Mapping]]] = ..., readmitted: _Optional[_Iterable[bytes]] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., evaluations: _Optional[_Iterable[bytes]] = ..., aggregate: _Optional[_Union[Aggregate, _Mapping]] = ..., orders: _Optional[_Iterable[_Union[SignedOrder, _Mapping]]] = ...) -> None: ...

class OrderBody(_message.Message):
    __slots__ = ("nonce", "expires_unix_ms", "reason", "excludes", "settings", "finishes")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXCLUDES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    expires_unix_ms: int
    reason: str
    excludes: bytes
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    finishes: bool
    def __init__(self, nonce: _Optional[bytes] = ..., expires_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ..., excludes: _Optional[bytes] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., finishes: _Optional[bool] = ...) -> None: ...

class SignedOrder(_message.Message):
    __slots__ = ("body", "signatures")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    signatures: _containers.RepeatedCompositeFieldContainer[OrderSignature]
    def __init__(self, body: _Optional[bytes] = ..., signatures: _Optional[_Iterable[_Union[OrderSignature, _Mapping]]] = ...) -> None: ...

class OrderSignature(_message.Message):
    __slots__ = ("public_key", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Aggregate(_message.Message):
    __slots__ = ("sha256", "total_bytes", "payloads_sha256", "slices")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    total_bytes: int
    payloads_sha256: bytes
    slices: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., payloads_sha256: _Optional[bytes] = ..., slices: _Optional[bytes] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("step", "loss", "tokens", "set_sha256", "device", "sample")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SET_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    tokens: int
    set_sha256: bytes
    device: str
    sample: str
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., set_sha256: _Optional[bytes] = ..., device: _Optional[str] = ..., sample: _Optional[str] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    value_json: str
    def __init__(self, key: _Optional[str] = ..., value_json: _Optional[str] = ...) -> None: ...

class RunEnd(_message.Message):
    __slots__ = ("step", "entry_hash", "reason", "order")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENTRY_HASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    step: int
    entry_hash: bytes
    reason: str
    order: SignedOrder
    def __init__(self, step: _Optional[int] = ..., entry_hash: _Optional[bytes] = ..., reason: _Optional[str] = ..., order: _Optional[_Union[SignedOrder, _Mapping]] = ...) -> None: ...

class RosterMember(_message.Message):
    __slots__ = ("public_key", "samples")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    samples: int
    def __init__(self, public_key: _Optional[bytes] = ..., samples: _Optional[int] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ("step", "parent_hash", "attempt", "roster", "pool", "lr_bits", "aggregators", "ranges")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LR_BITS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATORS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    parent_hash: bytes
    attempt: int
    roster: _containers.RepeatedCompositeFieldContainer[RosterMember]
    pool: _containers.RepeatedCompositeFieldContainer[SampleRange]
    lr_bits: int
    aggregators: _containers.RepeatedScalarFieldContainer[bytes]
    ranges: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, step: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., attempt: _Optional[int] = ..., roster: _Optional[_Iterable[_Union[RosterMember, _Mapping]]] = ..., pool: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., lr_bits: _Optional[int] = ..., aggregators: _Optional[_Iterable[bytes]] = ..., ranges: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Genesis(_message.Message):
    __slots__ = ("format_version", "config_json", "coordinator_public_key", "nonce", "layout_digest", "parameters", "start", "software_version_min")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    config_json: str
    coordinator_public_key: bytes
    nonce: bytes
    layout_digest: bytes
    parameters: int
    start: StartingState
    software_version_min: str
    def __init__(self, format_version: _Optional[int] = ..., config_json: _Optional[str] = ..., coordinator_public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., layout_digest: _Optional[bytes] = ..., parameters: _Optional[int] = ..., start: _Optional[_Union[StartingState, _Mapping]] = ..., software_version_min: _Optional[str] = ...) -> None: ...

class StartingState(_message.Message):
    __slots__ = ("run_id", "coordinator_public_key", "step", "entry_hash", "root", "total_bytes", "state_digest", "next_sample")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENTRY_HASH_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEXT_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    coordinator_public_key: bytes
    step: int
    entry_hash: bytes
    root: bytes
    total_bytes: int
    state_digest: bytes
    next_sample: int
    def __init__(self, run_id: _Optional[bytes] = ..., coordinator_public_key: _Optional[bytes] = ..., step: _Optional[int] = ..., entry_hash: _Optional[bytes] = ..., root: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., next_sample: _Optional[int] = ...) -> None: ...

class Invite(_message.Message):
    __slots__ = ("run_id", "coordinators", "coordinator_public_key", "certificate_sha256", "bootstrap", "run_name", "ticket")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    coordinator_public_key: bytes
    certificate_sha256: bytes
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    run_name: str
    ticket: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., coordinators: _Optional[_Iterable[str]] = ..., coordinator_public_key: _Optional[bytes] = ..., certificate_sha256: _Optional[bytes] = ..., bootstrap: _Optional[_Iterable[str]] = ..., run_name: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...
