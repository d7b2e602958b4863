"""Configurations of the original optimizer."""

from __future__ import annotations

import json
from typing import Any

from kvcm.optimizer.groups.original import OriginalConfig


def instance(name: str = "a", policy: str = "lru", **params: Any) -> dict[str, Any]:
    return {
        "instance_id": name, "block_size": 16, "eviction_policy_type": policy, "eviction_policy_params": params,
    }  # fmt: skip


def group(*instances: dict[str, Any], name: str = "g", capacity: int = 4, **more: Any) -> dict[str, Any]:
    storage = {"unique_name": "s", "storage_type": "file", "band_width_mbps": 1, "priority": 1, "capacity": 100}
    return {
        "group_name": name, "quota_capacity": capacity, "used_percentage": 1.0, "storages": [storage],
        "hierarchical_eviction_enabled": False, "instances": list(instances) or [instance()], **more,
    }  # fmt: skip


def document(*groups: dict[str, Any], mode: int = 3, batch: int = 3, **more: Any) -> str:
    eviction = {"eviction_mode": mode, "eviction_batch_size_per_instance": batch}
    return json.dumps({
        "trace_file_path": "t.log", "trace_type": "publisher_log", "output_result_path": "out",
        "eviction_params": eviction, "instance_groups": list(groups) or [group()], **more,
    })  # fmt: skip


def config(*groups: dict[str, Any], mode: int = 3, batch: int = 3, **more: Any) -> OriginalConfig:
    return OriginalConfig.parse(document(*groups, mode=mode, batch=batch, **more))
