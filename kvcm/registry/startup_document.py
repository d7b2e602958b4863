"""JSON documents: the startup document and the storage configs that transfer layers read (wire.md 4).

Missing keys keep their default, unknown keys are reported, a wrong type refuses the whole document. Enums are numbers
here and storage kinds are strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    InstanceOverride,
    MetaCachePolicyConfig,
    MetaIndexerConfig,
    MetaStorageBackendConfig,
    PrefixClass,
    QuotaConfig,
    ReclaimPolicy,
    StorageGuarantee,
    TriggerStrategy,
)
from kvcm.model.storages import (
    DummyStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageSpec,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)

__all__ = ["StartupDocument", "builtin_document", "parse_startup_document", "storage_configs_json"]


class StartupDocument(NamedTuple):
    """What a fresh deployment begins with."""

    storage: StorageConfig
    group: InstanceGroup


# Per spec class: (attribute, key in JSON), in the order of printing.
_SPEC_KEYS: dict[type[Any], tuple[tuple[str, str], ...]] = {
    NfsStorageSpec: (("root_path", "root_path"), ("key_count_per_file", "key_count_per_file")),
    DummyStorageSpec: (("root_path", "root_path"), ("key_count_per_file", "key_count_per_file")),
    ThreeFSStorageSpec: tuple((key, key) for key in ("cluster_name", "mountpoint", "root_dir", "key_count_per_file")),
    VcnsThreeFSStorageSpec: tuple(
        (key, key)
        for key in (
            "cluster_name",
            "mountpoint",
            "root_dir",
            "key_count_per_file",
            "remote_host",
            "remote_port",
            "meta_storage_uri",
        )
    ),
    MooncakeStorageSpec: (
        ("local_hostname", "local_hostname"),
        ("metadata_connstring", "metadata_connstring"),
        ("protocol", "protocol"),
        ("rdma_device", "rdma_device"),
        ("master_service_entry", "master_server_entry"),
    ),
    TairMemPoolStorageSpec: (("enable_vipserver", "enable_vipserver"), ("domain", "domain"), ("timeout", "timeout")),
}
_ADDED_KEYS: dict[type[Any], tuple[str, ...]] = {
    TairMemPoolStorageSpec: ("node_id", "capacity_bytes", "service_discovery_url", "media_type")
}
"""Of ours, or of later releases of the original: printed only where they say something, since its clients know the
others by heart."""
_SPEC_OF_KIND: dict[str, type[Any]] = {
    "file": NfsStorageSpec,
    "dummy": DummyStorageSpec,
    "hf3fs": ThreeFSStorageSpec,
    "vcns_hf3fs": VcnsThreeFSStorageSpec,
    "mooncake": MooncakeStorageSpec,
    "pace": TairMemPoolStorageSpec,
}


def storage_configs_json(configs: Iterable[StorageConfig]) -> str:
    """Print storages for the transfer layer of a client (wire.md 4.4): fixed key order, no spaces."""
    documents = [
        {
            "type": config.storage_type.kind,
            "is_available": config.is_available,
            "global_unique_name": config.global_unique_name,
            "storage_spec": _spec_document(config.spec),
        }
        for config in configs
        if not config.is_event_report  # added after a group named it as if it took bytes
    ]
    return json.dumps(documents, separators=(",", ":"), ensure_ascii=False)


def _spec_document(spec: StorageSpec) -> dict[str, Any]:
    document = {key: getattr(spec, attribute) for attribute, key in _SPEC_KEYS[type(spec)]}
    added = {key: getattr(spec, key) for key in _ADDED_KEYS.get(type(spec), ())}
    return document | {key: value for key, value in added.items() if value}


def builtin_document(root_path: Path) -> StartupDocument:
    """Return the storage and the group of a deployment that configures nothing: files below `root_path`."""
    quota = tuple(
        QuotaConfig(storage_type, 10_000_000_000)
        for storage_type in (StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_TAIRMEMPOOL)
    )
    reclaim = CacheReclaimStrategy(
        storage_unique_name="nfs_01",
        reclaim_policy=ReclaimPolicy.POLICY_LRU,
        trigger_strategy=TriggerStrategy(used_percentage=0.8),
        delay_before_delete_ms=1000,
    )
    indexer = MetaIndexerConfig(
        max_key_count=1_000_000,
        mutex_shard_num=16,
        batch_key_size=16,
        meta_cache_policy_config=MetaCachePolicyConfig(capacity=10000, type="LRU", cache_shard_bits=0),
    )
    group = InstanceGroup(
        name="default",
        storage_candidates=("nfs_01",),
        global_quota_group_name="default_quota_group",
        max_instance_count=100,
        quota=InstanceGroupQuota(30_000_000_000, quota),
        cache_config=CacheConfig(reclaim, CachePreferStrategy.CPS_PREFER_3FS, indexer),
        user_data='{"description":"built-in group"}',
        version=1,
    )
    return StartupDocument(StorageConfig("nfs_01", NfsStorageSpec(f"{root_path}/", 8)), group)


def _ignore(_key: str) -> None:
    """Report nothing."""


def parse_startup_document(text: str, on_unknown: Callable[[str], None] = _ignore) -> StartupDocument:
    """Read `{"storage_config": …, "instance_group": …}`.

    Args:
        text: of the document.
        on_unknown: called with a sentence for each key that has no effect, since this release does not know it.

    Raises:
        InvalidArgumentError: naming the key that is missing or has a wrong type.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"startup document is not JSON: {error}") from error
    readers: list[_Reader] = []
    reader = _Reader(document, "startup document", readers)
    made = StartupDocument(_storage(reader.inner("storage_config")), _group(reader.inner("instance_group")))
    for each in readers:
        for key in each.unknown_keys:
            on_unknown(f"{key} is unknown here and has no effect")
    return made


