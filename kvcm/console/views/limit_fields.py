"""The limits of a group as fields of a form, and what they show of a group's document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kvcm.console.formats import storage_kind
from kvcm.console.forms import Field, Kind, Sheet, exact_size

__all__ = ["POLICIES", "TYPE_QUOTAS", "limit_fields", "sheet_of", "storage_types", "value_at"]

Document = Mapping[str, Any]

POLICIES: Final[Mapping[str, str]] = {
    "": "by default: the end of the prefix read longest ago (leaf_lru)",
    "leaf_lru": "the end of the prefix read longest ago (leaf_lru)",
    "lru": "what was read longest ago (lru)",
    "lfu": "what is read least often (lfu)",
    "s3fifo": "what was written first and not read again (s3fifo)",
    "sieve": "what was written first and not read since (sieve)",
    "fifo": "what was written first (fifo)",
    "ttl": "what is oldest (ttl)",
}
"""Eviction policies: what leaves first."""

TYPE_QUOTAS: Final = "quota.quota_config"
"""Of fields with quotas on types of storages: the name of the type follows."""

_STRATEGY: Final = "cache_config.reclaim_strategy"
_TRIGGER: Final = f"{_STRATEGY}.trigger_strategy"
_TYPES: Final = {
    "threefs": "ST_3FS", "vcnsthreefs": "ST_VCNS_3FS", "mooncake": "ST_MOONCAKE", "tair_mem_pool": "ST_TAIRMEMPOOL",
    "nfs": "ST_NFS", "dummy": "ST_DUMMY",
}  # fmt: skip
"""What storages are under a key of their documents."""

_WRITTEN: Final[Mapping[Kind, Callable[[Any], str]]] = {
    "size": exact_size,
    "check": lambda _: "yes",
    "percent": lambda ratio: f"{100 * ratio:.6g}",
    "span": lambda seconds: f"{seconds}s",
}

_BEHIND: Final = (
    Field(
        f"{_TRIGGER}.used_percentage",
        "Evict above, in % of each limit",
        "80 is common. Empty, or above 100: there is no such mark.",
        "percent",
        initial="80",
    ),
    Field(f"{_TRIGGER}.hysteresis", "Evict down to so many points below", "Empty: 2.", "percent"),
    Field(
        f"{_TRIGGER}.used_size", "Evict above, in bytes in all", "400 GiB, say, beside the ratio. Empty: none.", "size"
    ),
    Field(f"{_STRATEGY}.policy.name", "What is evicted first", kind="choice", choices=[*POLICIES.items()]),
    Field(
        f"{_STRATEGY}.policy.ttl_seconds", "Evict at an age", "12h, say, although there is room. Empty: never.", "span"
    ),
    Field(f"{_STRATEGY}.policy.ttl_sliding", "The age counts from the last read, not from the write", kind="check"),
    Field(
        "cache_config.meta_indexer_config.max_key_count", "Blocks of each instance", "Empty: not limited.", "integer"
    ),
    Field("max_instance_count", "Instances", "Empty: not limited.", "integer"),
    Field("pin_budget_bytes", "Pins may hold", "10 GiB, say. Empty: nothing can be pinned.", "size"),
    Field(
        f"{_STRATEGY}.delay_before_delete_ms",
        "Keep what is evicted for those who read it, in ms",
        "It counts as used until then. Empty: it is deleted at once.",
        "integer",
    ),
)


def storage_types(storages: Iterable[Document]) -> list[str]:
    """Return the types of some storages, by their documents of `/v1/storages`."""
    return sorted({kind for storage in storages for key, kind in _TYPES.items() if storage.get(key) is not None})


def limit_fields(types: Sequence[str]) -> list[Field]:
    """Return the fields, with one for the quota on each of some types of storages."""
    quota = Field("quota.capacity", "Quota", "Bytes in all: 500 GiB, say. Empty: nothing may be written.", "size")
    of_types = (
        Field(
            f"{TYPE_QUOTAS}.{each}",
            f"Quota on {storage_kind(each)} storages",
            "200 GiB, say. Empty: only the quota in all counts.",
            "size",
        )
        for each in types
    )
    return [quota, *of_types, *_BEHIND]


def sheet_of(fields: Sequence[Field], group: Document) -> Sheet:
    """Return the form as it is for a group."""
    return Sheet(fields, {each.name: _text(each, group) for each in fields})


def value_at(document: Document, path: str) -> Any:
    """Return what stands at a path of a document, None where nothing does."""
    found: Any = document
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _text(field: Field, group: Document) -> str:
    if field.name.startswith(f"{TYPE_QUOTAS}."):
        quotas = {each["storage_type"]: each["capacity"] for each in value_at(group, TYPE_QUOTAS) or ()}
        capacity = quotas.get(field.name.rpartition(".")[2])
        return "" if capacity is None else exact_size(capacity)
    value = value_at(group, field.name)
    if not value:  # 0 stands for no limit, which is what is left empty
        return "0" if value == 0 and field.name.endswith("hysteresis") else ""
    return _WRITTEN.get(field.kind, str)(value)
