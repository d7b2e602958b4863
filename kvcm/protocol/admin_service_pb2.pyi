from google.protobuf import wrappers_pb2 as _wrappers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSPECIFIED: _ClassVar[ErrorCode]
    OK: _ClassVar[ErrorCode]
    UNSUPPORTED: _ClassVar[ErrorCode]
    INTERNAL_ERROR: _ClassVar[ErrorCode]
    SERVICE_NOT_READY: _ClassVar[ErrorCode]
    INVALID_ARGUMENT: _ClassVar[ErrorCode]
    DUPLICATE_ENTITY: _ClassVar[ErrorCode]
    REACH_MAX_ENTITY_CAPACITY: _ClassVar[ErrorCode]
    INSTANCE_NOT_EXIST: _ClassVar[ErrorCode]
    SERVER_NOT_LEADER: _ClassVar[ErrorCode]
    IO_ERROR: _ClassVar[ErrorCode]
    CHECKSUM_MISMATCH: _ClassVar[ErrorCode]
    INLINE_HEADER_INVALID: _ClassVar[ErrorCode]
    UNKNOWN_ERROR: _ClassVar[ErrorCode]
    ERROR_MAX: _ClassVar[ErrorCode]

class StorageType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ST_UNSPECIFIED: _ClassVar[StorageType]
    ST_3FS: _ClassVar[StorageType]
    ST_MOONCAKE: _ClassVar[StorageType]
    ST_TAIRMEMPOOL: _ClassVar[StorageType]
    ST_NFS: _ClassVar[StorageType]
    ST_VCNS_3FS: _ClassVar[StorageType]
    ST_DUMMY: _ClassVar[StorageType]
    ST_EVENT_REPORT_L1P5: _ClassVar[StorageType]
    ST_EVENT_REPORT_L2: _ClassVar[StorageType]
    ST_TAIRMEMPOOL_SSD: _ClassVar[StorageType]

class QueryType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QT_UNSPECIFIED: _ClassVar[QueryType]
    QT_BATCH_GET: _ClassVar[QueryType]
    QT_PREFIX_MATCH: _ClassVar[QueryType]
    QT_REVERSE_ROLL_SW_MATCH: _ClassVar[QueryType]
    QT_PREFIX_MATCH_WITH_MAMBA: _ClassVar[QueryType]

class ReclaimPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_UNSPECIFIED: _ClassVar[ReclaimPolicy]
    POLICY_LRU: _ClassVar[ReclaimPolicy]
    POLICY_LFU: _ClassVar[ReclaimPolicy]
    POLICY_TTL: _ClassVar[ReclaimPolicy]

class CachePreferStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CPS_UNSPECIFIED: _ClassVar[CachePreferStrategy]
    CPS_ALWAYS_3FS: _ClassVar[CachePreferStrategy]
    CPS_PREFER_3FS: _ClassVar[CachePreferStrategy]
    CPS_ALWAYS_MOONCAKE: _ClassVar[CachePreferStrategy]
    CPS_PREFER_MOONCAKE: _ClassVar[CachePreferStrategy]
    CPS_ALWAYS_TAIR_MEMPOOL: _ClassVar[CachePreferStrategy]
    CPS_PREFER_TAIR_MEMPOOL: _ClassVar[CachePreferStrategy]
    CPS_ALWAYS_VCNS_3FS: _ClassVar[CachePreferStrategy]
    CPS_PREFER_VCNS_3FS: _ClassVar[CachePreferStrategy]

class AccountRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_USER: _ClassVar[AccountRole]
    ROLE_ADMIN: _ClassVar[AccountRole]
    ROLE_OPERATOR: _ClassVar[AccountRole]

class StorageHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SH_UNSPECIFIED: _ClassVar[StorageHealth]
    SH_UP: _ClassVar[StorageHealth]
    SH_DEGRADED: _ClassVar[StorageHealth]
    SH_DOWN: _ClassVar[StorageHealth]

class LocationSpecKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LSK_UNSPECIFIED: _ClassVar[LocationSpecKind]
    LSK_FULL_ATTENTION: _ClassVar[LocationSpecKind]
    LSK_LINEAR_ATTENTION: _ClassVar[LocationSpecKind]
