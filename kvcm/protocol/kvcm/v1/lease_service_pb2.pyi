from kvcm.protocol import meta_service_pb2 as _meta_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RenewReadLeaseRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "read_lease_id", "read_lease_ms")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    read_lease_id: str
    read_lease_ms: int
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., read_lease_id: _Optional[str] = ..., read_lease_ms: _Optional[int] = ...) -> None: ...

class RenewReadLeaseResponse(_message.Message):
    __slots__ = ("header", "read_lease_deadline_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    read_lease_deadline_ms: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., read_lease_deadline_ms: _Optional[int] = ...) -> None: ...

class ReleaseReadLeaseRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "read_lease_id", "more_read_lease_ids")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MORE_READ_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    read_lease_id: str
    more_read_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., read_lease_id: _Optional[str] = ..., more_read_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewWriteSessionRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "write_session_id", "write_timeout_seconds")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    write_session_id: str
    write_timeout_seconds: int
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., write_session_id: _Optional[str] = ..., write_timeout_seconds: _Optional[int] = ...) -> None: ...

class RenewWriteSessionResponse(_message.Message):
    __slots__ = ("header", "write_session_deadline_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WRITE_SESSION_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    write_session_deadline_ms: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., write_session_deadline_ms: _Optional[int] = ...) -> None: ...
