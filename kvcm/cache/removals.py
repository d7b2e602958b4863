"""Removal of instances: incremental, and resumed by whoever leads after a crash.

The registry remembers the removal under the registration's number until no block of it is left, so the same id can be
registered anew at once and starts empty. Its blocks turn to deleting page by page; the deletion executor frees their
bytes and records like any others. An index is scanned a second time when all managers have heard of the removal, since
one that had not may have finished a write; and with several managers the end is only believed after a while.
"""

from __future__ import annotations

import structlog

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.pins import Pins
from kvcm.cache.read_modes import ReadModes
from kvcm.cache.removal import Remover
from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError
from kvcm.registry.registry import Registry

__all__ = ["InstanceRemovals"]

_PAGES_AT_ONCE = 64
_REASON = "RemoveInstance"
_GRACE_SECONDS = 60.0  # other managers hear of a removal within a second; a write takes seconds at most
_RARELY_SECONDS = 600.0

_log = structlog.get_logger("kvcm.cache")


class InstanceRemovals:
    """Instances that are being removed.

    Args:
        registry: remembers them.
        caches: their indexes.
        remover: marks their blocks.
        pins: give back what those of the instances take of budgets.
        read_modes: forget the instances.
        clock: time source.
        is_shared: whether other managers work on the store.
    """

    def __init__(
        self,
        registry: Registry,
        caches: OpenCaches,
        remover: Remover,
        pins: Pins,
        read_modes: ReadModes,
        clock: Clock,
        *,
        is_shared: bool,
    ) -> None:
        self._registry = registry
        self._caches = caches
        self._remover = remover
        self._pins = pins
        self._read_modes = read_modes
        self._clock = clock
        self._grace_seconds = _GRACE_SECONDS if is_shared else 0.0
        self._next_scan: dict[int, float] = {}
        self._empty_since: dict[int, float] = {}

    async def begin(self, cache: InstanceCache) -> None:
        """Mark the first blocks of an instance that was just removed: all of them, unless it is large."""
        await self._remover.remove_all(cache, most_pages=_PAGES_AT_ONCE, reason=_REASON)

    async def go_on(self) -> None:
        """Mark what is left of every removed instance, and forget those that have no blocks any more.

        Raises:
            KvcmError: of the first instance with which this was not possible; all have been tried.
        """
        errors: list[KvcmError] = []
        for removal in self._registry.instances.removals():
            try:
                await self._go_on(self._caches.of_removal(removal.instance, removal.placement))
            except KvcmError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _go_on(self, cache: InstanceCache) -> None:
        uid, now = cache.placement.uid, self._clock.now()
        await cache.index.refresh()
        if cache.index.key_count:
            self._empty_since.pop(uid, None)
            if now >= self._next_scan.get(uid, 0.0):
                await self._remover.remove_all(cache, reason=_REASON)
                await self._forget_pins(cache)
                pause = _RARELY_SECONDS if uid in self._next_scan else _GRACE_SECONDS
                self._next_scan[uid] = self._clock.now() + pause
            return
        since = self._empty_since.setdefault(uid, now)
        is_over = now >= since + self._grace_seconds
        if is_over or since == now:
            await self._forget_pins(cache)
        if is_over:
            await self._read_modes.forget(uid)
            await cache.index.drop()
            await self._registry.instances.forget_removal(uid)
            self._empty_since.pop(uid, None)
            self._next_scan.pop(uid, None)

    async def _forget_pins(self, cache: InstanceCache) -> None:
        try:
            await self._pins.forget(cache)
        except KvcmError as error:  # they end at their deadlines all the same
            _log.warning("pins_not_forgotten", registration=cache.placement.uid, reason=str(error))
