"""How parts become objects of a path-like storage: wire.md 8 under design.md decisions 1 and 12."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby

from kvcm.model.keys import key_hex
from kvcm.model.names import path_component
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part

__all__ = ["object_name", "owner_of", "pack", "slot_count"]

_LAST_COMPONENT = re.compile(r"([0-9a-f]{1,16})(?:_[0-9]+x[0-9a-f]{16})?\.[0-9A-Za-z]+")

Slot = tuple[int, str, int | None]
"""Index of the part in the allocation, object name below the cluster's directory, slot in the object (None = whole)."""


def pack(allocation: Allocation, keys_per_object: int) -> Iterator[list[Slot]]:
    """Yield the slots of one object after the other.

    Parts of equal size are cut into chunks of `keys_per_object` in their given order; where sizes differ each spec is
    cut by itself, so that every slot of an object has the same size.

    Args:
        allocation: parts ordered by spec, then by key.
        keys_per_object: parts per object; 1 and less mean that every part is an object of its own.
    """
    for indexes in _lists(allocation.parts):
        for start in range(0, len(indexes), max(1, keys_per_object)):
            chunk = indexes[start : start + max(1, keys_per_object)]
            name = _object_name(allocation, [allocation.parts[i] for i in chunk])
            yield [(i, name, slot if keys_per_object > 1 else None) for slot, i in enumerate(chunk)]


def _lists(parts: Sequence[Part]) -> list[list[int]]:
    if len({part.size_bytes for part in parts}) <= 1:
        return [list(range(len(parts)))] if parts else []
    by_spec = groupby(range(len(parts)), key=lambda i: parts[i].spec_name)
    return [list(indexes) for _, indexes in by_spec]


def _object_name(allocation: Allocation, parts: Sequence[Part]) -> str:
    instance = path_component(allocation.instance_id)
    first = f"{instance}/{path_component(parts[0].spec_name)}/{key_hex(parts[0].key)}"
    if len(parts) > 1:
        names = "|".join(f"{instance}/{path_component(part.spec_name)}/{key_hex(part.key)}" for part in parts)
        first = f"{first}_{len(parts)}x{blake2b(names.encode(), digest_size=8).hexdigest()}"
    return f"{first}.{allocation.location_id}"


def object_name(uri: str) -> str:
    """Return the name below its deployment's directory of the object that a part lies in. Memory of a pool has one of
    its own, that begins with a slash since it tells no instance.

    Raises:
        InvalidArgumentError: the uri cannot be read.
    """
    parsed = LocationUri.parse(uri)
    if parsed.range_id is not None:
        return f"/{parsed.storage}{parsed.path}.{parsed.range_id}"
    return "/".join((parsed.key or parsed.path).split("/")[-3:])


def owner_of(name: str) -> tuple[str, int] | None:
    """Return the instance, as a path component, and the first block of an object; None if no object is named so."""
    instance, _, rest = name.partition("/")
    found = _LAST_COMPONENT.fullmatch(rest.rpartition("/")[2])
    if found is None:
        return None
    key = int(found[1], 16)
    return instance, key - (1 << 64) if key >> 63 else key


def slot_count(object_name: str) -> int:
    """Return how many slots an object has: its name says so, for whoever deletes them, years and restarts later."""
    count = object_name.rpartition("/")[2].partition("_")[2].partition("x")[0]
    return int(count) if count.isascii() and count.isdigit() else 1