UNSPECIFIED: ErrorCode
OK: ErrorCode
UNSUPPORTED: ErrorCode
INTERNAL_ERROR: ErrorCode
SERVICE_NOT_READY: ErrorCode
INVALID_ARGUMENT: ErrorCode
DUPLICATE_ENTITY: ErrorCode
REACH_MAX_ENTITY_CAPACITY: ErrorCode
INSTANCE_NOT_EXIST: ErrorCode
SERVER_NOT_LEADER: ErrorCode
IO_ERROR: ErrorCode
CHECKSUM_MISMATCH: ErrorCode
INLINE_HEADER_INVALID: ErrorCode
UNKNOWN_ERROR: ErrorCode
ERROR_MAX: ErrorCode
ST_UNSPECIFIED: StorageType
ST_3FS: StorageType
ST_MOONCAKE: StorageType
ST_TAIRMEMPOOL: StorageType
ST_NFS: StorageType
ST_VCNS_3FS: StorageType
ST_DUMMY: StorageType
ST_EVENT_REPORT_L1P5: StorageType
ST_EVENT_REPORT_L2: StorageType
ST_TAIRMEMPOOL_SSD: StorageType
QT_UNSPECIFIED: QueryType
QT_BATCH_GET: QueryType
QT_PREFIX_MATCH: QueryType
QT_REVERSE_ROLL_SW_MATCH: QueryType
QT_PREFIX_MATCH_WITH_MAMBA: QueryType
POLICY_UNSPECIFIED: ReclaimPolicy
POLICY_LRU: ReclaimPolicy
POLICY_LFU: ReclaimPolicy
POLICY_TTL: ReclaimPolicy
CPS_UNSPECIFIED: CachePreferStrategy
CPS_ALWAYS_3FS: CachePreferStrategy
CPS_PREFER_3FS: CachePreferStrategy
CPS_ALWAYS_MOONCAKE: CachePreferStrategy
CPS_PREFER_MOONCAKE: CachePreferStrategy
CPS_ALWAYS_TAIR_MEMPOOL: CachePreferStrategy
CPS_PREFER_TAIR_MEMPOOL: CachePreferStrategy
CPS_ALWAYS_VCNS_3FS: CachePreferStrategy
CPS_PREFER_VCNS_3FS: CachePreferStrategy
ROLE_USER: AccountRole
ROLE_ADMIN: AccountRole
ROLE_OPERATOR: AccountRole
SH_UNSPECIFIED: StorageHealth
SH_UP: StorageHealth
SH_DEGRADED: StorageHealth
SH_DOWN: StorageHealth
LSK_UNSPECIFIED: LocationSpecKind
LSK_FULL_ATTENTION: LocationSpecKind
LSK_LINEAR_ATTENTION: LocationSpecKind

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class CommonResponseHeader(_message.Message):
    __slots__ = ("status", "request_id")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    status: Status
    request_id: str
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CommonResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ...) -> None: ...

