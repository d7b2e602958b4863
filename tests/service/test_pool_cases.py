"""The call of PoolService: a good request and each documented refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused
from test_transport_sites import Site

MIB = 1 << 20


def pool_spec(node_id: str = "node-1", capacity_bytes: int = MIB) -> Fields:
    """Return the fields of a pool's storage, without its name."""
    return {"tair_mem_pool": {"node_id": node_id, "capacity_bytes": capacity_bytes}}


def pool_report(name: str) -> Fields:
    """Return the fields of a report that says that such a pool is there."""
    fields = {"storage_unique_name": name, "node_id": "node-1", "generation": 2**64 - 1, "capacity_bytes": MIB}
    return {**fields, "valid_ms": 60_000}


def _report(site: Site, **changes: Any) -> Fields:
    return {**pool_report(site.storage(**pool_spec())), **changes}


GOOD: dict[str, Callable[[Site], Fields]] = {"PoolService.ReportPool": _report}


def _refused(rule: str, *texts: str, **changes: Any) -> Refused:
    return Refused(rule, lambda site: _report(site, **changes), "INVALID_ARGUMENT", texts)


REFUSED: dict[str, list[Refused]] = {
    "PoolService.ReportPool": [
        _refused("no storage", "storage_unique_name", "is required", storage_unique_name=""),
        _refused("unknown storage", "'nowhere'", "does not exist", storage_unique_name="nowhere"),
        _refused("no pool", "'nfs_01'", "file", "not a memory pool", storage_unique_name="nfs_01"),
        _refused("no node", "node_id", "is required", node_id=""),
        _refused("another node", "node_id is 'node-2'", "'node-1'", node_id="node-2"),
        _refused("no generation", "generation", "is required", generation=0),
        _refused("no capacity", "capacity_bytes", "is required", capacity_bytes=0),
        _refused("too small", f"capacity_bytes is {MIB - 1}", str(MIB), capacity_bytes=MIB - 1),
        _refused("a time before now", "valid_ms is -1", ">= 0", valid_ms=-1),
    ],
}
