"""Every call of CapacityService: a good request and each documented refusal (decision 9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused, invalid
from test_transport_sites import Site, unique


def _quota(name: str | None = None, **changes: Any) -> Fields:
    return {"global_quota": {"name": unique("quota") if name is None else name, "capacity_bytes": 1 << 40, **changes}}


def _a_quota(site: Site) -> Fields:
    name = unique("quota")
    site.api.ok("CapacityService.SetGlobalQuota", **_quota(name))
    return {"name": name}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "CapacityService.GetUsage": lambda site: {"instance_group": site.group()},
    "CapacityService.SetGlobalQuota": lambda _site: _quota(),
    "CapacityService.ListGlobalQuota": lambda _site: {},
    "CapacityService.RemoveGlobalQuota": _a_quota,
    "CapacityService.CollectGarbage": lambda site: {"instance_id": site.instance(), "dry_run": True},
    "CapacityService.ScrubStorage": lambda site: {"storage_unique_name": site.storage(), "dry_run": True},
}


def _bad_quota(rule: str, *texts: str, **changes: Any) -> Refused:
    return invalid(rule, lambda _site: _quota(**changes), *texts)


REFUSED: dict[str, list[Refused]] = {rpc: [] for rpc in GOOD} | {
    "CapacityService.GetUsage": [
        invalid("unknown group", lambda _site: {"instance_group": "nowhere"}, "'nowhere'", "does not exist"),
    ],
    "CapacityService.SetGlobalQuota": [
        invalid("no quota", lambda _site: {}, "SetGlobalQuota: {global_quota}", "required"),
        _bad_quota("no name", "name", name=""),
        _bad_quota("a name of 257 bytes", "name", "257", name="x" * 257),
        _bad_quota("negative capacity", "capacity_bytes", "-1", capacity_bytes=-1),
        _bad_quota("negative mark", "used_percentage", "-0.5", used_percentage=-0.5),
        _bad_quota("a mark that is no number", "used_percentage", "nan", used_percentage=math.nan),
    ],
    "CapacityService.RemoveGlobalQuota": [
        invalid("no name", lambda _site: {"name": ""}, "RemoveGlobalQuota: {name}", "required"),
        invalid("unknown name", lambda _site: {"name": "nowhere"}, "'nowhere'", "does not exist"),
    ],
    "CapacityService.CollectGarbage": [
        Refused("unknown instance", lambda _site: {"instance_id": "nobody"}, "INSTANCE_NOT_EXIST", ("'nobody'",)),
    ],
    "CapacityService.ScrubStorage": [
        invalid("no storage", lambda _site: {}, "ScrubStorage: {storage_unique_name}", "required"),
        invalid("unknown storage", lambda _site: {"storage_unique_name": "nowhere"}, "nowhere"),
        invalid("negative age", lambda site: {"storage_unique_name": site.storage(), "min_age_seconds": -1}, "-1"),
    ],
}
