"""Values of pins, and how a pin is stored."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.names import check_name

__all__ = ["MAX_PIN_SECONDS", "HeldPlace", "HeldPlaces", "Pin", "PinRequest"]

MAX_PIN_SECONDS = 30 * 86400
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PinRequest:
    """What somebody wants to be kept.

    Attributes:
        keys: block keys of a prefix, in order.
        owner: who wants it, for people.
        ttl_seconds: for how long.
    """

    keys: Sequence[int]
    owner: str
    ttl_seconds: int

    def check(self) -> None:
        """Refuse what is missing or out of range.

        Raises:
            InvalidArgumentError: naming the field and what is allowed.
        """
        check_name("owner", self.owner)
        if not 1 <= self.ttl_seconds <= MAX_PIN_SECONDS:
            raise InvalidArgumentError(
                f"ttl_seconds is {self.ttl_seconds}, must be from 1 to {MAX_PIN_SECONDS} (30 days)"
            )


class HeldPlace(NamedTuple):
    """A location that a pin holds."""

    key: int
    location_id: str
    size_bytes: int


class HeldPlaces(NamedTuple):
    """What a pin holds, in the order of the prefix. Packed, since ending one pin reads all those of its instance.

    Attributes:
        keys: of the blocks, as 64-bit numbers.
        sizes: in bytes, likewise.
        location_ids: one for each.
    """

    keys: bytes
    sizes: bytes
    location_ids: tuple[str, ...]

    @classmethod
    def of(cls, places: Sequence[HeldPlace]) -> HeldPlaces:
        """Pack places."""
        return cls(
            array("q", (place.key for place in places)).tobytes(),
            array("q", (place.size_bytes for place in places)).tobytes(),
            tuple(place.location_id for place in places),
        )

    def pages(self, size: int) -> Iterator[list[tuple[int, str]]]:
        """Yield keys with location ids, so many at a time."""
        keys = array("q", self.keys)
        for start in range(0, len(keys), size):
            yield list(zip(keys[start : start + size], self.location_ids[start : start + size], strict=True))


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    group: str
    owner: str
    deadline: float
    is_ended: bool
    keys: bytes
    sizes: bytes
    location_ids: tuple[str, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class Pin:
    """A pin.

    Attributes:
        id: names it; no secret.
        uid: number of the instance.
        group: the instance's group, whose budget it takes.
        owner: who pinned.
        deadline: unix seconds.
        held: what it holds.
        is_ended: it ends before its deadline, and holds nothing any more.
    """

    id: str
    uid: int
    group: str
    owner: str
    deadline: float
    held: HeldPlaces
    is_ended: bool = False

    @property
    def places(self) -> tuple[HeldPlace, ...]:
        """What it holds, in the order of the prefix."""
        keys, sizes = array("q", self.held.keys), array("q", self.held.sizes)
        return tuple(map(HeldPlace._make, zip(keys, self.held.location_ids, sizes, strict=True)))

    @property
    def size_bytes(self) -> int:
        """Bytes of what it holds."""
        return sum(array("q", self.held.sizes))

    @property
    def block_count(self) -> int:
        """Blocks that it holds."""
        return len(set(array("q", self.held.keys)))

    @property
    def last_key(self) -> int:
        """Last block of the prefix, 0 when it holds nothing."""
        return array("q", self.held.keys)[-1] if self.held.keys else 0

    def holding(self, places: Sequence[HeldPlace]) -> Pin:
        """Return the pin with other places."""
        return replace(self, held=HeldPlaces.of(places))

    def encoded(self) -> bytes:
        """Return the pin's document; its id is the document's name."""
        return _encoder.encode(
            _Document(
                _FORMAT,
                self.uid,
                self.group,
                self.owner,
                self.deadline,
                self.is_ended,
                *self.held,
            )
        )

    @classmethod
    def decoded(cls, pin_id: str, document: bytes) -> Pin:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: it is damaged or of another release.
        """
        try:
            stored = _decoder.decode(document)
        except msgspec.MsgspecError as error:
            raise StorageIOError(f"a stored pin cannot be read: {error}") from error
        if stored.version != _FORMAT:
            raise StorageIOError(f"a stored pin has format {stored.version}, this release knows {_FORMAT}")
        held = HeldPlaces(stored.keys, stored.sizes, stored.location_ids)
        if not len(held.keys) == len(held.sizes) == 8 * len(held.location_ids):
            raise StorageIOError("a stored pin cannot be read: it has not one size and one location id for each key")
        return cls(pin_id, stored.uid, stored.group, stored.owner, stored.deadline, held, stored.is_ended)
