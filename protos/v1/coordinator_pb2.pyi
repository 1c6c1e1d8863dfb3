from protos.v1 import envelope_pb2 as _envelope_pb2
from protos.v1 import log_pb2 as _log_pb2
from protos.v1 import ticket_pb2 as _ticket_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_WAITING: _ClassVar[Phase]
    PHASE_OPEN: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]

class PeerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_PHASE_UNSPECIFIED: _ClassVar[PeerPhase]
    PEER_PHASE_SYNCING: _ClassVar[PeerPhase]
    PEER_PHASE_READY: _ClassVar[PeerPhase]
    PEER_PHASE_ABSENT: _ClassVar[PeerPhase]

class JoinFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOIN_FAILURE_UNSPECIFIED: _ClassVar[JoinFailure]
    JOIN_FAILURE_VERSION: _ClassVar[JoinFailure]
    JOIN_FAILURE_DEVICE: _ClassVar[JoinFailure]
    JOIN_FAILURE_MEMORY: _ClassVar[JoinFailure]
    JOIN_FAILURE_TOKENIZER: _ClassVar[JoinFailure]
    JOIN_FAILURE_DATA: _ClassVar[JoinFailure]
    JOIN_FAILURE_MODEL: _ClassVar[JoinFailure]
    JOIN_FAILURE_STATE: _ClassVar[JoinFailure]
    JOIN_FAILURE_REFUSED: _ClassVar[JoinFailure]
    JOIN_FAILURE_OTHER: _ClassVar[JoinFailure]

class NoticeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTICE_KIND_UNSPECIFIED: _ClassVar[NoticeKind]
    NOTICE_KIND_SNAPSHOT: _ClassVar[NoticeKind]
    NOTICE_KIND_RESYNC: _ClassVar[NoticeKind]
    NOTICE_KIND_FINISHED: _ClassVar[NoticeKind]
    NOTICE_KIND_WAITING: _ClassVar[NoticeKind]
    NOTICE_KIND_VOTE: _ClassVar[NoticeKind]
    NOTICE_KIND_DOUBTED: _ClassVar[NoticeKind]

class RunChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_CHANGE_UNSPECIFIED: _ClassVar[RunChange]
    RUN_CHANGE_PAUSE: _ClassVar[RunChange]
    RUN_CHANGE_RESUME: _ClassVar[RunChange]
    RUN_CHANGE_FINISH: _ClassVar[RunChange]
    RUN_CHANGE_ARCHIVE: _ClassVar[RunChange]
    RUN_CHANGE_UNARCHIVE: _ClassVar[RunChange]
    RUN_CHANGE_DELETE: _ClassVar[RunChange]
    RUN_CHANGE_DECAY: _ClassVar[RunChange]
    RUN_CHANGE_SETTINGS: _ClassVar[RunChange]
PHASE_UNSPECIFIED: Phase
PHASE_WAITING: Phase
PHASE_OPEN: Phase
PHASE_FINISHED: Phase
PEER_PHASE_UNSPECIFIED: PeerPhase
PEER_PHASE_SYNCING: PeerPhase
PEER_PHASE_READY: PeerPhase
PEER_PHASE_ABSENT: PeerPhase
JOIN_FAILURE_UNSPECIFIED: JoinFailure
JOIN_FAILURE_VERSION: JoinFailure
JOIN_FAILURE_DEVICE: JoinFailure
JOIN_FAILURE_MEMORY: JoinFailure
JOIN_FAILURE_TOKENIZER: JoinFailure
JOIN_FAILURE_DATA: JoinFailure
JOIN_FAILURE_MODEL: JoinFailure
JOIN_FAILURE_STATE: JoinFailure
JOIN_FAILURE_REFUSED: JoinFailure
JOIN_FAILURE_OTHER: JoinFailure
NOTICE_KIND_UNSPECIFIED: NoticeKind
NOTICE_KIND_SNAPSHOT: NoticeKind
NOTICE_KIND_RESYNC: NoticeKind
NOTICE_KIND_FINISHED: NoticeKind
NOTICE_KIND_WAITING: NoticeKind
NOTICE_KIND_VOTE: NoticeKind
NOTICE_KIND_DOUBTED: NoticeKind
RUN_CHANGE_UNSPECIFIED: RunChange
RUN_CHANGE_PAUSE: RunChange
RUN_CHANGE_RESUME: RunChange
RUN_CHANGE_FINISH: RunChange
RUN_CHANGE_ARCHIVE: RunChange
RUN_CHANGE_UNARCHIVE: RunChange
RUN_CHANGE_DELETE: RunChange
RUN_CHANGE_DECAY: RunChange
RUN_CHANGE_SETTINGS: RunChange