class LocalStorageSpec(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ThreeFSStorageSpec(_message.Message):
    __slots__ = ("cluster_name", "mountpoint", "root_dir", "key_count_per_file", "touch_file_when_create")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIR_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_PER_FILE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FILE_WHEN_CREATE_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    mountpoint: str
    root_dir: str
    key_count_per_file: int
    touch_file_when_create: bool
    def __init__(self, cluster_name: _Optional[str] = ..., mountpoint: _Optional[str] = ..., root_dir: _Optional[str] = ..., key_count_per_file: _Optional[int] = ..., touch_file_when_create: _Optional[bool] = ...) -> None: ...

class VcnsThreeFSStorageSpec(_message.Message):
    __slots__ = ("cluster_name", "mountpoint", "root_dir", "key_count_per_file", "touch_file_when_create", "remote_host", "remote_port", "meta_storage_uri")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIR_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_PER_FILE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FILE_WHEN_CREATE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HOST_FIELD_NUMBER: _ClassVar[int]
    REMOTE_PORT_FIELD_NUMBER: _ClassVar[int]
    META_STORAGE_URI_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    mountpoint: str
    root_dir: str
    key_count_per_file: int
    touch_file_when_create: bool
    remote_host: str
    remote_port: int
    meta_storage_uri: str
    def __init__(self, cluster_name: _Optional[str] = ..., mountpoint: _Optional[str] = ..., root_dir: _Optional[str] = ..., key_count_per_file: _Optional[int] = ..., touch_file_when_create: _Optional[bool] = ..., remote_host: _Optional[str] = ..., remote_port: _Optional[int] = ..., meta_storage_uri: _Optional[str] = ...) -> None: ...

class MooncakeStorageSpec(_message.Message):
    __slots__ = ("local_hostname", "metadata_connstring", "protocol", "rdma_device", "master_service_entry")
    LOCAL_HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_CONNSTRING_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICE_FIELD_NUMBER: _ClassVar[int]
    MASTER_SERVICE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    local_hostname: str
    metadata_connstring: str
    protocol: str
    rdma_device: str
    master_service_entry: str
    def __init__(self, local_hostname: _Optional[str] = ..., metadata_connstring: _Optional[str] = ..., protocol: _Optional[str] = ..., rdma_device: _Optional[str] = ..., master_service_entry: _Optional[str] = ...) -> None: ...

class TairMemPoolStorageSpec(_message.Message):
    __slots__ = ("domain", "timeout", "enable_vipserver", "service_discovery_url", "media_type", "node_id", "capacity_bytes")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ENABLE_VIPSERVER_FIELD_NUMBER: _ClassVar[int]
    SERVICE_DISCOVERY_URL_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    domain: str
    timeout: int
    enable_vipserver: bool
    service_discovery_url: str
    media_type: int
    node_id: str
    capacity_bytes: int
    def __init__(self, domain: _Optional[str] = ..., timeout: _Optional[int] = ..., enable_vipserver: _Optional[bool] = ..., service_discovery_url: _Optional[str] = ..., media_type: _Optional[int] = ..., node_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class NfsStorageSpec(_message.Message):
    __slots__ = ("root_path", "key_count_per_file")
    ROOT_PATH_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_PER_FILE_FIELD_NUMBER: _ClassVar[int]
    root_path: str
    key_count_per_file: int
    def __init__(self, root_path: _Optional[str] = ..., key_count_per_file: _Optional[int] = ...) -> None: ...

class DummyStorageSpec(_message.Message):
    __slots__ = ("root_path", "key_count_per_file")
    ROOT_PATH_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_PER_FILE_FIELD_NUMBER: _ClassVar[int]
    root_path: str
    key_count_per_file: int
    def __init__(self, root_path: _Optional[str] = ..., key_count_per_file: _Optional[int] = ...) -> None: ...

class EventReportStorageSpec(_message.Message):
    __slots__ = ("heartbeat_timeout_ms", "cleanup_grace_ms", "liveness_check_interval_ms", "snapshot_min_interval_ms", "snapshot_delta_drain_timeout_ms")
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CLEANUP_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    LIVENESS_CHECK_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DELTA_DRAIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_timeout_ms: int
    cleanup_grace_ms: int
    liveness_check_interval_ms: int
    snapshot_min_interval_ms: int
    snapshot_delta_drain_timeout_ms: int
    def __init__(self, heartbeat_timeout_ms: _Optional[int] = ..., cleanup_grace_ms: _Optional[int] = ..., liveness_check_interval_ms: _Optional[int] = ..., snapshot_min_interval_ms: _Optional[int] = ..., snapshot_delta_drain_timeout_ms: _Optional[int] = ...) -> None: ...

class StorageConfig(_message.Message):
    __slots__ = ("global_unique_name", "local", "threefs", "mooncake", "tair_mem_pool", "nfs", "vcnsthreefs", "dummy", "event_report", "check_storage_available_when_open", "storage_type", "capacity_bytes", "used_percentage")
    GLOBAL_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    THREEFS_FIELD_NUMBER: _ClassVar[int]
    MOONCAKE_FIELD_NUMBER: _ClassVar[int]
    TAIR_MEM_POOL_FIELD_NUMBER: _ClassVar[int]
    NFS_FIELD_NUMBER: _ClassVar[int]
    VCNSTHREEFS_FIELD_NUMBER: _ClassVar[int]
    DUMMY_FIELD_NUMBER: _ClassVar[int]
    EVENT_REPORT_FIELD_NUMBER: _ClassVar[int]
    CHECK_STORAGE_AVAILABLE_WHEN_OPEN_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    global_unique_name: str
    local: LocalStorageSpec
    threefs: ThreeFSStorageSpec
    mooncake: MooncakeStorageSpec
    tair_mem_pool: TairMemPoolStorageSpec
    nfs: NfsStorageSpec
    vcnsthreefs: VcnsThreeFSStorageSpec
    dummy: DummyStorageSpec
    event_report: EventReportStorageSpec
    check_storage_available_when_open: bool
    storage_type: StorageType
    capacity_bytes: int
    used_percentage: float
    def __init__(self, global_unique_name: _Optional[str] = ..., local: _Optional[_Union[LocalStorageSpec, _Mapping]] = ..., threefs: _Optional[_Union[ThreeFSStorageSpec, _Mapping]] = ..., mooncake: _Optional[_Union[MooncakeStorageSpec, _Mapping]] = ..., tair_mem_pool: _Optional[_Union[TairMemPoolStorageSpec, _Mapping]] = ..., nfs: _Optional[_Union[NfsStorageSpec, _Mapping]] = ..., vcnsthreefs: _Optional[_Union[VcnsThreeFSStorageSpec, _Mapping]] = ..., dummy: _Optional[_Union[DummyStorageSpec, _Mapping]] = ..., event_report: _Optional[_Union[EventReportStorageSpec, _Mapping]] = ..., check_storage_available_when_open: _Optional[bool] = ..., storage_type: _Optional[_Union[StorageType, str]] = ..., capacity_bytes: _Optional[int] = ..., used_percentage: _Optional[float] = ...) -> None: ...

class AddStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage: StorageConfig
    def __init__(self, trace_id: _Optional[str] = ..., storage: _Optional[_Union[StorageConfig, _Mapping]] = ...) -> None: ...

class EnableStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ...) -> None: ...

class DisableStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ...) -> None: ...

class RemoveStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage_unique_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage_unique_name: str
    def __init__(self, trace_id: _Optional[str] = ..., storage_unique_name: _Optional[str] = ...) -> None: ...

class UpdateStorageRequest(_message.Message):
    __slots__ = ("trace_id", "storage", "force_update")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    FORCE_UPDATE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    storage: StorageConfig
    force_update: bool
    def __init__(self, trace_id: _Optional[str] = ..., storage: _Optional[_Union[StorageConfig, _Mapping]] = ..., force_update: _Optional[bool] = ...) -> None: ...

class ListStorageRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListStorageResponse(_message.Message):
    __slots__ = ("header", "storage", "storage_status")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_STATUS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    storage: _containers.RepeatedCompositeFieldContainer[StorageConfig]
    storage_status: _containers.RepeatedCompositeFieldContainer[StorageStatus]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., storage: _Optional[_Iterable[_Union[StorageConfig, _Mapping]]] = ..., storage_status: _Optional[_Iterable[_Union[StorageStatus, _Mapping]]] = ...) -> None: ...