class _Reader:
    """Reads typed values out of a JSON object; a missing key gives the default, a wrong type is an error.

    Args:
        document: the object.
        path: of it, for messages.
        readers: of the whole document, to which this one is added.
    """

    def __init__(self, document: object, path: str, readers: list[_Reader]) -> None:
        if not isinstance(document, dict):
            raise InvalidArgumentError(f"{path} is {type(document).__name__}, must be an object")
        self._document = document
        self._path = path
        self._readers = readers
        self._known: set[str] = set()
        readers.append(self)

    @property
    def unknown_keys(self) -> list[str]:
        """Return the paths of the keys that were not read."""
        return [f"{self._path}.{key}" for key in self._document if key not in self._known]

    def _value(self, key: str, expected: type[Any], default: Any) -> Any:
        self._known.add(key)
        value = self._document.get(key, default)
        wrong = not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool)
        if wrong and not (expected is float and type(value) is int):
            raise InvalidArgumentError(f"{self._path}.{key} is {type(value).__name__}, must be {expected.__name__}")
        return value

    def text(self, key: str, default: str = "") -> str:
        return str(self._value(key, str, default))

    def number(self, key: str, default: int = 0, bits: int = 64) -> int:
        return self._bounded(key, int(self._value(key, int, default)), bits)

    def _bounded(self, key: str, value: int, bits: int) -> int:
        most = (1 << (bits - 1)) - 1
        if not -most - 1 <= value <= most:
            raise self.fail(key, value, f"numbers from {-most - 1} to {most}")
        return value

    def ratio(self, key: str) -> float:
        return float(self._value(key, float, 0.0))

    def optional_ratio(self, key: str) -> float | None:
        self._known.add(key)
        return self.ratio(key) if key in self._document else None

    def optional_number(self, key: str) -> int | None:
        self._known.add(key)
        return self.number(key) if key in self._document else None

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(self._value(key, bool, default))

    def inner(self, key: str) -> _Reader:
        self._known.add(key)
        return _Reader(self._document.get(key, {}), f"{self._path}.{key}", self._readers)

    def items(self, key: str) -> list[Any]:
        return list(self._value(key, list, []))

    def objects(self, key: str) -> list[_Reader]:
        return [_Reader(item, f"{self._path}.{key}[{i}]", self._readers) for i, item in enumerate(self.items(key))]

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.items(key)
        if not all(isinstance(item, str) for item in items):
            raise self.fail(key, items, "lists of texts")
        return tuple(items)

    def any(self, key: str, like: object) -> object:
        """Return a value of the type of `like`, which is also its default; numbers are 32-bit ones."""
        value = self._value(key, type(like), like)
        return self._bounded(key, value, 32) if type(value) is int else value

    def fail(self, key: str, value: object, allowed: object) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._path}.{key} is {value!r}, allowed are {allowed}")


def _storage(reader: _Reader) -> StorageConfig:
    kind = reader.text("type")
    spec_class = _SPEC_OF_KIND.get(kind)
    if spec_class is None:
        raise reader.fail("type", kind, sorted(_SPEC_OF_KIND))
    spec_reader = reader.inner("storage_spec")
    defaults = spec_class()
    fields = {name: spec_reader.any(key, getattr(defaults, name)) for name, key in _SPEC_KEYS[spec_class]}
    if spec_class is TairMemPoolStorageSpec:
        fields |= {key: spec_reader.text(key) for key in ("node_id", "service_discovery_url")}
        fields |= {"capacity_bytes": spec_reader.number("capacity_bytes")}
        fields |= {"media_type": spec_reader.number("media_type", bits=32)}
    spec = spec_class(**fields)
    return StorageConfig(
        reader.text("global_unique_name"),
        spec,
        is_available=reader.flag("is_available", default=True),
        capacity_bytes=reader.number("capacity_bytes"),
        used_percentage=reader.ratio("used_percentage"),
    )


