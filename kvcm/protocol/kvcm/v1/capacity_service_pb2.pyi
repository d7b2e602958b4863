from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetUsageRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("header", "groups", "storages", "global_quotas")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_QUOTAS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    groups: _containers.RepeatedCompositeFieldContainer[GroupUsage]
    storages: _containers.RepeatedCompositeFieldContainer[StorageUsage]
    global_quotas: _containers.RepeatedCompositeFieldContainer[GlobalQuotaUsage]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupUsage, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[StorageUsage, _Mapping]]] = ..., global_quotas: _Optional[_Iterable[_Union[GlobalQuotaUsage, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("used_bytes", "deleting_bytes", "capacity_bytes", "high_mark_bytes", "low_mark_bytes")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELETING_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIGH_MARK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOW_MARK_BYTES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    deleting_bytes: int
    capacity_bytes: int
    high_mark_bytes: int
    low_mark_bytes: int
    def __init__(self, used_bytes: _Optional[int] = ..., deleting_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., high_mark_bytes: _Optional[int] = ..., low_mark_bytes: _Optional[int] = ...) -> None: ...

class GroupUsage(_message.Message):
    __slots__ = ("name", "total", "types", "storages", "instances", "pinned_bytes", "pin_budget_bytes", "refused_writes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_WRITES_FIELD_NUMBER: _ClassVar[int]
    name: str
    total: Usage
    types: _containers.RepeatedCompositeFieldContainer[TypeUsage]
    storages: _containers.RepeatedCompositeFieldContainer[GroupStorageUsage]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceUsage]
    pinned_bytes: int
    pin_budget_bytes: int
    refused_writes: int
    def __init__(self, name: _Optional[str] = ..., total: _Optional[_Union[Usage, _Mapping]] = ..., types: _Optional[_Iterable[_Union[TypeUsage, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[GroupStorageUsage, _Mapping]]] = ..., instances: _Optional[_Iterable[_Union[InstanceUsage, _Mapping]]] = ..., pinned_bytes: _Optional[int] = ..., pin_budget_bytes: _Optional[int] = ..., refused_writes: _Optional[int] = ...) -> None: ...

class TypeUsage(_message.Message):
    __slots__ = ("storage_type", "usage")
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    storage_type: _admin_service_pb2.StorageType
    usage: Usage
    def __init__(self, storage_type: _Optional[_Union[_admin_service_pb2.StorageType, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class GroupStorageUsage(_message.Message):
    __slots__ = ("storage_unique_name", "used_bytes", "guaranteed_bytes")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    used_bytes: int
    guaranteed_bytes: int
    def __init__(self, storage_unique_name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., guaranteed_bytes: _Optional[int] = ...) -> None: ...

class InstanceUsage(_message.Message):
    __slots__ = ("instance_id", "key_count", "max_key_count", "used_bytes", "policy")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_KEY_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    key_count: int
    max_key_count: int
    used_bytes: int
    policy: str
    def __init__(self, instance_id: _Optional[str] = ..., key_count: _Optional[int] = ..., max_key_count: _Optional[int] = ..., used_bytes: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class StorageUsage(_message.Message):
    __slots__ = ("storage_unique_name", "usage", "guaranteed_bytes", "oversubscription", "deletion_backlog", "deletion_failures")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERSUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    DELETION_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    DELETION_FAILURES_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    usage: Usage
    guaranteed_bytes: int
    oversubscription: float
    deletion_backlog: int
    deletion_failures: int
    def __init__(self, storage_unique_name: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., guaranteed_bytes: _Optional[int] = ..., oversubscription: _Optional[float] = ..., deletion_backlog: _Optional[int] = ..., deletion_failures: _Optional[int] = ...) -> None: ...

class GlobalQuotaUsage(_message.Message):
    __slots__ = ("name", "usage", "groups")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    usage: Usage
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class GlobalQuota(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_percentage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_percentage: float
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_percentage: _Optional[float] = ...) -> None: ...

class SetGlobalQuotaRequest(_message.Message):
    __slots__ = ("trace_id", "global_quota")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_QUOTA_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    global_quota: GlobalQuota
    def __init__(self, trace_id: _Optional[str] = ..., global_quota: _Optional[_Union[GlobalQuota, _Mapping]] = ...) -> None: ...

class ListGlobalQuotaRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListGlobalQuotaResponse(_message.Message):
    __slots__ = ("header", "global_quotas")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_QUOTAS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    global_quotas: _containers.RepeatedCompositeFieldContainer[GlobalQuota]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., global_quotas: _Optional[_Iterable[_Union[GlobalQuota, _Mapping]]] = ...) -> None: ...

class RemoveGlobalQuotaRequest(_message.Message):
    __slots__ = ("trace_id", "name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    name: str
    def __init__(self, trace_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class CollectGarbageRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "dry_run", "check_bytes")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    CHECK_BYTES_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    dry_run: bool
    check_bytes: bool
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., dry_run: _Optional[bool] = ..., check_bytes: _Optional[bool] = ...) -> None: ...

class CollectGarbageResponse(_message.Message):
    __slots__ = ("header", "blocks", "without_bytes", "without_prefix", "expired_sessions", "freed_bytes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    blocks: int
    without_bytes: int
    without_prefix: int
    expired_sessions: int
    freed_bytes: int
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., blocks: _Optional[int] = ..., without_bytes: _Optional[int] = ..., without_prefix: _Optional[int] = ..., expired_sessions: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class ScrubStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name", "cluster_id", "dry_run", "min_age_seconds")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MIN_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    cluster_id: str
    dry_run: bool
    min_age_seconds: int
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ..., cluster_id: _Optional[str] = ..., dry_run: _Optional[bool] = ..., min_age_seconds: _Optional[int] = ...) -> None: ...

class ScrubStorageResponse(_message.Message):
    __slots__ = ("header", "objects", "bytes", "orphans", "orphan_bytes", "too_young", "deleted", "failed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOO_YOUNG_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    objects: int
    bytes: int
    orphans: int
    orphan_bytes: int
    too_young: int
    deleted: int
    failed: int
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., objects: _Optional[int] = ..., bytes: _Optional[int] = ..., orphans: _Optional[int] = ..., orphan_bytes: _Optional[int] = ..., too_young: _Optional[int] = ..., deleted: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...
