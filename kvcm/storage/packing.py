"""How parts become objects of a path-like storage: wire.md 8 under design.md decisions 1 and 12."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from kvcm.model.keys import key_hex
from kvcm.model.names import path_component
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Part

__all__ = ["Packed", "object_name", "owner_of", "pack", "slot_count"]

_LAST_COMPONENT = re.compile(r"([0-9a-f]{1,16})(?:_[0-9]+x[0-9a-f]{16})?\.[0-9A-Za-z]+")


class Packed(NamedTuple):
    """One object.

    Attributes:
        name: below the deployment's directory.
        size_bytes: of each of its slots.
        indexes: of the parts in the allocation, one per slot.
    """

    name: str
    size_bytes: int
    indexes: Sequence[int]


def pack(allocation: Allocation, keys_per_object: int) -> Iterator[Packed]:
    """Yield one object after the other.

    Parts of equal size are cut into chunks of `keys_per_object` in their given order; where sizes differ each spec is
    cut by itself, so that every slot of an object has the same size.

    Args:
        allocation: parts ordered by spec, then by key.
        keys_per_object: parts per object; 1 and less mean that every part is an object of its own.
    """
    parts, most = allocation.parts, max(1, keys_per_object)
    instance = path_component(allocation.instance_id)
    folders = {name: f"{instance}/{path_component(name)}/" for name in {part[0] for part in parts}}
    names = [folders[part[0]] + key_hex(part[1]) for part in parts]
    for indexes in _lists(parts):
        for start in range(0, len(indexes), most):
            chunk = indexes[start : start + most]
            name = _object_name(allocation.location_id, [names[i] for i in chunk])
            yield Packed(name, parts[chunk[0]].size_bytes, chunk)


def _lists(parts: Sequence[Part]) -> list[Sequence[int]]:
    if len({part[2] for part in parts}) <= 1:
        return [range(len(parts))] if parts else []
    by_spec = groupby(range(len(parts)), key=lambda i: parts[i].spec_name)
    return [list(indexes) for _, indexes in by_spec]


def _object_name(location_id: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]}.{location_id}"
    digest = blake2b("|".join(names).encode(), digest_size=8).hexdigest()
    return f"{names[0]}_{len(names)}x{digest}.{location_id}"


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
