from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ArchivedPayload(_message.Message):
    __slots__ = ("payload_sha256", "payload_zstd", "announcement", "payload")
    PAYLOAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ZSTD_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload_sha256: bytes
    payload_zstd: bytes
    announcement: bytes
    payload: bytes
    def __init__(self, payload_sha256: _Optional[bytes] = ..., payload_zstd: _Optional[bytes] = ..., announcement: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
