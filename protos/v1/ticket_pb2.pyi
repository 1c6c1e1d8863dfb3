from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "expires_unix_ms", "uses", "label", "anchor")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    expires_unix_ms: int
    uses: int
    label: str
    anchor: bool
    def __init__(self, ticket_id: _Optional[bytes] = ..., expires_unix_ms: _Optional[int] = ..., uses: _Optional[int] = ..., label: _Optional[str] = ..., anchor: _Optional[bool] = ...) -> None: ...
