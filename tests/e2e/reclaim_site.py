"""Groups at their marks: what they use, as their manager says, and blocks that are written to be evicted or removed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from manager_site import BLOCK_BYTES, GroupPlan, Manager, Wire, code_of
from mixed_load import store_bytes

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb

_SECONDS = 60.0


async def usage_of(wire: Wire, group: str) -> Any:
    """Return what a group uses in total, and its marks."""
    answer = await wire.capacity.GetUsage(capacity_pb.GetUsageRequest(instance_group=group), timeout=_SECONDS)
    assert code_of(answer) == pb.OK, answer.header
    (found,) = answer.groups
    return found.total


async def remaining_bytes(wire: Wire, group: str) -> int:
    """Return the bytes of a group, without those being deleted."""
    total = await usage_of(wire, group)
    return int(total.used_bytes - total.deleting_bytes)


async def until(condition: Callable[[], Any], seconds: float, pause_seconds: float = 0.05) -> float:
    """Ask until the answer is true, or time is up; returns how long that took, infinity when it never was."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        if await condition():
            return time.monotonic() - begin
        await asyncio.sleep(pause_seconds)
    return float("inf")


async def write(wire: Wire, instance: str, keys: Sequence[int], *, with_bytes: bool = True) -> list[str]:
    """Write blocks and return where they lie; those that are there already, or do not fit, are left out."""
    request = pb.StartWriteCacheRequest(instance_id=instance, block_keys=keys)
    started = await wire.meta.StartWriteCache(request, timeout=_SECONDS)
    if code_of(started) != pb.OK:
        return []
    uris = [place.location_specs[0].uri for place in started.locations]
    if with_bytes:
        for uri in uris:
            store_bytes(uri)
    finish = pb.FinishWriteCacheRequest(instance_id=instance, write_session_id=started.write_session_id)
    finish.success_blocks.bool_masks.values.extend([True] * len(uris))
    assert code_of(await wire.meta.FinishWriteCache(finish, timeout=_SECONDS)) == pb.OK
    return uris


async def remove(wire: Wire, instance: str, keys: Sequence[int]) -> None:
    """Remove blocks."""
    request = pb.RemoveCacheRequest(instance_id=instance, block_keys=keys)
    assert code_of(await wire.meta.RemoveCache(request, timeout=_SECONDS)) == pb.OK


async def set_mark(wire: Wire, plan: GroupPlan, mark: float, step_blocks: int = 0) -> None:
    """Change the mark of a group, and how many blocks are evicted in one step."""
    answer = await wire.admin.GetInstanceGroup(admin_pb.GetInstanceGroupRequest(name=plan.name))
    stored = answer.instance_group
    version = stored.version
    reclaim = stored.cache_config.reclaim_strategy
    reclaim.trigger_strategy.used_percentage, reclaim.reclaim_step_size = mark, step_blocks * BLOCK_BYTES
    stored.version = version + 1
    request = admin_pb.UpdateInstanceGroupRequest(instance_group=stored, current_version=version)
    updated = await wire.admin.UpdateInstanceGroup(request)
    assert code_of(updated) == pb.OK, updated.header


async def metrics(wire: Wire) -> dict[tuple[str, str], float]:
    """Return every metric by its name and the values of its tags."""
    answer = await wire.admin.GetMetrics(admin_pb.GetMetricsRequest(), timeout=_SECONDS)
    found: dict[tuple[str, str], float] = {}
    for each in answer.metrics:
        kind = each.metric_value.WhichOneof("value")
        if kind != "string_value":
            tags = "/".join(tag.tag_value for tag in each.metric_tags)
            found[each.metric_name, tags] = float(getattr(each.metric_value, kind))
    return found


def sum_of(found: dict[tuple[str, str], float], name: str) -> float:
    """Return the sum of a metric over its tags."""
    return sum(value for (each, _), value in found.items() if each == name)


def command(manager: Manager, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `kvcm` against a manager."""
    url = f"http://127.0.0.1:{manager.settings['kvcm.service.admin_http_port']}"
    return subprocess.run(
        [sys.executable, "-m", "kvcm", *words, "--manager", url],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