class GetRunRequest(_message.Message):
    __slots__ = ("run_id", "bootstrap_only")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_ONLY_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    bootstrap_only: bool
    def __init__(self, run_id: _Optional[bytes] = ..., bootstrap_only: _Optional[bool] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("genesis", "phase", "head_step", "head_hash", "total_steps", "snapshot", "peers", "bootstrap", "loss", "reason", "payload_bytes_total", "exclusions", "earlier", "withdrawn", "anchored", "parameters", "paused", "end", "archived", "in_line", "changed", "evaluations", "failures", "unconfirmed_steps", "unix_ms")
    GENESIS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HEAD_STEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIONS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    ANCHORED_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ARCHIVED_FIELD_NUMBER: _ClassVar[int]
    IN_LINE_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_STEPS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    genesis: _log_pb2.Genesis
    phase: Phase
    head_step: int
    head_hash: bytes
    total_steps: int
    snapshot: SnapshotRef
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    loss: float
    reason: str
    payload_bytes_total: int
    exclusions: _containers.RepeatedCompositeFieldContainer[ExcludedPeer]
    earlier: _containers.RepeatedCompositeFieldContainer[SnapshotRef]
    withdrawn: _containers.RepeatedCompositeFieldContainer[Withdrawn]
    anchored: bool
    parameters: int
    paused: bool
    end: _envelope_pb2.SignedEnvelope
    archived: bool
    in_line: int
    changed: _containers.RepeatedCompositeFieldContainer[ChangedSetting]
    evaluations: _containers.RepeatedScalarFieldContainer[bytes]
    failures: _containers.RepeatedCompositeFieldContainer[JoinFailures]
    unconfirmed_steps: int
    unix_ms: int
    def __init__(self, genesis: _Optional[_Union[_log_pb2.Genesis, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., head_step: _Optional[int] = ..., head_hash: _Optional[bytes] = ..., total_steps: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotRef, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., bootstrap: _Optional[_Iterable[str]] = ..., loss: _Optional[float] = ..., reason: _Optional[str] = ..., payload_bytes_total: _Optional[int] = ..., exclusions: _Optional[_Iterable[_Union[ExcludedPeer, _Mapping]]] = ..., earlier: _Optional[_Iterable[_Union[SnapshotRef, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[_Union[Withdrawn, _Mapping]]] = ..., anchored: _Optional[bool] = ..., parameters: _Optional[int] = ..., paused: _Optional[bool] = ..., end: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., archived: _Optional[bool] = ..., in_line: _Optional[int] = ..., changed: _Optional[_Iterable[_Union[ChangedSetting, _Mapping]]] = ..., evaluations: _Optional[_Iterable[bytes]] = ..., failures: _Optional[_Iterable[_Union[JoinFailures, _Mapping]]] = ..., unconfirmed_steps: _Optional[int] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class ListedRun(_message.Message):
    __slots__ = ("invite", "facts", "peers")
    INVITE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    invite: str
    facts: GetRunResponse
    peers: int
    def __init__(self, invite: _Optional[str] = ..., facts: _Optional[_Union[GetRunResponse, _Mapping]] = ..., peers: _Optional[int] = ...) -> None: ...

class ChangedSetting(_message.Message):
    __slots__ = ("setting", "from_step")
    SETTING_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    setting: _log_pb2.Setting
    from_step: int
    def __init__(self, setting: _Optional[_Union[_log_pb2.Setting, _Mapping]] = ..., from_step: _Optional[int] = ...) -> None: ...

class Withdrawn(_message.Message):
    __slots__ = ("from_step", "to_step")
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    to_step: int
    def __init__(self, from_step: _Optional[int] = ..., to_step: _Optional[int] = ...) -> None: ...

class ExcludedPeer(_message.Message):
    __slots__ = ("public_key", "step", "reason", "proven", "by_operator")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    step: int
    reason: str
    proven: bool
    by_operator: bool
    def __init__(self, public_key: _Optional[bytes] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ..., proven: _Optional[bool] = ..., by_operator: _Optional[bool] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("public_key", "phase", "device", "applied_step", "state_digest", "votes_accepted", "samples_per_second", "loss", "score", "check_permille", "standing", "standing_reason", "anchor", "paused", "software_version", "owner", "relayed")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOTES_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CHECK_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    STANDING_REASON_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    phase: PeerPhase
    device: str
    applied_step: int
    state_digest: bytes
    votes_accepted: int
    samples_per_second: float
    loss: float
    score: float
    check_permille: int
    standing: str
    standing_reason: str
    anchor: bool
    paused: bool
    software_version: str
    owner: Owner
    relayed: bool
    def __init__(self, public_key: _Optional[bytes] = ..., phase: _Optional[_Union[PeerPhase, str]] = ..., device: _Optional[str] = ..., applied_step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., votes_accepted: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., loss: _Optional[float] = ..., score: _Optional[float] = ..., check_permille: _Optional[int] = ..., standing: _Optional[str] = ..., standing_reason: _Optional[str] = ..., anchor: _Optional[bool] = ..., paused: _Optional[bool] = ..., software_version: _Optional[str] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., relayed: _Optional[bool] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("name", "public_key", "signature")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    public_key: bytes
    signature: bytes
    def __init__(self, name: _Optional[str] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SnapshotRef(_message.Message):
    __slots__ = ("step", "root", "total_bytes", "holders", "not_kept")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    step: int
    root: bytes
    total_bytes: int
    holders: _containers.RepeatedScalarFieldContainer[bytes]
    not_kept: bool
    def __init__(self, step: _Optional[int] = ..., root: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., holders: _Optional[_Iterable[bytes]] = ..., not_kept: _Optional[bool] = ...) -> None: ...

class TellFailureRequest(_message.Message):
    __slots__ = ("run_id", "reason", "software_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    reason: JoinFailure
    software_version: str
    def __init__(self, run_id: _Optional[bytes] = ..., reason: _Optional[_Union[JoinFailure, str]] = ..., software_version: _Optional[str] = ...) -> None: ...

class TellFailureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinFailures(_message.Message):
    __slots__ = ("reason", "software_version", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: JoinFailure
    software_version: str
    count: int
    def __init__(self, reason: _Optional[_Union[JoinFailure, str]] = ..., software_version: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetChallengeRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    def __init__(self, run_id: _Optional[bytes] = ...) -> None: ...

class GetChallengeResponse(_message.Message):
    __slots__ = ("challenge", "seen_from")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FROM_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    seen_from: str
    def __init__(self, challenge: _Optional[bytes] = ..., seen_from: _Optional[str] = ...) -> None: ...

class MayJoinRequest(_message.Message):
    __slots__ = ("envelope", "waits")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    waits: bool
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., waits: _Optional[bool] = ...) -> None: ...

class MayJoinResponse(_message.Message):
    __slots__ = ("place", "length", "reason")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    place: int
    length: int
    reason: str
    def __init__(self, place: _Optional[int] = ..., length: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class JoinBody(_message.Message):
    __slots__ = ("challenge", "layout_digest", "parameters", "device", "addresses", "software_version", "ticket", "anchor", "format_version", "owner", "process")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    layout_digest: bytes
    parameters: int
    device: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    software_version: str
    ticket: bytes
    anchor: bool
    format_version: int
    owner: Owner
    process: bytes
    def __init__(self, challenge: _Optional[bytes] = ..., layout_digest: _Optional[bytes] = ..., parameters: _Optional[int] = ..., device: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., software_version: _Optional[str] = ..., ticket: _Optional[bytes] = ..., anchor: _Optional[bool] = ..., format_version: _Optional[int] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., process: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("session_id", "head_step", "head_hash", "snapshot", "bootstrap", "earlier", "withdrawn", "settings", "used_twice")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_STEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    USED_TWICE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    head_step: int
    head_hash: bytes
    snapshot: SnapshotRef
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    earlier: _containers.RepeatedCompositeFieldContainer[SnapshotRef]
    withdrawn: _containers.RepeatedCompositeFieldContainer[Withdrawn]
    settings: _containers.RepeatedCompositeFieldContainer[_log_pb2.Setting]
    used_twice: str
    def __init__(self, session_id: _Optional[bytes] = ..., head_step: _Optional[int] = ..., head_hash: _Optional[bytes] = ..., snapshot: _Optional[_Union[SnapshotRef, _Mapping]] = ..., bootstrap: _Optional[_Iterable[str]] = ..., earlier: _Optional[_Iterable[_Union[SnapshotRef, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[_Union[Withdrawn, _Mapping]]] = ..., settings: _Optional[_Iterable[_Union[_log_pb2.Setting, _Mapping]]] = ..., used_twice: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class FollowBody(_message.Message):
    __slots__ = ("session_id", "from_step", "sequence", "unpacks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNPACKS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    from_step: int
    sequence: int
    unpacks: bool
    def __init__(self, session_id: _Optional[bytes] = ..., from_step: _Optional[int] = ..., sequence: _Optional[int] = ..., unpacks: _Optional[bool] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("tick", "entry", "notice", "announcement", "decided", "decided_zstd", "sum")
    TICK_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    DECIDED_ZSTD_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    tick: TickEvent
    entry: _envelope_pb2.SignedEnvelope
    notice: Notice
    announcement: _envelope_pb2.SignedEnvelope
    decided: Decided
    decided_zstd: bytes
    sum: SumRequest
    def __init__(self, tick: _Optional[_Union[TickEvent, _Mapping]] = ..., entry: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., announcement: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., decided: _Optional[_Union[Decided, _Mapping]] = ..., decided_zstd: _Optional[bytes] = ..., sum: _Optional[_Union[SumRequest, _Mapping]] = ...) -> None: ...

class SumRequest(_message.Message):
    __slots__ = ("step", "attempt", "contributions")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    contributions: _containers.RepeatedCompositeFieldContainer[_log_pb2.Contribution]
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[_log_pb2.Contribution, _Mapping]]] = ...) -> None: ...

class Summed(_message.Message):
    __slots__ = ("step", "attempt", "payloads_sha256", "aggregate")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_SHA256_FIELD_NUMBER: _ClassVar[int]
    AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    payloads_sha256: bytes
    aggregate: _log_pb2.Aggregate
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., payloads_sha256: _Optional[bytes] = ..., aggregate: _Optional[_Union[_log_pb2.Aggregate, _Mapping]] = ...) -> None: ...

class Decided(_message.Message):
    __slots__ = ("entry", "tick")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    entry: _envelope_pb2.SignedEnvelope
    tick: TickEvent
    def __init__(self, entry: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., tick: _Optional[_Union[TickEvent, _Mapping]] = ...) -> None: ...

class TickEvent(_message.Message):
    __slots__ = ("envelope", "deadline_ms", "aggregators")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    AGGREGATORS_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    deadline_ms: int
    aggregators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., aggregators: _Optional[_Iterable[str]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "reason", "snapshot", "step", "withdrawn", "range", "end")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    kind: NoticeKind
    reason: str
    snapshot: SnapshotRef
    step: int
    withdrawn: _containers.RepeatedCompositeFieldContainer[Withdrawn]
    range: int
    end: _envelope_pb2.SignedEnvelope
    def __init__(self, kind: _Optional[_Union[NoticeKind, str]] = ..., reason: _Optional[str] = ..., snapshot: _Optional[_Union[SnapshotRef, _Mapping]] = ..., step: _Optional[int] = ..., withdrawn: _Optional[_Iterable[_Union[Withdrawn, _Mapping]]] = ..., range: _Optional[int] = ..., end: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class OfferEntriesRequest(_message.Message):
    __slots__ = ("envelope", "entries", "newest")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    entries: _containers.RepeatedCompositeFieldContainer[_envelope_pb2.SignedEnvelope]
    newest: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[_envelope_pb2.SignedEnvelope, _Mapping]]] = ..., newest: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class OfferEntriesResponse(_message.Message):
    __slots__ = ("head_step",)
    HEAD_STEP_FIELD_NUMBER: _ClassVar[int]
    head_step: int
    def __init__(self, head_step: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ReportBody(_message.Message):
    __slots__ = ("session_id", "sequence", "announcement", "holdings", "applied", "snapshots", "leaving", "addresses", "verdicts", "equivocations", "abstained", "bad_snapshots", "held", "paused", "quiet", "summed", "false_sums", "owner", "evaluations")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    EQUIVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    ABSTAINED_FIELD_NUMBER: _ClassVar[int]
    BAD_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    FALSE_SUMS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    sequence: int
    announcement: _envelope_pb2.SignedEnvelope
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    applied: _containers.RepeatedCompositeFieldContainer[AppliedState]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotRef]
    leaving: bool
    addresses: _containers.RepeatedScalarFieldContainer[str]
    verdicts: _containers.RepeatedCompositeFieldContainer[_log_pb2.Verdict]
    equivocations: _containers.RepeatedCompositeFieldContainer[_log_pb2.Equivocation]
    abstained: Abstention
    bad_snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotRef]
    held: HeldPlaces
    paused: bool
    quiet: bool
    summed: Summed
    false_sums: _containers.RepeatedCompositeFieldContainer[FalseSum]
    owner: Owner
    evaluations: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., announcement: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., applied: _Optional[_Iterable[_Union[AppliedState, _Mapping]]] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotRef, _Mapping]]] = ..., leaving: _Optional[bool] = ..., addresses: _Optional[_Iterable[str]] = ..., verdicts: _Optional[_Iterable[_Union[_log_pb2.Verdict, _Mapping]]] = ..., equivocations: _Optional[_Iterable[_Union[_log_pb2.Equivocation, _Mapping]]] = ..., abstained: _Optional[_Union[Abstention, _Mapping]] = ..., bad_snapshots: _Optional[_Iterable[_Union[SnapshotRef, _Mapping]]] = ..., held: _Optional[_Union[HeldPlaces, _Mapping]] = ..., paused: _Optional[bool] = ..., quiet: _Optional[bool] = ..., summed: _Optional[_Union[Summed, _Mapping]] = ..., false_sums: _Optional[_Iterable[_Union[FalseSum, _Mapping]]] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., evaluations: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FalseSum(_message.Message):
    __slots__ = ("step", "range")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    range: int
    def __init__(self, step: _Optional[int] = ..., range: _Optional[int] = ...) -> None: ...

class HeldPlaces(_message.Message):
    __slots__ = ("step", "attempt", "places", "payloads_sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    places: bytes
    payloads_sha256: bytes
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., places: _Optional[bytes] = ..., payloads_sha256: _Optional[bytes] = ...) -> None: ...

class Abstention(_message.Message):
    __slots__ = ("step", "reason", "not_finite", "lost")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    step: int
    reason: str
    not_finite: bool
    lost: bool
    def __init__(self, step: _Optional[int] = ..., reason: _Optional[str] = ..., not_finite: _Optional[bool] = ..., lost: _Optional[bool] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("step", "public_key", "payload_sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    public_key: bytes
    payload_sha256: bytes
    def __init__(self, step: _Optional[int] = ..., public_key: _Optional[bytes] = ..., payload_sha256: _Optional[bytes] = ...) -> None: ...

class AppliedState(_message.Message):
    __slots__ = ("step", "state_digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    state_digest: bytes
    def __init__(self, step: _Optional[int] = ..., state_digest: _Optional[bytes] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("refusals", "announcement_taken", "coordinators", "unclear", "sequence")
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_TAKEN_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    UNCLEAR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    refusals: _containers.RepeatedScalarFieldContainer[str]
    announcement_taken: bool
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    unclear: bytes
    sequence: int
    def __init__(self, refusals: _Optional[_Iterable[str]] = ..., announcement_taken: _Optional[bool] = ..., coordinators: _Optional[_Iterable[str]] = ..., unclear: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class ListEntriesRequest(_message.Message):
    __slots__ = ("run_id", "from_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    from_step: int
    def __init__(self, run_id: _Optional[bytes] = ..., from_step: _Optional[int] = ...) -> None: ...

class ListEntriesResponse(_message.Message):
    __slots__ = ("entries", "head_step")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HEAD_STEP_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_envelope_pb2.SignedEnvelope]
    head_step: int
    def __init__(self, entries: _Optional[_Iterable[_Union[_envelope_pb2.SignedEnvelope, _Mapping]]] = ..., head_step: _Optional[int] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class CreateRunBody(_message.Message):
    __slots__ = ("config_json", "nonce", "layout_digest", "parameters", "start")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    nonce: bytes
    layout_digest: bytes
    parameters: int
    start: _log_pb2.StartingState
    def __init__(self, config_json: _Optional[str] = ..., nonce: _Optional[bytes] = ..., layout_digest: _Optional[bytes] = ..., parameters: _Optional[int] = ..., start: _Optional[_Union[_log_pb2.StartingState, _Mapping]] = ...) -> None: ...

class CreateRunResponse(_message.Message):
    __slots__ = ("genesis",)
    GENESIS_FIELD_NUMBER: _ClassVar[int]
    genesis: _log_pb2.Genesis
    def __init__(self, genesis: _Optional[_Union[_log_pb2.Genesis, _Mapping]] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ListRunsBody(_message.Message):
    __slots__ = ("nonce", "archived")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ARCHIVED_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    archived: bool
    def __init__(self, nonce: _Optional[bytes] = ..., archived: _Optional[bool] = ...) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[GetRunResponse]
    def __init__(self, runs: _Optional[_Iterable[_Union[GetRunResponse, _Mapping]]] = ...) -> None: ...

class CreateTicketRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class CreateTicketBody(_message.Message):
    __slots__ = ("run_id", "nonce", "expires_in_ms", "uses", "label", "anchor")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    expires_in_ms: int
    uses: int
    label: str
    anchor: bool
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., expires_in_ms: _Optional[int] = ..., uses: _Optional[int] = ..., label: _Optional[str] = ..., anchor: _Optional[bool] = ...) -> None: ...

class CreateTicketResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ...) -> None: ...

class ListTicketsRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ListTicketsBody(_message.Message):
    __slots__ = ("run_id", "nonce")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class TicketStatus(_message.Message):
    __slots__ = ("ticket", "users", "state")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ticket: _ticket_pb2.Ticket
    users: _containers.RepeatedScalarFieldContainer[bytes]
    state: str
    def __init__(self, ticket: _Optional[_Union[_ticket_pb2.Ticket, _Mapping]] = ..., users: _Optional[_Iterable[bytes]] = ..., state: _Optional[str] = ...) -> None: ...

class ListTicketsResponse(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedCompositeFieldContainer[TicketStatus]
    def __init__(self, tickets: _Optional[_Iterable[_Union[TicketStatus, _Mapping]]] = ...) -> None: ...

class RevokeTicketRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class RevokeTicketBody(_message.Message):
    __slots__ = ("run_id", "nonce", "ticket_id", "with_peers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_PEERS_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    ticket_id: bytes
    with_peers: bool
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., ticket_id: _Optional[bytes] = ..., with_peers: _Optional[bool] = ...) -> None: ...

class RevokeTicketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExcludePeerRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ExcludePeerBody(_message.Message):
    __slots__ = ("run_id", "nonce", "public_key", "reason")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    public_key: bytes
    reason: str
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class ExcludePeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadmitPeerRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ReadmitPeerBody(_message.Message):
    __slots__ = ("run_id", "nonce", "public_key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    public_key: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class ReadmitPeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawSnapshotRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class WithdrawSnapshotBody(_message.Message):
    __slots__ = ("run_id", "nonce", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    step: int
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., step: _Optional[int] = ...) -> None: ...

class WithdrawSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListStatesRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ListStatesBody(_message.Message):
    __slots__ = ("run_id", "nonce")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ListStatesResponse(_message.Message):
    __slots__ = ("states", "layout_digest", "parameters")
    STATES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[_log_pb2.StartingState]
    layout_digest: bytes
    parameters: int
    def __init__(self, states: _Optional[_Iterable[_Union[_log_pb2.StartingState, _Mapping]]] = ..., layout_digest: _Optional[bytes] = ..., parameters: _Optional[int] = ...) -> None: ...

class SteerRunRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class SteerRunBody(_message.Message):
    __slots__ = ("run_id", "nonce", "change", "reason", "steps", "settings")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    change: RunChange
    reason: str
    steps: int
    settings: _containers.RepeatedCompositeFieldContainer[_log_pb2.Setting]
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., change: _Optional[_Union[RunChange, str]] = ..., reason: _Optional[str] = ..., steps: _Optional[int] = ..., settings: _Optional[_Iterable[_Union[_log_pb2.Setting, _Mapping]]] = ...) -> None: ...

class SteerRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SignOrderRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class SignOrderResponse(_message.Message):
    __slots__ = ("order", "obeyed")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    OBEYED_FIELD_NUMBER: _ClassVar[int]
    order: _log_pb2.SignedOrder
    obeyed: bool
    def __init__(self, order: _Optional[_Union[_log_pb2.SignedOrder, _Mapping]] = ..., obeyed: _Optional[bool] = ...) -> None: ...

class ListOrdersRequest(_message.Message):
    __slots__ = ("envelope",)
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    envelope: _envelope_pb2.SignedEnvelope
    def __init__(self, envelope: _Optional[_Union[_envelope_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class ListOrdersBody(_message.Message):
    __slots__ = ("run_id", "nonce")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    run_id: bytes
    nonce: bytes
    def __init__(self, run_id: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ListOrdersResponse(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: _containers.RepeatedCompositeFieldContainer[_log_pb2.SignedOrder]
    def __init__(self, orders: _Optional[_Iterable[_Union[_log_pb2.SignedOrder, _Mapping]]] = ...) -> None: ...
