"""How parts become objects of a path-like storage: wire.md 8 under design.md decisions 1 and 12."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import add, attrgetter
from typing import NamedTuple

from kvcm.model.keys import keys_hex
from kvcm.model.names import path_component
from kvcm.model.uri import LocationUri
from kvcm.storage.backend import Allocation, Parts

__all__ = ["Packed", "object_name", "owner_of", "pack", "packed_uris", "slot_count"]

_LAST_COMPONENT = re.compile(r"([0-9a-f]{1,16})(?:_[0-9]+x[0-9a-f]{16})?\.[0-9A-Za-z]+")


class Packed(NamedTuple):
    """One object.

    Attributes:
        name: below the deployment's directory.
        size_bytes: of each of its slots.
        indexes: of the parts in the allocation, one per slot; neighbours.
    """

    name: str
    size_bytes: int
    indexes: range


def pack(allocation: Allocation, keys_per_object: int) -> Iterator[Packed]:
    """Yield one object after the other.

    Parts of equal size are cut into chunks of `keys_per_object` in their given order; where sizes differ each spec is
    cut by itself, so that every slot of an object has the same size.

    Args:
        allocation: parts ordered by spec, then by key.
        keys_per_object: parts per object; 1 and less mean that every part is an object of its own.
    """
    parts, most = Parts.of(allocation.parts), max(1, keys_per_object)
    instance, location_id, sizes = path_component(allocation.instance_id), allocation.location_id, parts.sizes
    folders = {name: f"{instance}/{path_component(name)}/" for name in set(parts.spec_names)}
    names = list(map(add, map(folders.__getitem__, parts.spec_names), keys_hex(parts.keys)))
    for indexes in _lists(parts):
        for start in range(indexes.start, indexes.stop, most):
            chunk = range(start, min(start + most, indexes.stop))
            yield Packed(_object_name(location_id, names[start : chunk.stop]), sizes[start], chunk)


def packed_uris(directory: LocationUri, allocation: Allocation, keys_per_object: int) -> list[str]:
    """Return one uri per part, in objects that are packed as `pack` says.

    Args:
        directory: uri of the deployment's directory, with a slash at its end; its size does not matter.
        allocation, keys_per_object: as of `pack`.
    """
    uris: list[str] = []
    for size_bytes, alike in groupby(pack(allocation, keys_per_object), key=attrgetter("size_bytes")):
        objects = list(alike)
        counts = [len(each.indexes) for each in objects] if keys_per_object > 1 else []
        uris += directory._replace(size=size_bytes).below([each.name for each in objects], counts)
    return uris


def _lists(parts: Parts) -> list[range]:
    if len(set(parts.sizes)) <= 1:
        return [range(len(parts))]
    lists, start = [], 0
    for _, names in groupby(parts.spec_names):
        lists.append(range(start, start := start + len(list(names))))
    return lists


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
