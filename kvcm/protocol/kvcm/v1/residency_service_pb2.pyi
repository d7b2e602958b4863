from kvcm.protocol import meta_service_pb2 as _meta_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Medium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIUM_UNSPECIFIED: _ClassVar[Medium]
    MEDIUM_GPU: _ClassVar[Medium]
    MEDIUM_HOST: _ClassVar[Medium]
    MEDIUM_DISK: _ClassVar[Medium]

class ReporterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORTER_STATE_UNSPECIFIED: _ClassVar[ReporterState]
    REPORTER_COMPLETE: _ClassVar[ReporterState]
    REPORTER_PARTIAL: _ClassVar[ReporterState]
    REPORTER_QUIET: _ClassVar[ReporterState]

class PublisherState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUBLISHER_STATE_UNSPECIFIED: _ClassVar[PublisherState]
    PUBLISHER_PENDING: _ClassVar[PublisherState]
    PUBLISHER_ACTIVE: _ClassVar[PublisherState]
    PUBLISHER_QUIET: _ClassVar[PublisherState]
MEDIUM_UNSPECIFIED: Medium
MEDIUM_GPU: Medium
MEDIUM_HOST: Medium
MEDIUM_DISK: Medium
REPORTER_STATE_UNSPECIFIED: ReporterState
REPORTER_COMPLETE: ReporterState
REPORTER_PARTIAL: ReporterState
REPORTER_QUIET: ReporterState
PUBLISHER_STATE_UNSPECIFIED: PublisherState
PUBLISHER_PENDING: PublisherState
PUBLISHER_ACTIVE: PublisherState
PUBLISHER_QUIET: PublisherState

class ResidencyChange(_message.Message):
    __slots__ = ("medium", "cleared", "removed_keys", "added_keys", "spec_name")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    ADDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SPEC_NAME_FIELD_NUMBER: _ClassVar[int]
    medium: Medium
    cleared: bool
    removed_keys: bytes
    added_keys: bytes
    spec_name: str
    def __init__(self, medium: _Optional[_Union[Medium, str]] = ..., cleared: _Optional[bool] = ..., removed_keys: _Optional[bytes] = ..., added_keys: _Optional[bytes] = ..., spec_name: _Optional[str] = ...) -> None: ...

class ReportResidencyRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "engine", "rank", "stream", "sequence", "changes", "snapshot", "stopped", "key_scheme")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    engine: str
    rank: int
    stream: str
    sequence: int
    changes: _containers.RepeatedCompositeFieldContainer[ResidencyChange]
    snapshot: SnapshotPart
    stopped: bool
    key_scheme: KeyScheme
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., engine: _Optional[str] = ..., rank: _Optional[int] = ..., stream: _Optional[str] = ..., sequence: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[ResidencyChange, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotPart, _Mapping]] = ..., stopped: _Optional[bool] = ..., key_scheme: _Optional[_Union[KeyScheme, _Mapping]] = ...) -> None: ...

