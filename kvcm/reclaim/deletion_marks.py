"""What becomes of the record of a block whose locations are deleted, put off or expire: pure functions, so that a key
which lost a race is simply tried again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvcm.model.locations import BlockRecord, Location, LocationStatus

__all__ = ["due_later", "expired", "is_expired", "without"]


def without(old: BlockRecord | None, location_ids: Collection[str]) -> BlockRecord | None:
    """Return the record without locations, if they are still deleting; None without any."""
    if old is None:
        return None
    kept = tuple(
        location
        for location in old.locations
        if location.status is not LocationStatus.DELETING or location.id not in location_ids
    )
    if len(kept) == len(old.locations):
        return old
    return old._replace(locations=kept) if kept else None


def due_later(old: BlockRecord | None, location_ids: Collection[str], due: float) -> BlockRecord | None:
    """Return the record with another time from when bytes may go."""

    def later(location: Location) -> Location:
        if location.status is LocationStatus.DELETING and location.id in location_ids:
            return location._replace(deadline=due)
        return location

    return _changed(old, later)


def is_expired(location: Location, now: float) -> bool:
    """Return whether the time is up that the writer of a location gave."""
    return location.status is LocationStatus.SERVING and 0 < location.deadline <= now


def expired(old: BlockRecord | None, now: float, delay_seconds: float) -> BlockRecord | None:
    """Return the record with what expired marked as deleting; what is pinned expires when the pin ends."""

    def expire(location: Location) -> Location:
        if not is_expired(location, now):
            return location
        if location.pinned_until > now:
            return location._replace(deadline=location.pinned_until)
        return location._replace(status=LocationStatus.DELETING, deadline=now + delay_seconds)

    return _changed(old, expire)


def _changed(old: BlockRecord | None, change: Callable[[Location], Location]) -> BlockRecord | None:
    if old is None:
        return None
    locations = tuple(map(change, old.locations))
    return old if locations == old.locations else old._replace(locations=locations)
