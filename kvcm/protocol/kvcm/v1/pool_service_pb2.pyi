from kvcm.protocol import meta_service_pb2 as _meta_service_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportPoolRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name", "node_id", "generation", "capacity_bytes", "valid_ms")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALID_MS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    node_id: str
    generation: int
    capacity_bytes: int
    valid_ms: int
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ..., node_id: _Optional[str] = ..., generation: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., valid_ms: _Optional[int] = ...) -> None: ...

class ReportPoolResponse(_message.Message):
    __slots__ = ("header", "is_new_generation")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_GENERATION_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    is_new_generation: bool
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., is_new_generation: _Optional[bool] = ...) -> None: ...