class KeyScheme(_message.Message):
    __slots__ = ("algorithm", "root", "mask", "block_tokens")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    root: bytes
    mask: int
    block_tokens: int
    def __init__(self, algorithm: _Optional[str] = ..., root: _Optional[bytes] = ..., mask: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: bool
    last: bool
    def __init__(self, first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class ReportResidencyResponse(_message.Message):
    __slots__ = ("header", "applied_sequence", "snapshot_required", "timeout_ms", "resident_blocks", "managers", "node_id")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MANAGERS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    applied_sequence: int
    snapshot_required: bool
    timeout_ms: int
    resident_blocks: int
    managers: _containers.RepeatedCompositeFieldContainer[_meta_service_pb2.MetaNodeEndpoint]
    node_id: str
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., applied_sequence: _Optional[int] = ..., snapshot_required: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., resident_blocks: _Optional[int] = ..., managers: _Optional[_Iterable[_Union[_meta_service_pb2.MetaNodeEndpoint, _Mapping]]] = ..., node_id: _Optional[str] = ...) -> None: ...

class ScoreCosts(_message.Message):
    __slots__ = ("compute_tokens_per_second", "host_bytes_per_second", "disk_bytes_per_second", "storage_bytes_per_second")
    COMPUTE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    compute_tokens_per_second: float
    host_bytes_per_second: float
    disk_bytes_per_second: float
    storage_bytes_per_second: float
    def __init__(self, compute_tokens_per_second: _Optional[float] = ..., host_bytes_per_second: _Optional[float] = ..., disk_bytes_per_second: _Optional[float] = ..., storage_bytes_per_second: _Optional[float] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "block_keys", "token_ids", "engines", "prompt_tokens", "costs", "cache_salt", "event_hashes")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EVENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    engines: _containers.RepeatedScalarFieldContainer[str]
    prompt_tokens: int
    costs: ScoreCosts
    cache_salt: str
    event_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., engines: _Optional[_Iterable[str]] = ..., prompt_tokens: _Optional[int] = ..., costs: _Optional[_Union[ScoreCosts, _Mapping]] = ..., cache_salt: _Optional[str] = ..., event_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class EngineScore(_message.Message):
    __slots__ = ("engine", "rank", "gpu_tokens", "host_tokens", "disk_tokens", "storage_tokens", "best_peer", "best_peer_tokens", "load_seconds", "compute_seconds", "score", "is_complete")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEST_PEER_FIELD_NUMBER: _ClassVar[int]
    BEST_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    rank: int
    gpu_tokens: int
    host_tokens: int
    disk_tokens: int
    storage_tokens: int
    best_peer: str
    best_peer_tokens: int
    load_seconds: float
    compute_seconds: float
    score: float
    is_complete: bool
    def __init__(self, engine: _Optional[str] = ..., rank: _Optional[int] = ..., gpu_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., storage_tokens: _Optional[int] = ..., best_peer: _Optional[str] = ..., best_peer_tokens: _Optional[int] = ..., load_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., score: _Optional[float] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("header", "engines", "storage_tokens", "prompt_tokens", "block_tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    engines: _containers.RepeatedCompositeFieldContainer[EngineScore]
    storage_tokens: int
    prompt_tokens: int
    block_tokens: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineScore, _Mapping]]] = ..., storage_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class ListReportersRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class Reporter(_message.Message):
    __slots__ = ("engine", "rank", "state", "sequence", "quiet_ms", "media", "gaps")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUIET_MS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    rank: int
    state: ReporterState
    sequence: int
    quiet_ms: int
    media: _containers.RepeatedCompositeFieldContainer[MediumBlocks]
    gaps: int
    def __init__(self, engine: _Optional[str] = ..., rank: _Optional[int] = ..., state: _Optional[_Union[ReporterState, str]] = ..., sequence: _Optional[int] = ..., quiet_ms: _Optional[int] = ..., media: _Optional[_Iterable[_Union[MediumBlocks, _Mapping]]] = ..., gaps: _Optional[int] = ...) -> None: ...

