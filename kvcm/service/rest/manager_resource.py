"""/v1/managers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from kvcm.model.nodes import METHODS
from kvcm.service.rest.documents import Document, Int64, Ratio
from kvcm.service.rest.routing import add_route, answer
from kvcm.service.vitals import ManagerView, VitalsWatch
from kvcm.service.vitals_history import Rates, quantile

__all__ = ["ManagerResource"]


class RatesDocument(Document):
    """Rates of a manager, over the last ten seconds or so."""

    requests_per_second: dict[str, float]
    """Answered requests of engines: `match`, `start`, `finish` and `other`."""
    errors_per_second: float
    """Those of them whose outcome was not OK."""
    hit_keys_per_second: float
    """Block keys that were hits."""
    missed_keys_per_second: float
    """Block keys that were misses."""
    hit_ratio: Ratio | None
    """Share of hits among the keys asked for; null while none are asked for."""
    match_p50_seconds: float | None
    """Median latency of lookups; null without lookups."""
    match_p99_seconds: float | None
    """99th percentile of that latency."""
    evicted_bytes_per_second: float
    """Evicted bytes; only the leader evicts."""
    refused_writes_per_second: float
    """Writes refused for want of space."""


class ManagerDocument(Document):
    """A manager."""

    node_id: str
    """Its id."""
    host: str
    """Where it is."""
    rpc_port: Int64
    """Port of gRPC calls of engines."""
    http_port: Int64
    """Port of HTTP calls of engines."""
    admin_rpc_port: Int64
    """Port of gRPC calls of operators."""
    admin_http_port: Int64
    """Port of HTTP calls of operators, these resources and the console."""
    is_leader: bool
    """Whether it runs the background duties."""
    is_self: bool
    """Whether it is the one that answers."""
    seen_at_ms: Int64
    """When it last published its vitals, unix time in ms."""
    version: str | None
    """Of its code. It and all later fields are null for a manager without vitals: of an earlier release, or just
    gone."""
    started_at_ms: Int64 | None
    """When it started, unix time in ms."""
    phase: str | None
    """`starting`, `serving`, `leaving` or `draining`."""
    open_sessions: Int64 | None
    """Write sessions that it opened and that are open."""
    loop_lag_seconds: float | None
    """How late its event loop was at most, over the last seconds."""
    rates: RatesDocument | None
    """Its rates; null until it has published vitals twice."""
    instances: Int64 | None
    """How many instances are assigned to it, so that their engines prefer it; null while they are thousands, or only
    the leader serves."""


class ManagersDocument(Document):
    """The managers of the deployment."""

    items: list[ManagerDocument]
    """Those that live, ordered by id."""


class ManagerResource:
    """Managers.

    Args:
        watch: collects their vitals.
    """

    def __init__(self, watch: VitalsWatch) -> None:
        self._watch = watch

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router=router, method="GET", path="/v1/managers", endpoint=self.list_managers, model=ManagersDocument)

    async def list_managers(self) -> Response:
        """List the managers of this deployment, as the one that answers sees them."""
        return answer({"items": [_document(each) for each in self._watch.managers()]})


def _document(view: ManagerView) -> dict[str, Any]:
    endpoint, vitals = view.endpoint, view.vitals
    return {
        "node_id": endpoint.node_id,
        "host": endpoint.host,
        "rpc_port": endpoint.meta_rpc_port,
        "http_port": endpoint.meta_http_port,
        "admin_rpc_port": endpoint.admin_rpc_port,
        "admin_http_port": endpoint.admin_http_port,
        "is_leader": view.is_leader,
        "is_self": view.is_self,
        "seen_at_ms": int(view.seen_at * 1000),
        "version": vitals and vitals.version,
        "started_at_ms": vitals and int(vitals.started_at * 1000),
        "phase": vitals and vitals.phase,
        "open_sessions": vitals and vitals.open_sessions,
        "loop_lag_seconds": vitals and vitals.loop_lag_seconds,
        "rates": view.rates and _rates(view.rates),
        "instances": view.instances,
    }


def _rates(rates: Rates) -> dict[str, Any]:
    groups = rates.groups.values()
    hits, missed = sum(each.hit_keys for each in groups), sum(each.missed_keys for each in groups)
    return {
        "requests_per_second": {name: rates.requests.get(name, 0.0) for name in METHODS},
        "errors_per_second": sum(rates.errors.values()),
        "hit_keys_per_second": hits,
        "missed_keys_per_second": missed,
        "hit_ratio": hits / (hits + missed) if hits + missed else None,
        "match_p50_seconds": quantile(0.5, rates.match_bounds, rates.match_counts),
        "match_p99_seconds": quantile(0.99, rates.match_bounds, rates.match_counts),
        "evicted_bytes_per_second": sum(each.evicted_bytes for each in groups),
        "refused_writes_per_second": sum(each.refused_writes for each in groups),
    }