class StorageStatus(_message.Message):
    __slots__ = ("storage_unique_name", "is_enabled", "health", "reason", "since_ms", "probe_seconds", "failed_probes", "medium_bytes", "medium_free_bytes", "is_draining", "is_full")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    IS_ENABLED_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    PROBE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PROBES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    is_enabled: bool
    health: StorageHealth
    reason: str
    since_ms: int
    probe_seconds: float
    failed_probes: int
    medium_bytes: int
    medium_free_bytes: int
    is_draining: bool
    is_full: bool
    def __init__(self, storage_unique_name: _Optional[str] = ..., is_enabled: _Optional[bool] = ..., health: _Optional[_Union[StorageHealth, str]] = ..., reason: _Optional[str] = ..., since_ms: _Optional[int] = ..., probe_seconds: _Optional[float] = ..., failed_probes: _Optional[int] = ..., medium_bytes: _Optional[int] = ..., medium_free_bytes: _Optional[int] = ..., is_draining: _Optional[bool] = ..., is_full: _Optional[bool] = ...) -> None: ...

class TriggerStrategy(_message.Message):
    __slots__ = ("used_size", "used_percentage", "hysteresis")
    USED_SIZE_FIELD_NUMBER: _ClassVar[int]
    USED_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    HYSTERESIS_FIELD_NUMBER: _ClassVar[int]
    used_size: int
    used_percentage: float
    hysteresis: float
    def __init__(self, used_size: _Optional[int] = ..., used_percentage: _Optional[float] = ..., hysteresis: _Optional[float] = ...) -> None: ...

class QuotaConfig(_message.Message):
    __slots__ = ("storage_type", "capacity")
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    storage_type: StorageType
    capacity: int
    def __init__(self, storage_type: _Optional[_Union[StorageType, str]] = ..., capacity: _Optional[int] = ...) -> None: ...

class InstanceGroupQuota(_message.Message):
    __slots__ = ("capacity", "quota_config")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    QUOTA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    quota_config: _containers.RepeatedCompositeFieldContainer[QuotaConfig]
    def __init__(self, capacity: _Optional[int] = ..., quota_config: _Optional[_Iterable[_Union[QuotaConfig, _Mapping]]] = ...) -> None: ...

class CacheReclaimStrategy(_message.Message):
    __slots__ = ("storage_unique_name", "reclaim_policy", "trigger_strategy", "trigger_period_seconds", "reclaim_step_size", "reclaim_step_percentage", "delay_before_delete_ms", "policy", "share", "prefix_classes", "instance_overrides")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_POLICY_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_PERIOD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_STEP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_STEP_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    DELAY_BEFORE_DELETE_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CLASSES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    reclaim_policy: ReclaimPolicy
    trigger_strategy: TriggerStrategy
    trigger_period_seconds: int
    reclaim_step_size: int
    reclaim_step_percentage: int
    delay_before_delete_ms: int
    policy: EvictionPolicy
    share: str
    prefix_classes: _containers.RepeatedCompositeFieldContainer[PrefixClass]
    instance_overrides: _containers.RepeatedCompositeFieldContainer[InstanceOverride]
    def __init__(self, storage_unique_name: _Optional[str] = ..., reclaim_policy: _Optional[_Union[ReclaimPolicy, str]] = ..., trigger_strategy: _Optional[_Union[TriggerStrategy, _Mapping]] = ..., trigger_period_seconds: _Optional[int] = ..., reclaim_step_size: _Optional[int] = ..., reclaim_step_percentage: _Optional[int] = ..., delay_before_delete_ms: _Optional[int] = ..., policy: _Optional[_Union[EvictionPolicy, _Mapping]] = ..., share: _Optional[str] = ..., prefix_classes: _Optional[_Iterable[_Union[PrefixClass, _Mapping]]] = ..., instance_overrides: _Optional[_Iterable[_Union[InstanceOverride, _Mapping]]] = ...) -> None: ...

