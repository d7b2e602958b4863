"""InsightService: sessions, blocks, curves and alerts, for people. Thin translation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcm.cache.chain_explorer import ChainExplorer, summarize_chain
from kvcm.cache.instance_cache import InstanceCache, batches
from kvcm.cache.manager import CacheManager
from kvcm.model.clock import Clock
from kvcm.model.principals import call_context
from kvcm.protocol.kvcm.v1 import insight_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.service.alert_watch import AlertWatch
from kvcm.service.alerts import storage_trouble
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.meta_api import block_keys_of
from kvcm.service.request_limits import RequestLimits
from kvcm.service.translate import fill
from kvcm.service.usage_report import UsageView
from kvcm.service.usage_values import StorageStatus
from kvcm.storage.directory import StorageDirectory

__all__ = ["Curve", "Curves", "InsightApi"]

_SERVICE = "kvcm.v1.InsightService"
_FILL_BATCH = 128
_OFF = "lookups are not sampled: set kvcm.optimizer.sampled_keys to 8192 and restart the managers"
_TOO_MANY = "lookups of 64 other groups are sampled already: this one's are not"
_NO_LOOKUPS_YET = "nothing was asked of this manager for it since it started"


class Curve(Protocol):
    """The estimated hit ratios of one group by its capacity."""

    @property
    def since(self) -> float: ...

    @property
    def lookups(self) -> int: ...

    @property
    def sampled_keys(self) -> int: ...

    @property
    def attainable_ratio(self) -> float: ...

    @property
    def points(self) -> Sequence[tuple[int, float]]: ...

    @property
    def targets(self) -> Sequence[tuple[float, int]]: ...

    def ratio_at(self, size: int) -> float:
        """Return the share of lookups that so many bytes find."""


class Curves(Protocol):
    """Estimates curves of groups from their lookups."""

    @property
    def is_on(self) -> bool:
        """Whether lookups are counted at all."""

    @property
    def is_full(self) -> bool:
        """Whether no further group is counted."""

    def curve(self, group_name: str) -> Curve | None:
        """Return the curve of a group, None while there is none."""


@dataclass(frozen=True, slots=True)
class InsightApi:
    """Handlers of the calls for people.

    Attributes:
        cache: blocks and sessions.
        registry: the configuration.
        storages: the open storages.
        limits: sizes of requests.
        alerts: of this manager.
        view: of the usage.
        curves: estimated hit ratios.
        clock: time source.
    """

    cache: CacheManager
    registry: Registry
    storages: StorageDirectory
    limits: RequestLimits
    alerts: AlertWatch
    view: UsageView
    curves: Curves
    clock: Clock

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""

        def call(name: str, handler: Any) -> Call:
            return Call(
                service=_SERVICE,
                name=name,
                plane=Plane.ADMIN,
                request_type=getattr(pb, f"{name}Request"),
                response_type=getattr(pb, f"{name}Response"),
                handler=handler,
            )

        return [
            call("ListSessions", self.list_sessions),
            call("ExploreBlocks", self.explore_blocks),
            call("GetCurve", self.get_curve),
            call("ListAlerts", self.list_alerts),
        ]

    async def list_sessions(self, request: Any) -> Reply:
        """List the open write sessions of the groups that the principal may see."""
        if request.instance_group:
            self.registry.groups.get(request.instance_group)
        if request.instance_id:
            self.cache.cache(request.instance_id)
        principal = call_context.get().principal

        def wants(cache: InstanceCache) -> bool:
            group, instance_id = cache.instance.instance_group_name, cache.instance.instance_id
            return (
                principal.covers(group)
                and request.instance_group in {"", group}
                and request.instance_id in {"", instance_id}
            )

        message = pb.ListSessionsResponse()
        for page in batches(await self.cache.open_sessions.find_all(wants), _FILL_BATCH):
            for session in page:
                fill(message.sessions.add(), session)
            await asyncio.sleep(0)
        return Reply(message)

    async def explore_blocks(self, request: Any) -> Reply:
        """Return every block of a chain."""
        cache = self.cache.cache(request.instance_id)
        keys = await block_keys_of("ExploreBlocks", request, cache.instance)
        explorer = ChainExplorer(cache, self.storages.everywhere, self._trouble_of, self.clock.now)
        blocks = await explorer.explore(keys)
        message = pb.ExploreBlocksResponse()
        fill(message.summary, summarize_chain(blocks, cache.instance.block_size))
        for page in batches(blocks, _FILL_BATCH):
            for block in page:
                fill(message.blocks.add(), block)
            await asyncio.sleep(0)
        return Reply(message)

    def _trouble_of(self, storage: str) -> str:
        health = self.storages.health(storage)
        statuses = [StorageStatus.of(config, health) for config in self.registry.storages.existing([storage])]
        return storage_trouble(statuses[0] if statuses else None) or "is not readable from here"

    async def get_curve(self, request: Any) -> Reply:
        """Return the hit ratio of a group by its capacity."""
        require(request.instance_group, "GetCurve.instance_group")
        group = self.registry.groups.get(request.instance_group)
        curve = self.curves.curve(group.name)
        if curve is None or not curve.lookups:
            why_not = _OFF if not self.curves.is_on else _TOO_MANY if curve is None and self.curves.is_full else ""
            return Reply(pb.GetCurveResponse(why_not=why_not or _NO_LOOKUPS_YET))
        (usage,) = (await self.view.current(group.name)).groups or (None,)
        message = pb.GetCurveResponse(
            is_known=True,
            since_ms=int(curve.since * 1000),
            lookups=curve.lookups,
            sampled_keys=curve.sampled_keys,
            attainable_ratio=curve.attainable_ratio,
            points=[pb.CurvePoint(bytes=size, hit_ratio=ratio) for size, ratio in curve.points],
            targets=[
                pb.CurveTarget(part=part, hit_ratio=part * curve.attainable_ratio, bytes=size)
                for part, size in curve.targets
            ],
        )
        total = usage.total if usage is not None else None
        kept = group.quota.capacity if total is None or total.high_mark_bytes < 0 else total.high_mark_bytes
        message.present.quota_bytes, message.present.kept_bytes = group.quota.capacity, kept
        message.present.used_bytes = total.used_bytes if total is not None else 0
        message.present.predicted_ratio = curve.ratio_at(kept)
        return Reply(message)

    async def list_alerts(self, request: Any) -> Reply:
        """List the alerts."""
        message = pb.ListAlertsResponse()
        for alert in await self.alerts.alerts(request.instance_group):
            fill(message.alerts.add(), alert)
        return Reply(message)
