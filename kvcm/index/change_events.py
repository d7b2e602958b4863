"""Changes of an index as events: which locations were marked as deleting, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcm.index.backends.backend import Change
from kvcm.model.instances import Instance
from kvcm.model.keys import unmixed
from kvcm.model.locations import Location, LocationStatus
from kvcm.telemetry.events import CACHE_MANAGER, CACHE_RECLAIMER, EventLog

__all__ = ["ChangeEvents"]


@dataclass(frozen=True, slots=True)
class ChangeEvents:
    """Publishes marked locations to an event log; builds nothing while no subscriber is active.

    Attributes:
        log: where events go.
    """

    log: EventLog

    def removed(self, instance: Instance, changes: Iterable[Change], reason: str) -> None:
        """Publish blocks removed on request; `reason` names the call."""
        self._publish(
            component=CACHE_MANAGER, event_type="removed", instance=instance, changes=changes, why={"reason": reason}
        )

    def expired(self, instance: Instance, changes: Iterable[Change], reason: str) -> None:
        """Publish expired blocks: `session` of a write session, `ttl` that a writer gave."""
        self._publish(
            component=CACHE_MANAGER, event_type="expired", instance=instance, changes=changes, why={"reason": reason}
        )

    def evicted(
        self, instance: Instance, changes: Iterable[Change], reason: str, policy: str, delay_seconds: float
    ) -> None:
        """Publish evicted blocks; also as CacheReclaimSubmit, the original's event.

        Args:
            instance: whose blocks.
            changes: of its index.
            reason: the limit that was exceeded.
            policy: name of the policy that selected them.
            delay_seconds: after which their bytes go.
        """
        if not self.log.is_active:
            return
        changes = list(changes)
        self._publish(
            component=CACHE_RECLAIMER,
            event_type="evicted",
            instance=instance,
            changes=changes,
            why={"reason": reason, "policy": policy},
        )
        marked = [(change.key, [location.id for location in _marked(change)]) for change in changes]
        keys, ids = [key for key, ids in marked if ids], [ids for _, ids in marked if ids]
        if keys:
            fields = {"block_keys": unmixed(keys), "location_ids": ids, "delay_us": round(delay_seconds * 1e6)}
            self.log.publish(
                source=instance.instance_id, component=CACHE_RECLAIMER, event_type="CacheReclaimSubmit", fields=fields
            )

    def _publish(
        self, component: str, event_type: str, instance: Instance, changes: Iterable[Change], why: dict[str, Any]
    ) -> None:
        """Publish one event per storage."""
        if not self.log.is_active:
            return
        by_storage: defaultdict[str, dict[int, list[Location]]] = defaultdict(dict)
        for change in changes:
            for location in _marked(change):
                by_storage[location.storage].setdefault(change.key, []).append(location)
        for storage, blocks in by_storage.items():
            fields = {
                "group": instance.instance_group_name,
                "storage": storage,
                "keys": unmixed(list(blocks)),
                "location_ids": [[location.id for location in locations] for locations in blocks.values()],
                "bytes": sum(location.size_bytes for locations in blocks.values() for location in locations),
            }
            self.log.publish(instance.instance_id, component, event_type, fields | why)


def _marked(change: Change) -> list[Location]:
    """Return the locations that a change marked as deleting."""
    before = change.old.locations if change.old is not None else ()
    if change.new is None:  # forgotten with its record
        return [location for location in before if location.status is not LocationStatus.DELETING]
    if change.new is change.old:
        return []
    deleting = {location.id for location in before if location.status is LocationStatus.DELETING}
    return [
        location
        for location in change.new.locations
        if location.status is LocationStatus.DELETING and location.id not in deleting
    ]