class EvictionPolicy(_message.Message):
    __slots__ = ("name", "ttl_seconds", "ttl_sliding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTL_SLIDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl_seconds: int
    ttl_sliding: bool
    def __init__(self, name: _Optional[str] = ..., ttl_seconds: _Optional[int] = ..., ttl_sliding: _Optional[bool] = ...) -> None: ...

class PrefixClass(_message.Message):
    __slots__ = ("name", "min_depth", "end_depth", "min_reads", "instance_ids", "priority", "policy", "budget")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_DEPTH_FIELD_NUMBER: _ClassVar[int]
    END_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MIN_READS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    name: str
    min_depth: int
    end_depth: int
    min_reads: int
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    policy: EvictionPolicy
    budget: float
    def __init__(self, name: _Optional[str] = ..., min_depth: _Optional[int] = ..., end_depth: _Optional[int] = ..., min_reads: _Optional[int] = ..., instance_ids: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., policy: _Optional[_Union[EvictionPolicy, _Mapping]] = ..., budget: _Optional[float] = ...) -> None: ...

class InstanceOverride(_message.Message):
    __slots__ = ("instance_id", "policy", "weight")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    policy: EvictionPolicy
    weight: float
    def __init__(self, instance_id: _Optional[str] = ..., policy: _Optional[_Union[EvictionPolicy, _Mapping]] = ..., weight: _Optional[float] = ...) -> None: ...

class MetaStorageBackendConfig(_message.Message):
    __slots__ = ("storage_type", "storage_uri")
    STORAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_URI_FIELD_NUMBER: _ClassVar[int]
    storage_type: str
    storage_uri: str
    def __init__(self, storage_type: _Optional[str] = ..., storage_uri: _Optional[str] = ...) -> None: ...

class MetaCachePolicyConfig(_message.Message):
    __slots__ = ("capacity", "type", "cache_shard_bits", "high_pri_pool_ratio")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SHARD_BITS_FIELD_NUMBER: _ClassVar[int]
    HIGH_PRI_POOL_RATIO_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    type: str
    cache_shard_bits: int
    high_pri_pool_ratio: float
    def __init__(self, capacity: _Optional[int] = ..., type: _Optional[str] = ..., cache_shard_bits: _Optional[int] = ..., high_pri_pool_ratio: _Optional[float] = ...) -> None: ...

class MetaIndexerConfig(_message.Message):
    __slots__ = ("max_key_count", "mutex_shard_num", "batch_key_size", "meta_storage_backend_config", "meta_cache_policy_config", "persist_metadata_interval_time_ms")
    MAX_KEY_COUNT_FIELD_NUMBER: _ClassVar[int]
    MUTEX_SHARD_NUM_FIELD_NUMBER: _ClassVar[int]
    BATCH_KEY_SIZE_FIELD_NUMBER: _ClassVar[int]
    META_STORAGE_BACKEND_CONFIG_FIELD_NUMBER: _ClassVar[int]
    META_CACHE_POLICY_CONFIG_FIELD_NUMBER: _ClassVar[int]
    PERSIST_METADATA_INTERVAL_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    max_key_count: int
    mutex_shard_num: int
    batch_key_size: int
    meta_storage_backend_config: MetaStorageBackendConfig
    meta_cache_policy_config: MetaCachePolicyConfig
    persist_metadata_interval_time_ms: _wrappers_pb2.Int64Value
    def __init__(self, max_key_count: _Optional[int] = ..., mutex_shard_num: _Optional[int] = ..., batch_key_size: _Optional[int] = ..., meta_storage_backend_config: _Optional[_Union[MetaStorageBackendConfig, _Mapping]] = ..., meta_cache_policy_config: _Optional[_Union[MetaCachePolicyConfig, _Mapping]] = ..., persist_metadata_interval_time_ms: _Optional[_Union[_wrappers_pb2.Int64Value, _Mapping]] = ...) -> None: ...

class SystemStorageConfig(_message.Message):
    __slots__ = ("server_addr", "auth_token", "type")
    SERVER_ADDR_FIELD_NUMBER: _ClassVar[int]
    AUTH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    server_addr: str
    auth_token: str
    type: str
    def __init__(self, server_addr: _Optional[str] = ..., auth_token: _Optional[str] = ..., type: _Optional[str] = ...) -> None: ...

class CacheConfig(_message.Message):
    __slots__ = ("reclaim_strategy", "data_storage_strategy", "meta_indexer_config")
    RECLAIM_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    DATA_STORAGE_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    META_INDEXER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    reclaim_strategy: CacheReclaimStrategy
    data_storage_strategy: CachePreferStrategy
    meta_indexer_config: MetaIndexerConfig
    def __init__(self, reclaim_strategy: _Optional[_Union[CacheReclaimStrategy, _Mapping]] = ..., data_storage_strategy: _Optional[_Union[CachePreferStrategy, str]] = ..., meta_indexer_config: _Optional[_Union[MetaIndexerConfig, _Mapping]] = ...) -> None: ...

class InstanceGroup(_message.Message):
    __slots__ = ("name", "storage_candidates", "global_quota_group_name", "max_instance_count", "quota", "cache_config", "user_data", "version", "extra_info", "event_report_storage_candidates", "revisit_interval_buckets", "storage_guarantees", "pin_budget_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STORAGE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_QUOTA_GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_INSTANCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    CACHE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    USER_DATA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
    EVENT_REPORT_STORAGE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    REVISIT_INTERVAL_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_GUARANTEES_FIELD_NUMBER: _ClassVar[int]
    PIN_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    storage_candidates: _containers.RepeatedScalarFieldContainer[str]
    global_quota_group_name: str
    max_instance_count: int
    quota: InstanceGroupQuota
    cache_config: CacheConfig
    user_data: str
    version: int
    extra_info: str
    event_report_storage_candidates: _containers.RepeatedScalarFieldContainer[str]
    revisit_interval_buckets: str
    storage_guarantees: _containers.RepeatedCompositeFieldContainer[StorageGuarantee]
    pin_budget_bytes: int
    def __init__(self, name: _Optional[str] = ..., storage_candidates: _Optional[_Iterable[str]] = ..., global_quota_group_name: _Optional[str] = ..., max_instance_count: _Optional[int] = ..., quota: _Optional[_Union[InstanceGroupQuota, _Mapping]] = ..., cache_config: _Optional[_Union[CacheConfig, _Mapping]] = ..., user_data: _Optional[str] = ..., version: _Optional[int] = ..., extra_info: _Optional[str] = ..., event_report_storage_candidates: _Optional[_Iterable[str]] = ..., revisit_interval_buckets: _Optional[str] = ..., storage_guarantees: _Optional[_Iterable[_Union[StorageGuarantee, _Mapping]]] = ..., pin_budget_bytes: _Optional[int] = ...) -> None: ...

class StorageGuarantee(_message.Message):
    __slots__ = ("storage_unique_name", "guaranteed_bytes")
    STORAGE_UNIQUE_NAME_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    storage_unique_name: str
    guaranteed_bytes: int
    def __init__(self, storage_unique_name: _Optional[str] = ..., guaranteed_bytes: _Optional[int] = ...) -> None: ...

class CreateInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: InstanceGroup
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[_Union[InstanceGroup, _Mapping]] = ...) -> None: ...

class UpdateInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "current_version")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: InstanceGroup
    current_version: int
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[_Union[InstanceGroup, _Mapping]] = ..., current_version: _Optional[int] = ...) -> None: ...

class RemoveInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id", "name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    name: str
    def __init__(self, trace_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id", "name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    name: str
    def __init__(self, trace_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetInstanceGroupResponse(_message.Message):
    __slots__ = ("header", "instance_group")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    instance_group: InstanceGroup
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., instance_group: _Optional[_Union[InstanceGroup, _Mapping]] = ...) -> None: ...

class ListInstanceGroupRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListInstanceGroupResponse(_message.Message):
    __slots__ = ("header", "instance_group")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    instance_group: _containers.RepeatedCompositeFieldContainer[InstanceGroup]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., instance_group: _Optional[_Iterable[_Union[InstanceGroup, _Mapping]]] = ...) -> None: ...

class BoolMasksType(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, values: _Optional[_Iterable[bool]] = ...) -> None: ...

class BlockMask(_message.Message):
    __slots__ = ("offset", "bool_masks")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BOOL_MASKS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    bool_masks: BoolMasksType
    def __init__(self, offset: _Optional[int] = ..., bool_masks: _Optional[_Union[BoolMasksType, _Mapping]] = ...) -> None: ...

class LocationSpec(_message.Message):
    __slots__ = ("name", "uri", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    uri: str
    checksum: int
    def __init__(self, name: _Optional[str] = ..., uri: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class CacheLocation(_message.Message):
    __slots__ = ("type", "spec_size", "location_specs", "checksum", "event_hash")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SPEC_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_SPECS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EVENT_HASH_FIELD_NUMBER: _ClassVar[int]
    type: StorageType
    spec_size: int
    location_specs: _containers.RepeatedCompositeFieldContainer[LocationSpec]
    checksum: int
    event_hash: int
    def __init__(self, type: _Optional[_Union[StorageType, str]] = ..., spec_size: _Optional[int] = ..., location_specs: _Optional[_Iterable[_Union[LocationSpec, _Mapping]]] = ..., checksum: _Optional[int] = ..., event_hash: _Optional[int] = ...) -> None: ...

class GetCacheMetaRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "block_keys", "token_ids", "block_mask", "detail_level")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MASK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_LEVEL_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_mask: BlockMask
    detail_level: int
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_mask: _Optional[_Union[BlockMask, _Mapping]] = ..., detail_level: _Optional[int] = ...) -> None: ...

class GetCacheMetaResponse(_message.Message):
    __slots__ = ("header", "locations", "metas")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    locations: _containers.RepeatedCompositeFieldContainer[CacheLocation]
    metas: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., locations: _Optional[_Iterable[_Union[CacheLocation, _Mapping]]] = ..., metas: _Optional[_Iterable[str]] = ...) -> None: ...

class RemoveCacheRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "block_keys", "token_ids", "block_mask")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MASK_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_mask: BlockMask
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_mask: _Optional[_Union[BlockMask, _Mapping]] = ...) -> None: ...

class LocationSpecInfo(_message.Message):
    __slots__ = ("name", "size", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    kind: LocationSpecKind
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., kind: _Optional[_Union[LocationSpecKind, str]] = ...) -> None: ...

