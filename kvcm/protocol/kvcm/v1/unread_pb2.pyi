from kvcm.protocol import meta_service_pb2 as _meta_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnreadCacheLocations(_message.Message):
    __slots__ = ("header", "locations", "read_lease_id", "preferred_manager")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    READ_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_MANAGER_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    locations: _containers.RepeatedScalarFieldContainer[bytes]
    read_lease_id: str
    preferred_manager: _meta_service_pb2.MetaNodeEndpoint
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., locations: _Optional[_Iterable[bytes]] = ..., read_lease_id: _Optional[str] = ..., preferred_manager: _Optional[_Union[_meta_service_pb2.MetaNodeEndpoint, _Mapping]] = ...) -> None: ...