def _group(reader: _Reader) -> InstanceGroup:
    names = reader.items("storage_candidates")
    if not all(isinstance(name, str) for name in names):
        raise reader.fail("storage_candidates", names, "storage names")
    quota = reader.inner("quota")
    return InstanceGroup(
        name=reader.text("name"),
        storage_candidates=tuple(names),
        global_quota_group_name=reader.text("global_quota_group_name"),
        max_instance_count=reader.number("max_instance_count"),
        quota=InstanceGroupQuota(quota.number("capacity"), tuple(map(_quota, quota.objects("quota_config")))),
        cache_config=_cache_config(reader.inner("cache_config"), only_candidate=names[0] if len(names) == 1 else "any"),
        user_data=reader.text("user_data"),
        version=reader.number("version"),
        storage_guarantees=tuple(
            StorageGuarantee(each.text("storage_unique_name"), each.number("guaranteed_bytes"))
            for each in reader.objects("storage_guarantees")
        ),
        pin_budget_bytes=reader.number("pin_budget_bytes"),
        extra_info=reader.text("extra_info"),
        event_report_storage_candidates=reader.texts("event_report_storage_candidates"),
        revisit_interval_buckets=reader.text("revisit_interval_buckets"),
    )


def _quota(reader: _Reader) -> QuotaConfig:
    kind = reader.text("storage_type")
    if kind not in _SPEC_OF_KIND:
        raise reader.fail("storage_type", kind, sorted(_SPEC_OF_KIND))
    return QuotaConfig(StorageType.of_kind(kind), reader.number("capacity"))


def _cache_config(reader: _Reader, only_candidate: str) -> CacheConfig:
    reclaim = reader.inner("reclaim_strategy")
    trigger = reclaim.inner("trigger_strategy")
    strategy = CacheReclaimStrategy(
        # The API wants one: so that a group of a document can be read, changed and sent back.
        storage_unique_name=reclaim.text("storage_unique_name", only_candidate),
        reclaim_policy=_enum(reclaim, "reclaim_policy", ReclaimPolicy),
        trigger_strategy=TriggerStrategy(
            trigger.number("used_size"), trigger.ratio("used_percentage"), trigger.optional_ratio("hysteresis")
        ),
        trigger_period_seconds=reclaim.number("trigger_period_seconds", bits=32),
        reclaim_step_size=reclaim.number("reclaim_step_size", bits=32),
        reclaim_step_percentage=reclaim.number("reclaim_step_percentage", bits=32),
        delay_before_delete_ms=reclaim.number("delay_before_delete_ms", bits=32),
        policy=_policy(reclaim.inner("policy")),
        share=reclaim.text("share"),
        prefix_classes=tuple(map(_prefix_class, reclaim.objects("prefix_classes"))),
        instance_overrides=tuple(
            InstanceOverride(each.text("instance_id"), _policy(each.inner("policy")), each.ratio("weight"))
            for each in reclaim.objects("instance_overrides")
        ),
    )
    prefer = _enum(reader, "cache_prefer_strategy", CachePreferStrategy)
    return CacheConfig(strategy, prefer, _indexer(reader.inner("meta_indexer_config")))


def _policy(reader: _Reader) -> EvictionPolicy:
    return EvictionPolicy(reader.text("name"), reader.number("ttl_seconds"), reader.flag("ttl_sliding", default=False))


def _prefix_class(reader: _Reader) -> PrefixClass:
    return PrefixClass(
        name=reader.text("name"),
        min_depth=reader.number("min_depth", bits=32),
        end_depth=reader.number("end_depth", bits=32),
        min_reads=reader.number("min_reads", bits=32),
        instance_ids=reader.texts("instance_ids"),
        priority=reader.number("priority", bits=32),
        policy=_policy(reader.inner("policy")),
        budget=reader.ratio("budget"),
    )


def _indexer(reader: _Reader) -> MetaIndexerConfig:
    backend = reader.inner("meta_storage_backend_config")
    policy = reader.inner("meta_cache_policy_config")
    return MetaIndexerConfig(
        max_key_count=reader.number("max_key_count"),
        mutex_shard_num=reader.number("mutex_shard_num", 16),
        batch_key_size=reader.number("batch_key_size", 16),
        meta_storage_backend_config=MetaStorageBackendConfig(
            backend.text("storage_type", "local"), backend.text("storage_uri")
        ),
        meta_cache_policy_config=MetaCachePolicyConfig(
            policy.number("capacity", 1024),
            policy.text("type", "lru"),
            policy.number("cache_shard_bits", 6, bits=32),
            policy.ratio("high_pri_pool_ratio"),
        ),
        persist_metadata_interval_time_ms=reader.optional_number("persist_metadata_interval_time_ms"),
    )


def _enum(reader: _Reader, key: str, enum: type[Any]) -> Any:
    value = reader.number(key)
    try:
        return enum(value)
    except ValueError:
        raise reader.fail(key, value, [member.value for member in enum]) from None