class LocationSpecGroup(_message.Message):
    __slots__ = ("name", "spec_names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., spec_names: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelDeployment(_message.Message):
    __slots__ = ("model_name", "dtype", "use_mla", "tp_size", "dp_size", "lora_name", "pp_size", "extra", "user_data", "use_eagle_pop")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    USE_MLA_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    USER_DATA_FIELD_NUMBER: _ClassVar[int]
    USE_EAGLE_POP_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    dtype: str
    use_mla: bool
    tp_size: int
    dp_size: int
    lora_name: str
    pp_size: int
    extra: str
    user_data: str
    use_eagle_pop: bool
    def __init__(self, model_name: _Optional[str] = ..., dtype: _Optional[str] = ..., use_mla: _Optional[bool] = ..., tp_size: _Optional[int] = ..., dp_size: _Optional[int] = ..., lora_name: _Optional[str] = ..., pp_size: _Optional[int] = ..., extra: _Optional[str] = ..., user_data: _Optional[str] = ..., use_eagle_pop: _Optional[bool] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("quota_group_name", "instance_group_name", "instance_id", "block_size", "location_spec_infos", "model_deployment", "location_spec_groups", "default_query_type")
    QUOTA_GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_SPEC_INFOS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_SPEC_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_QUERY_TYPE_FIELD_NUMBER: _ClassVar[int]
    quota_group_name: str
    instance_group_name: str
    instance_id: str
    block_size: int
    location_spec_infos: _containers.RepeatedCompositeFieldContainer[LocationSpecInfo]
    model_deployment: ModelDeployment
    location_spec_groups: _containers.RepeatedCompositeFieldContainer[LocationSpecGroup]
    default_query_type: QueryType
    def __init__(self, quota_group_name: _Optional[str] = ..., instance_group_name: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_size: _Optional[int] = ..., location_spec_infos: _Optional[_Iterable[_Union[LocationSpecInfo, _Mapping]]] = ..., model_deployment: _Optional[_Union[ModelDeployment, _Mapping]] = ..., location_spec_groups: _Optional[_Iterable[_Union[LocationSpecGroup, _Mapping]]] = ..., default_query_type: _Optional[_Union[QueryType, str]] = ...) -> None: ...

class RegisterInstanceRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "instance_id", "block_size", "location_spec_infos", "model_deployment", "location_spec_groups", "default_query_type")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_SPEC_INFOS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_SPEC_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_QUERY_TYPE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    instance_id: str
    block_size: int
    location_spec_infos: _containers.RepeatedCompositeFieldContainer[LocationSpecInfo]
    model_deployment: ModelDeployment
    location_spec_groups: _containers.RepeatedCompositeFieldContainer[LocationSpecGroup]
    default_query_type: QueryType
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_size: _Optional[int] = ..., location_spec_infos: _Optional[_Iterable[_Union[LocationSpecInfo, _Mapping]]] = ..., model_deployment: _Optional[_Union[ModelDeployment, _Mapping]] = ..., location_spec_groups: _Optional[_Iterable[_Union[LocationSpecGroup, _Mapping]]] = ..., default_query_type: _Optional[_Union[QueryType, str]] = ...) -> None: ...

class RemoveInstanceRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GetInstanceInfoRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GetInstanceInfoResponse(_message.Message):
    __slots__ = ("header", "instance_info")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_INFO_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    instance_info: InstanceInfo
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., instance_info: _Optional[_Union[InstanceInfo, _Mapping]] = ...) -> None: ...

class ListInstanceInfoRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group_name: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group_name: _Optional[str] = ...) -> None: ...

class ListInstanceInfoResponse(_message.Message):
    __slots__ = ("header", "instance_info")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_INFO_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    instance_info: _containers.RepeatedCompositeFieldContainer[InstanceInfo]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., instance_info: _Optional[_Iterable[_Union[InstanceInfo, _Mapping]]] = ...) -> None: ...

class Account(_message.Message):
    __slots__ = ("user_name", "role")
    USER_NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    user_name: str
    role: AccountRole
    def __init__(self, user_name: _Optional[str] = ..., role: _Optional[_Union[AccountRole, str]] = ...) -> None: ...

class AddAccountRequest(_message.Message):
    __slots__ = ("trace_id", "user_name", "password", "role")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    USER_NAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    user_name: str
    password: str
    role: AccountRole
    def __init__(self, trace_id: _Optional[str] = ..., user_name: _Optional[str] = ..., password: _Optional[str] = ..., role: _Optional[_Union[AccountRole, str]] = ...) -> None: ...

