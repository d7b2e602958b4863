"""Evictions: which parts of a block go, and how they are marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcm.model.instances import Instance
from kvcm.model.locations import BlockRecord, Location, LocationStatus, decode_chunk, encode_chunk
from kvcm.model.uri import LocationUri

__all__ = ["Eviction", "locations_to_evict", "marked", "thinned_size", "went"]

_THINNED = "-s"  # ends the id of what was split off a location


class Eviction(NamedTuple):
    """Parts of a block that go.

    Attributes:
        key: of the block.
        location_ids: locations that go.
        policy: name of the policy that chose the block.
        thin: specs that go from these locations, which keep the rest; empty when they go as a whole.
    """

    key: int
    location_ids: frozenset[str]
    policy: str = ""
    thin: frozenset[str] = frozenset()


def locations_to_evict(instance: Instance, serving: list[Location], wanted: Iterable[Location]) -> list[Location]:
    """Return what goes with the wanted locations of a block: those themselves, and the others where what is left of the
    block could not be read: specs of one spec group live and die together."""
    going = list(wanted)
    ids = {location.id for location in going}
    left = [location for location in serving if location.id not in ids]
    names = {name for location in left for name in location.spec_names}
    return going if not left or instance.is_readable_with(names) else [*going, *left]


def marked(old: BlockRecord | None, eviction: Eviction, now: float, due: float) -> BlockRecord | None:
    """Return the record with what goes marked as deleting; what is pinned or changed meanwhile stays as it is."""
    if old is None:
        return None
    locations: list[Location] = []
    for location in old.locations:
        locations += _parts(location, eviction, now, due)
    new = tuple(locations)
    return old if new == old.locations else old._replace(locations=new)


def _parts(location: Location, eviction: Eviction, now: float, due: float) -> Iterable[Location]:
    if location.id not in eviction.location_ids:
        return (location,)
    if location.status is not LocationStatus.SERVING or location.pinned_until > now:
        return (location,)
    if not eviction.thin or eviction.thin >= set(location.spec_names):
        return (location._replace(status=LocationStatus.DELETING, deadline=due),)
    return _split(location, eviction.thin, due) if eviction.thin & set(location.spec_names) else (location,)


def _split(location: Location, names: frozenset[str], due: float) -> tuple[Location, Location]:
    """Return a location without some specs, and one of those specs that is deleting."""
    decoded = decode_chunk(location.chunk)
    kept = [spec for spec in decoded.specs if spec.name not in names]
    going = [spec for spec in decoded.specs if spec.name in names]
    going_bytes = thinned_size(location, names)
    return (
        location._replace(
            chunk=encode_chunk(decoded.storage_type, len(kept), kept),
            spec_names=tuple(spec.name for spec in kept),
            size_bytes=location.size_bytes - going_bytes,
        ),
        location._replace(
            id=location.id + _THINNED,
            status=LocationStatus.DELETING,
            chunk=encode_chunk(decoded.storage_type, len(going), going),
            spec_names=tuple(spec.name for spec in going),
            size_bytes=going_bytes,
            deadline=due,
        ),
    )


def thinned_size(location: Location, names: frozenset[str]) -> int:
    """Return the bytes of some specs of a location."""
    if names >= set(location.spec_names):
        return location.size_bytes
    return sum(LocationUri.parse(spec.uri).size for spec in decode_chunk(location.chunk).specs if spec.name in names)


def went(old: BlockRecord | None, new: BlockRecord | None) -> list[Location]:
    """Return the locations of a block that a change marked as deleting."""
    before = {each.id for each in old.locations if each.status is LocationStatus.DELETING} if old is not None else set()
    after = new.locations if new is not None else ()
    return [each for each in after if each.status is LocationStatus.DELETING and each.id not in before]