class MediumBlocks(_message.Message):
    __slots__ = ("medium", "blocks")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    medium: Medium
    blocks: int
    def __init__(self, medium: _Optional[_Union[Medium, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class ListReportersResponse(_message.Message):
    __slots__ = ("header", "reporters", "memory_bytes", "blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REPORTERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    reporters: _containers.RepeatedCompositeFieldContainer[Reporter]
    memory_bytes: int
    blocks: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., reporters: _Optional[_Iterable[_Union[Reporter, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class MatchModelRequest(_message.Message):
    __slots__ = ("trace_id", "model_name", "instance_group", "token_ids", "block_hashes", "block_size", "lora_name", "lora_id", "cache_salt", "engine")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    model_name: str
    instance_group: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    lora_name: str
    lora_id: int
    cache_salt: str
    engine: str
    def __init__(self, trace_id: _Optional[str] = ..., model_name: _Optional[str] = ..., instance_group: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., lora_name: _Optional[str] = ..., lora_id: _Optional[int] = ..., cache_salt: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class RankMatch(_message.Message):
    __slots__ = ("engine", "rank", "gpu_tokens", "host_tokens", "disk_tokens", "matched_tokens", "matched_gpu_tokens", "matched_host_tokens", "matched_disk_tokens", "storage_tokens", "block_size", "instance_id")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    engine: str
    rank: int
    gpu_tokens: int
    host_tokens: int
    disk_tokens: int
    matched_tokens: int
    matched_gpu_tokens: int
    matched_host_tokens: int
    matched_disk_tokens: int
    storage_tokens: int
    block_size: int
    instance_id: str
    def __init__(self, engine: _Optional[str] = ..., rank: _Optional[int] = ..., gpu_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., matched_gpu_tokens: _Optional[int] = ..., matched_host_tokens: _Optional[int] = ..., matched_disk_tokens: _Optional[int] = ..., storage_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class MatchModelResponse(_message.Message):
    __slots__ = ("header", "ranks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    ranks: _containers.RepeatedCompositeFieldContainer[RankMatch]
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankMatch, _Mapping]]] = ...) -> None: ...

class HashProfile(_message.Message):
    __slots__ = ("strategy", "algorithm", "python_hash_seed", "index_projection", "root_digest")
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PYTHON_HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    INDEX_PROJECTION_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    algorithm: str
    python_hash_seed: str
    index_projection: str
    root_digest: str
    def __init__(self, strategy: _Optional[str] = ..., algorithm: _Optional[str] = ..., python_hash_seed: _Optional[str] = ..., index_projection: _Optional[str] = ..., root_digest: _Optional[str] = ...) -> None: ...

class Publisher(_message.Message):
    __slots__ = ("engine", "rank", "instance_group", "model_name", "lora_name", "block_size", "endpoint", "replay_endpoint", "type", "hash_profile", "instance_id", "state", "problem")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    HASH_PROFILE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    engine: str
    rank: int
    instance_group: str
    model_name: str
    lora_name: str
    block_size: int
    endpoint: str
    replay_endpoint: str
    type: str
    hash_profile: HashProfile
    instance_id: str
    state: PublisherState
    problem: str
    def __init__(self, engine: _Optional[str] = ..., rank: _Optional[int] = ..., instance_group: _Optional[str] = ..., model_name: _Optional[str] = ..., lora_name: _Optional[str] = ..., block_size: _Optional[int] = ..., endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., type: _Optional[str] = ..., hash_profile: _Optional[_Union[HashProfile, _Mapping]] = ..., instance_id: _Optional[str] = ..., state: _Optional[_Union[PublisherState, str]] = ..., problem: _Optional[str] = ...) -> None: ...

class RegisterPublisherRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "publisher")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    publisher: Publisher
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., publisher: _Optional[_Union[Publisher, _Mapping]] = ...) -> None: ...

class RegisterPublisherResponse(_message.Message):
    __slots__ = ("header", "publisher")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    publisher: Publisher
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., publisher: _Optional[_Union[Publisher, _Mapping]] = ...) -> None: ...

class UnregisterPublisherRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "engine", "rank", "model_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    engine: str
    rank: int
    model_name: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., engine: _Optional[str] = ..., rank: _Optional[int] = ..., model_name: _Optional[str] = ...) -> None: ...

class UnregisterPublisherResponse(_message.Message):
    __slots__ = ("header", "publishers")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    publishers: _containers.RepeatedCompositeFieldContainer[Publisher]
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ...) -> None: ...

class DescribeIndexRequest(_message.Message):
    __slots__ = ("trace_id", "instance_group", "model_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_group: str
    model_name: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., model_name: _Optional[str] = ...) -> None: ...

class IndexContext(_message.Message):
    __slots__ = ("instance_id", "instance_group", "model_name", "lora_name", "block_size", "blocks", "key_scheme", "reporters")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUP_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    REPORTERS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    instance_group: str
    model_name: str
    lora_name: str
    block_size: int
    blocks: int
    key_scheme: KeyScheme
    reporters: _containers.RepeatedCompositeFieldContainer[Reporter]
    def __init__(self, instance_id: _Optional[str] = ..., instance_group: _Optional[str] = ..., model_name: _Optional[str] = ..., lora_name: _Optional[str] = ..., block_size: _Optional[int] = ..., blocks: _Optional[int] = ..., key_scheme: _Optional[_Union[KeyScheme, _Mapping]] = ..., reporters: _Optional[_Iterable[_Union[Reporter, _Mapping]]] = ...) -> None: ...

class DescribeIndexResponse(_message.Message):
    __slots__ = ("header", "publishers", "contexts", "run_id", "manager")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    publishers: _containers.RepeatedCompositeFieldContainer[Publisher]
    contexts: _containers.RepeatedCompositeFieldContainer[IndexContext]
    run_id: str
    manager: str
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ..., contexts: _Optional[_Iterable[_Union[IndexContext, _Mapping]]] = ..., run_id: _Optional[str] = ..., manager: _Optional[str] = ...) -> None: ...
