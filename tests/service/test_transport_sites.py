"""Resources of a test on a manager: names of its own, a storage, a group, an instance, written blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from google.protobuf.message import Message
from test_transport_drivers import Api

_numbers = count(1)


def unique(prefix: str) -> str:
    """Return a name that nothing else has in this run."""
    return f"{prefix}-{next(_numbers)}"


def group_spec(name: str, *candidates: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a complete InstanceGroup.

    Args:
        name: the group.
        candidates: its storages.
        changes: capacity, types (bytes by storage type), delay_ms, strategy, max_keys, shards, ratio (by default there
            is no eviction); anything else is a field of the group itself.
    """
    limits = [{"storage_type": kind, "capacity": size} for kind, size in changes.pop("types", {}).items()]
    reclaim = {
        "storage_unique_name": candidates[0] if candidates else "none",
        "reclaim_policy": "POLICY_LRU",
        "trigger_strategy": {"used_percentage": changes.pop("ratio", 2.0)},
        "delay_before_delete_ms": changes.pop("delay_ms", 0),
    }
    indexer = {"meta_storage_backend_config": {"storage_type": "local"}, "meta_cache_policy_config": {"type": "LRU"}}
    indexer |= {"max_key_count": changes.pop("max_keys", 0), "mutex_shard_num": changes.pop("shards", 0)}
    strategy = changes.pop("strategy", "CPS_PREFER_3FS")
    cache = {"reclaim_strategy": reclaim, "data_storage_strategy": strategy, "meta_indexer_config": indexer}
    return {
        "name": name,
        "storage_candidates": list(candidates),
        "global_quota_group_name": "quota",
        "quota": {"capacity": changes.pop("capacity", 1 << 40), "quota_config": limits},
        "cache_config": cache,
        "version": 1,
        **changes,
    }


def instance_fields(instance_id: str, group: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a complete RegisterInstanceRequest: one spec `kv` of 64 bytes, 4 tokens per block."""
    fields = {"instance_id": instance_id, "instance_group": group, "block_size": 4}
    model = {"model_name": "m", "dtype": "bf16"}
    return {**fields, "location_spec_infos": [{"name": "kv", "size": 64}], "model_deployment": model, **changes}


def specs(location: Any) -> dict[str, str]:
    """Return the uris of a location by spec name."""
    return {spec.name: spec.uri for spec in location.location_specs}


def mask(offset: int | None = None, flags: Sequence[bool] | None = None) -> dict[str, Any]:
    """Return the fields of a BlockMask."""
    return {"offset": offset} if flags is None else {"bool_masks": {"values": list(flags)}}


def masked(answer: Message) -> int | list[bool]:
    """Return the block_mask of a StartWriteCache answer: its offset, or its flags."""
    block_mask: Any = getattr(answer, "block_mask")  # noqa: B009 - messages are typed as Message
    return block_mask.offset if block_mask.WhichOneof("info") == "offset" else list(block_mask.bool_masks.values)


class Site:
    """One test's place on a manager, reached over one transport."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def storage(self, **spec: Any) -> str:
        """Add a storage; a dummy one unless a spec is given. Returns its name."""
        name = unique("storage")
        spec = spec or {"dummy": {"root_path": name, "key_count_per_file": 1}}
        self.api.ok("AdminService.AddStorage", storage={"global_unique_name": name, **spec})
        return name

    def limit_storage(self, name: str, capacity_bytes: int) -> Any:
        """Give a storage a capacity, without eviction; returns it as it is listed."""
        (listed,) = [s for s in self.api.ok("AdminService.ListStorage").storage if s.global_unique_name == name]
        listed.capacity_bytes, listed.used_percentage = capacity_bytes, 2.0
        self.api.ok("AdminService.UpdateStorage", storage=listed)
        return listed

    def group(self, *candidates: str, **changes: Any) -> str:
        """Create a group on these storages, on a new one when none are given. Returns its name."""
        name = unique("group")
        spec = group_spec(name, *(candidates or (self.storage(),)), **changes)
        self.api.ok("AdminService.CreateInstanceGroup", instance_group=spec)
        return name

    def instance(self, group: str | None = None, **changes: Any) -> str:
        """Register an instance in a group, in a new one when none is given. Returns its id."""
        name = unique("instance")
        self.api.ok("RegisterInstance", **instance_fields(name, group or self.group(), **changes))
        return name

    def update_group(self, name: str, *candidates: str, **changes: Any) -> None:
        """Replace a group that is at version 1."""
        spec = group_spec(name, *candidates, version=2, **changes)
        self.api.ok("AdminService.UpdateInstanceGroup", instance_group=spec, current_version=1)

    def start(self, instance: str, keys: Sequence[int], **fields: Any) -> Any:
        """Start a write, which lasts longer than any test unless it says otherwise; returns the answer."""
        fields = {"write_timeout_seconds": 600, **fields}
        return self.api.ok("StartWriteCache", instance_id=instance, block_keys=keys, **fields)

    def finish(self, instance: str, started: Any, success: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Finish a write, successful as a whole unless a mask says otherwise; returns the answer."""
        success = mask(len(started.locations)) if success is None else success
        session = {"instance_id": instance, "write_session_id": started.write_session_id}
        return self.api.ok("FinishWriteCache", **session, success_blocks=success, **fields)

    def write(self, instance: str, keys: Sequence[int], **fields: Any) -> list[dict[str, str]]:
        """Write blocks; returns the uris of every block that was written, by spec name."""
        started = self.start(instance, keys, **fields)
        self.finish(instance, started)
        return [specs(location) for location in started.locations]

    def match(
        self, instance: str, keys: Sequence[int], mode: str | int = "QT_PREFIX_MATCH", **fields: Any
    ) -> list[dict[str, str]]:
        """Match blocks; returns the uris of every entry by spec name."""
        answer = self.api.ok("GetCacheLocation", instance_id=instance, block_keys=keys, query_type=mode, **fields)
        return [specs(location) for location in answer.locations]

    def hits(self, instance: str, keys: Sequence[int]) -> list[int]:
        """Return those of `keys` that can be read."""
        entries = self.match(instance, keys, "QT_BATCH_GET")
        return [key for key, entry in zip(keys, entries, strict=True) if any(entry.values())]

    def metas(self, instance: str, keys: Sequence[int], **fields: Any) -> list[dict[str, Any]]:
        """Return the meta texts of blocks, decoded."""
        answer = self.api.ok("GetCacheMeta", instance_id=instance, block_keys=keys, **fields)
        return [json.loads(text) for text in answer.metas]

    def statuses(self, instance: str, keys: Sequence[int]) -> list[str]:
        """Return the statuses of blocks."""
        return [meta["status"] for meta in self.metas(instance, keys)]
