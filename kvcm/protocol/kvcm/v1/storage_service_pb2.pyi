from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_UNSPECIFIED: _ClassVar[DrainState]
    DRAIN_RUNNING: _ClassVar[DrainState]
    DRAIN_DONE: _ClassVar[DrainState]
DRAIN_UNSPECIFIED: DrainState
DRAIN_RUNNING: DrainState
DRAIN_DONE: DrainState

class DrainStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ...) -> None: ...

class CancelDrainRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ...) -> None: ...

class ListDrainRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListDrainResponse(_message.Message):
    __slots__ = ("header", "drains")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    drains: _containers.RepeatedCompositeFieldContainer[Drain]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., drains: _Optional[_Iterable[_Union[Drain, _Mapping]]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("storage_unique_name", "is_removal", "state", "started_ms", "left_bytes", "reason")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_REMOVAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    is_removal: bool
    state: DrainState
    started_ms: int
    left_bytes: int
    reason: str
    def __init__(self, storage_unique_name: _Optional[str] = ..., is_removal: _Optional[bool] = ..., state: _Optional[_Union[DrainState, str]] = ..., started_ms: _Optional[int] = ..., left_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