class DeleteAccountRequest(_message.Message):
    __slots__ = ("trace_id", "user_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    USER_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    user_name: str
    def __init__(self, trace_id: _Optional[str] = ..., user_name: _Optional[str] = ...) -> None: ...

class ListAccountRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ListAccountResponse(_message.Message):
    __slots__ = ("header", "accounts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    accounts: _containers.RepeatedCompositeFieldContainer[Account]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., accounts: _Optional[_Iterable[_Union[Account, _Mapping]]] = ...) -> None: ...

class GenConfigSnapshotRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class ConfigSnapShotResponse(_message.Message):
    __slots__ = ("header", "config_snapshot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    config_snapshot: str
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., config_snapshot: _Optional[str] = ...) -> None: ...

class LoadConfigSnapshotRequest(_message.Message):
    __slots__ = ("trace_id", "config_snapshot", "dry_run", "prune")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    PRUNE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    config_snapshot: str
    dry_run: bool
    prune: bool
    def __init__(self, trace_id: _Optional[str] = ..., config_snapshot: _Optional[str] = ..., dry_run: _Optional[bool] = ..., prune: _Optional[bool] = ...) -> None: ...

class LoadConfigSnapshotResponse(_message.Message):
    __slots__ = ("header", "changes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    changes: _containers.RepeatedCompositeFieldContainer[ConfigChange]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., changes: _Optional[_Iterable[_Union[ConfigChange, _Mapping]]] = ...) -> None: ...

class ConfigChange(_message.Message):
    __slots__ = ("kind", "name", "action", "old_value", "new_value")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    OLD_VALUE_FIELD_NUMBER: _ClassVar[int]
    NEW_VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    action: str
    old_value: str
    new_value: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., action: _Optional[str] = ..., old_value: _Optional[str] = ..., new_value: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class MetricValue(_message.Message):
    __slots__ = ("int_value", "float_value", "string_value")
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    int_value: int
    float_value: float
    string_value: str
    def __init__(self, int_value: _Optional[int] = ..., float_value: _Optional[float] = ..., string_value: _Optional[str] = ...) -> None: ...

class MetricsTag(_message.Message):
    __slots__ = ("tag_key", "tag_value")
    TAG_KEY_FIELD_NUMBER: _ClassVar[int]
    TAG_VALUE_FIELD_NUMBER: _ClassVar[int]
    tag_key: str
    tag_value: str
    def __init__(self, tag_key: _Optional[str] = ..., tag_value: _Optional[str] = ...) -> None: ...

class MetricsData(_message.Message):
    __slots__ = ("metric_name", "metric_value", "metric_tags")
    METRIC_NAME_FIELD_NUMBER: _ClassVar[int]
    METRIC_VALUE_FIELD_NUMBER: _ClassVar[int]
    METRIC_TAGS_FIELD_NUMBER: _ClassVar[int]
    metric_name: str
    metric_value: MetricValue
    metric_tags: _containers.RepeatedCompositeFieldContainer[MetricsTag]
    def __init__(self, metric_name: _Optional[str] = ..., metric_value: _Optional[_Union[MetricValue, _Mapping]] = ..., metric_tags: _Optional[_Iterable[_Union[MetricsTag, _Mapping]]] = ...) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("header", "timestamp", "metrics", "extra_data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_DATA_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    timestamp: int
    metrics: _containers.RepeatedCompositeFieldContainer[MetricsData]
    extra_data: str
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., timestamp: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[MetricsData, _Mapping]]] = ..., extra_data: _Optional[str] = ...) -> None: ...

class CheckHealthRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class CheckHealthResponse(_message.Message):
    __slots__ = ("header", "is_leader", "is_health", "elector_last_loop_time_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    IS_HEALTH_FIELD_NUMBER: _ClassVar[int]
    ELECTOR_LAST_LOOP_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    is_leader: bool
    is_health: bool
    elector_last_loop_time_ms: int
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., is_leader: _Optional[bool] = ..., is_health: _Optional[bool] = ..., elector_last_loop_time_ms: _Optional[int] = ...) -> None: ...

class GetManagerClusterInfoRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class NodeEndpoint(_message.Message):
    __slots__ = ("node_id", "host", "meta_rpc_port", "meta_http_port", "admin_rpc_port", "admin_http_port", "custom_info")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    META_RPC_PORT_FIELD_NUMBER: _ClassVar[int]
    META_HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    ADMIN_RPC_PORT_FIELD_NUMBER: _ClassVar[int]
    ADMIN_HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_INFO_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    meta_rpc_port: int
    meta_http_port: int
    admin_rpc_port: int
    admin_http_port: int
    custom_info: str
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., meta_rpc_port: _Optional[int] = ..., meta_http_port: _Optional[int] = ..., admin_rpc_port: _Optional[int] = ..., admin_http_port: _Optional[int] = ..., custom_info: _Optional[str] = ...) -> None: ...

class GetManagerClusterInfoResponse(_message.Message):
    __slots__ = ("header", "info_updated_time", "self_leader_expiration_time", "self_node_id", "leader_node_id", "leader_endpoint", "preferred_managers")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    INFO_UPDATED_TIME_FIELD_NUMBER: _ClassVar[int]
    SELF_LEADER_EXPIRATION_TIME_FIELD_NUMBER: _ClassVar[int]
    SELF_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_MANAGERS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    info_updated_time: int
    self_leader_expiration_time: int
    self_node_id: str
    leader_node_id: str
    leader_endpoint: NodeEndpoint
    preferred_managers: _containers.RepeatedCompositeFieldContainer[NodeEndpoint]
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., info_updated_time: _Optional[int] = ..., self_leader_expiration_time: _Optional[int] = ..., self_node_id: _Optional[str] = ..., leader_node_id: _Optional[str] = ..., leader_endpoint: _Optional[_Union[NodeEndpoint, _Mapping]] = ..., preferred_managers: _Optional[_Iterable[_Union[NodeEndpoint, _Mapping]]] = ...) -> None: ...

class LeaderDemoteRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class GetLeaderElectorConfigRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class GetLeaderElectorConfigResponse(_message.Message):
    __slots__ = ("header", "campaign_delay_time_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CAMPAIGN_DELAY_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    campaign_delay_time_ms: int
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ..., campaign_delay_time_ms: _Optional[int] = ...) -> None: ...

class UpdateLeaderElectorConfigRequest(_message.Message):
    __slots__ = ("trace_id", "campaign_delay_time_ms")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    CAMPAIGN_DELAY_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    campaign_delay_time_ms: int
    def __init__(self, trace_id: _Optional[str] = ..., campaign_delay_time_ms: _Optional[int] = ...) -> None: ...

class UpdateLoggerRequest(_message.Message):
    __slots__ = ("trace_id", "module_name", "log_level")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODULE_NAME_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    module_name: str
    log_level: str
    def __init__(self, trace_id: _Optional[str] = ..., module_name: _Optional[str] = ..., log_level: _Optional[str] = ...) -> None: ...
