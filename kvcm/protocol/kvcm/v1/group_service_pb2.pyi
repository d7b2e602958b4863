from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListInstanceGroupResponse(_message.Message):
    __slots__ = ("header", "instance_groups")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    instance_groups: _containers.RepeatedCompositeFieldContainer[_admin_service_pb2.InstanceGroup]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., instance_groups: _Optional[_Iterable[_Union[_admin_service_pb2.InstanceGroup, _Mapping]]] = ...) -> None: ...
