from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChainEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAIN_END_UNSPECIFIED: _ClassVar[ChainEnd]
    CHAIN_END_NONE: _ClassVar[ChainEnd]
    CHAIN_END_ABSENT: _ClassVar[ChainEnd]
    CHAIN_END_WRITING: _ClassVar[ChainEnd]
    CHAIN_END_DELETING: _ClassVar[ChainEnd]
    CHAIN_END_STORAGE: _ClassVar[ChainEnd]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_SERVING: _ClassVar[BlockState]
    BLOCK_WRITING: _ClassVar[BlockState]
    BLOCK_DELETING: _ClassVar[BlockState]
    BLOCK_ABSENT: _ClassVar[BlockState]

class AlertSeverity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALERT_UNSPECIFIED: _ClassVar[AlertSeverity]
    ALERT_PAGE: _ClassVar[AlertSeverity]
    ALERT_TICKET: _ClassVar[AlertSeverity]
    ALERT_INFO: _ClassVar[AlertSeverity]
CHAIN_END_UNSPECIFIED: ChainEnd
CHAIN_END_NONE: ChainEnd
CHAIN_END_ABSENT: ChainEnd
CHAIN_END_WRITING: ChainEnd
CHAIN_END_DELETING: ChainEnd
CHAIN_END_STORAGE: ChainEnd
BLOCK_UNSPECIFIED: BlockState
BLOCK_SERVING: BlockState
BLOCK_WRITING: BlockState
BLOCK_DELETING: BlockState
BLOCK_ABSENT: BlockState
ALERT_UNSPECIFIED: AlertSeverity
ALERT_PAGE: AlertSeverity
ALERT_TICKET: AlertSeverity
ALERT_INFO: AlertSeverity

class ListSessionsRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("header", "sessions")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    sessions: _containers.RepeatedCompositeFieldContainer[OpenSession]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[OpenSession, _Mapping]]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("short_id", "instance_id", "instance_group", "blocks", "bytes", "begun_at_ms", "deadline_ms", "starter", "is_overdue", "is_ending")
    SHORT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    STARTER_FIELD_NUMBER: _ClassVar[int]
    IS_OVERDUE_FIELD_NUMBER: _ClassVar[int]
    IS_ENDING_FIELD_NUMBER: _ClassVar[int]
    short_id: str
    instance_id: str
    instance_group: str
    blocks: int
    bytes: int
    begun_at_ms: int
    deadline_ms: int
    starter: str
    is_overdue: bool
    is_ending: bool
    def __init__(self, short_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., begun_at_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., starter: _Optional[str] = ..., is_overdue: _Optional[bool] = ..., is_ending: _Optional[bool] = ...) -> None: ...

class ExploreBlocksRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "block_keys", "token_ids")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ExploreBlocksResponse(_message.Message):
    __slots__ = ("header", "summary", "blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    summary: ChainSummary
    blocks: _containers.RepeatedCompositeFieldContainer[ExploredBlock]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., summary: _Optional[_Union[ChainSummary, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[ExploredBlock, _Mapping]]] = ...) -> None: ...

