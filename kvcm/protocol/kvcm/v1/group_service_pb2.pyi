from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockMoveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_MOVE_UNSPECIFIED: _ClassVar[BlockMoveState]
    BLOCK_MOVE_WAITING: _ClassVar[BlockMoveState]
    BLOCK_MOVE_COPYING: _ClassVar[BlockMoveState]
    BLOCK_MOVE_CLEARING: _ClassVar[BlockMoveState]
BLOCK_MOVE_UNSPECIFIED: BlockMoveState
BLOCK_MOVE_WAITING: BlockMoveState
BLOCK_MOVE_COPYING: BlockMoveState
BLOCK_MOVE_CLEARING: BlockMoveState

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

class MoveInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id", "name", "store")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    name: str
    store: str
    def __init__(self, trace_id: _Optional[str] = ..., name: _Optional[str] = ..., store: _Optional[str] = ...) -> None: ...

class ListGroupStoreRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListGroupStoreResponse(_message.Message):
    __slots__ = ("header", "stores", "groups")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    stores: _containers.RepeatedCompositeFieldContainer[BlockStoreStatus]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStoreStatus]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., stores: _Optional[_Iterable[_Union[BlockStoreStatus, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupStoreStatus, _Mapping]]] = ...) -> None: ...

class BlockStoreStatus(_message.Message):
    __slots__ = ("name", "is_usable", "reason", "instance_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_USABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_usable: bool
    reason: str
    instance_count: int
    def __init__(self, name: _Optional[str] = ..., is_usable: _Optional[bool] = ..., reason: _Optional[str] = ..., instance_count: _Optional[int] = ...) -> None: ...

class GroupStoreStatus(_message.Message):
    __slots__ = ("name", "store", "instance_count", "placed_instance_count", "fixed_instance_count", "moves")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACED_INSTANCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIXED_INSTANCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    name: str
    store: str
    instance_count: int
    placed_instance_count: int
    fixed_instance_count: int
    moves: _containers.RepeatedCompositeFieldContainer[BlockMove]
    def __init__(self, name: _Optional[str] = ..., store: _Optional[str] = ..., instance_count: _Optional[int] = ..., placed_instance_count: _Optional[int] = ..., fixed_instance_count: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[BlockMove, _Mapping]]] = ...) -> None: ...

class BlockMove(_message.Message):
    __slots__ = ("instance_id", "source", "target", "state", "copied_blocks", "failures", "reason")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    source: str
    target: str
    state: BlockMoveState
    copied_blocks: int
    failures: int
    reason: str
    def __init__(self, instance_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., state: _Optional[_Union[BlockMoveState, str]] = ..., copied_blocks: _Optional[int] = ..., failures: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
