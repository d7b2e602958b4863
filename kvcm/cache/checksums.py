"""Checksums of a session's parts: what its writer told at the finish, until it stands in the blocks' locations.

They are part of the decision how the session ends, so that whoever carries it out writes the same ones. They are kept
by name, since the blocks of one session need not have the same parts: a row per key with one number for every name that
was told at all, 8 bytes each, 0 where none was told. The manager never sees the bytes, so it believes its writers.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.locations import with_checksums

__all__ = ["CHECKSUM_BYTES", "NO_CHECKSUMS", "Checksums", "Told", "ToldLocation", "checked", "checksums_of"]

CHECKSUM_BYTES = 8

_PAGE_LOCATIONS = 16  # with a thousand parts each some ten milliseconds of the event loop
_PAGE_ROWS = 256
_NOTHING: dict[str, int] = {}
_ONLY_PART = ""  # stands for the part of a location that has one only; no spec has this name


class ToldLocation(NamedTuple):
    """What a writer told of one location.

    Attributes:
        specs: names and checksums of its parts; 0 is none.
        checksum: of its only part, when it has only one and `specs` has none for it; 0 is none.
    """

    specs: Sequence[tuple[str, int]]
    checksum: int = 0


Told = Sequence[ToldLocation]
"""Nothing, or one entry per location of the session."""


class Checksums(NamedTuple):
    """The checksums of a session.

    Attributes:
        names: of parts.
        values: a row per key of the session, in each one per name: 64 bits, 0 for none. Empty without names.
    """

    names: tuple[str, ...] = ()
    values: bytes = b""

    def by_key(self, keys: Sequence[int], begin: int, end: int) -> dict[int, dict[str, int]]:
        """Return what was told of the keys from `begin` to before `end`, by name, 0 for none; keys of which nothing was
        told are left out."""
        if not self.names:
            return {}
        row_bytes = len(self.names) * CHECKSUM_BYTES
        values = iter(array("Q", self.values[begin * row_bytes : end * row_bytes]))
        rows = {key: dict(zip(self.names, values, strict=False)) for key in keys[begin:end]}
        return {key: row for key, row in rows.items() if any(row.values())}


NO_CHECKSUMS = Checksums()


async def checksums_of(told: Told, decision: Sequence[bool], spec_names: Collection[str]) -> Checksums:
    """Return the checksums of those locations that were written. Other requests get their turn meanwhile.

    Args:
        told: one entry per location of the session; whatever it is when it holds no checksum, as other clients send it.
        decision: which of them were written; what is told of the others does not count.
        spec_names: of the instance.

    Raises:
        InvalidArgumentError: another number of entries, or a spec that is unknown or named twice.
    """
    rows: dict[int, dict[str, int]] = {}
    for position, location in enumerate(told):
        if position % _PAGE_LOCATIONS == 0:
            await asyncio.sleep(0)
        if not location.checksum and not any(checksum for _, checksum in location.specs):
            continue
        if len(told) != len(decision):
            raise InvalidArgumentError(
                f"locations has {len(told)} entries, must have none, or one per location that the start returned: "
                f"{len(decision)}"
            )
        if decision[position]:
            rows[position] = _row(position, location, spec_names)
    names = tuple(dict.fromkeys(name for row in rows.values() for name in row))
    if not names:
        return NO_CHECKSUMS
    values = array("Q")
    for position in range(len(decision)):
        if position % _PAGE_ROWS == 0:
            await asyncio.sleep(0)
        row = rows.get(position, _NOTHING)
        values.extend([row.get(name, 0) for name in names])
    return Checksums(names, values.tobytes())


def checked(chunk: bytes, spec_names: Sequence[str], told: Mapping[str, int]) -> bytes:
    """Return the chunk of a location that was written with what was told of its parts; what was told of others has no
    effect."""
    if told.get(_ONLY_PART) and len(spec_names) == 1:
        told = {spec_names[0]: told[_ONLY_PART]}
    return with_checksums(chunk, told) if told else chunk


def _row(position: int, told: ToldLocation, spec_names: Collection[str]) -> dict[str, int]:
    row: dict[str, int] = {}
    for name, checksum in told.specs:
        if name not in spec_names:
            raise InvalidArgumentError(
                f"locations[{position}] names the spec {name!r}, the instance has {sorted(spec_names)}"
            )
        if name in row:
            raise InvalidArgumentError(f"locations[{position}] names the spec {name!r} twice, must name each once")
        row[name] = checksum
    row = {name: checksum for name, checksum in row.items() if checksum}
    return row or ({_ONLY_PART: told.checksum} if told.checksum else {})