class ChainSummary(_message.Message):
    __slots__ = ("blocks", "tokens_per_block", "matched_blocks", "matched_tokens", "complete_blocks", "end", "end_reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tokens_per_block: int
    matched_blocks: int
    matched_tokens: int
    complete_blocks: int
    end: ChainEnd
    end_reason: str
    def __init__(self, blocks: _Optional[int] = ..., tokens_per_block: _Optional[int] = ..., matched_blocks: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., complete_blocks: _Optional[int] = ..., end: _Optional[_Union[ChainEnd, str]] = ..., end_reason: _Optional[str] = ...) -> None: ...

class ExploredBlock(_message.Message):
    __slots__ = ("position", "block_key", "state", "is_readable", "why_not", "locations", "last_access_at_ms", "accesses", "age_seconds", "is_pinned", "parent_is_present")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_READABLE_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_ACCESS_AT_MS_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PARENT_IS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    position: int
    block_key: int
    state: BlockState
    is_readable: bool
    why_not: str
    locations: _containers.RepeatedCompositeFieldContainer[ExploredLocation]
    last_access_at_ms: int
    accesses: int
    age_seconds: float
    is_pinned: bool
    parent_is_present: bool
    def __init__(self, position: _Optional[int] = ..., block_key: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., is_readable: _Optional[bool] = ..., why_not: _Optional[str] = ..., locations: _Optional[_Iterable[_Union[ExploredLocation, _Mapping]]] = ..., last_access_at_ms: _Optional[int] = ..., accesses: _Optional[int] = ..., age_seconds: _Optional[float] = ..., is_pinned: _Optional[bool] = ..., parent_is_present: _Optional[bool] = ...) -> None: ...

class ExploredLocation(_message.Message):
    __slots__ = ("storage", "storage_type", "status", "specs", "size_bytes", "began_at_ms")
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_MS_FIELD_NUMBER: _ClassVar[int]
    storage: str
    storage_type: str
    status: str
    specs: _containers.RepeatedScalarFieldContainer[str]
    size_bytes: int
    began_at_ms: int
    def __init__(self, storage: _Optional[str] = ..., storage_type: _Optional[str] = ..., status: _Optional[str] = ..., specs: _Optional[_Iterable[str]] = ..., size_bytes: _Optional[int] = ..., began_at_ms: _Optional[int] = ...) -> None: ...

class GetCurveRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ...) -> None: ...

class GetCurveResponse(_message.Message):
    __slots__ = ("header", "is_known", "why_not", "since_ms", "lookups", "sampled_keys", "attainable_ratio", "points", "targets", "present")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_KEYS_FIELD_NUMBER: _ClassVar[int]
    ATTAINABLE_RATIO_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    is_known: bool
    why_not: str
    since_ms: int
    lookups: int
    sampled_keys: int
    attainable_ratio: float
    points: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    targets: _containers.RepeatedCompositeFieldContainer[CurveTarget]
    present: CurvePresent
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., is_known: _Optional[bool] = ..., why_not: _Optional[str] = ..., since_ms: _Optional[int] = ..., lookups: _Optional[int] = ..., sampled_keys: _Optional[int] = ..., attainable_ratio: _Optional[float] = ..., points: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[CurveTarget, _Mapping]]] = ..., present: _Optional[_Union[CurvePresent, _Mapping]] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("bytes", "hit_ratio")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    hit_ratio: float
    def __init__(self, bytes: _Optional[int] = ..., hit_ratio: _Optional[float] = ...) -> None: ...

class CurveTarget(_message.Message):
    __slots__ = ("part", "hit_ratio", "bytes")
    PART_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    part: float
    hit_ratio: float
    bytes: int
    def __init__(self, part: _Optional[float] = ..., hit_ratio: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class CurvePresent(_message.Message):
    __slots__ = ("quota_bytes", "kept_bytes", "used_bytes", "predicted_ratio")
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_RATIO_FIELD_NUMBER: _ClassVar[int]
    quota_bytes: int
    kept_bytes: int
    used_bytes: int
    predicted_ratio: float
    def __init__(self, quota_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., predicted_ratio: _Optional[float] = ...) -> None: ...

class ListAlertsRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ...) -> None: ...

class ListAlertsResponse(_message.Message):
    __slots__ = ("header", "alerts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    alerts: _containers.RepeatedCompositeFieldContainer[Alert]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., alerts: _Optional[_Iterable[_Union[Alert, _Mapping]]] = ...) -> None: ...

class Alert(_message.Message):
    __slots__ = ("name", "severity", "subject_kind", "subject_name", "summary", "reason", "advice", "since_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    severity: AlertSeverity
    subject_kind: str
    subject_name: str
    summary: str
    reason: str
    advice: str
    since_ms: int
    def __init__(self, name: _Optional[str] = ..., severity: _Optional[_Union[AlertSeverity, str]] = ..., subject_kind: _Optional[str] = ..., subject_name: _Optional[str] = ..., summary: _Optional[str] = ..., reason: _Optional[str] = ..., advice: _Optional[str] = ..., since_ms: _Optional[int] = ...) -> None: ...
