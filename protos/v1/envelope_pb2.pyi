from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_ANNOUNCEMENT: _ClassVar[Kind]
    KIND_LOG_ENTRY: _ClassVar[Kind]
    KIND_TICK: _ClassVar[Kind]
    KIND_JOIN: _ClassVar[Kind]
    KIND_FOLLOW: _ClassVar[Kind]
    KIND_REPORT: _ClassVar[Kind]
    KIND_PEER_RECORD: _ClassVar[Kind]
    KIND_ADMIN: _ClassVar[Kind]
    KIND_TICKET: _ClassVar[Kind]
    KIND_RUN_END: _ClassVar[Kind]
    KIND_EVALUATION: _ClassVar[Kind]
    KIND_LISTED_RUN: _ClassVar[Kind]
    KIND_ORDER: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
KIND_ANNOUNCEMENT: Kind
KIND_LOG_ENTRY: Kind
KIND_TICK: Kind
KIND_JOIN: Kind
KIND_FOLLOW: Kind
KIND_REPORT: Kind
KIND_PEER_RECORD: Kind
KIND_ADMIN: Kind
KIND_TICKET: Kind
KIND_RUN_END: Kind
KIND_EVALUATION: Kind
KIND_LISTED_RUN: Kind
KIND_ORDER: Kind

class SignedEnvelope(_message.Message):
    __slots__ = ("kind", "run_id", "public_key", "body", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    run_id: bytes
    public_key: bytes
    body: bytes
    signature: bytes
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., run_id: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
