"""Values of pins, and how a pin is stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.names import check_name

__all__ = ["MAX_PIN_SECONDS", "HeldPlace", "Pin", "PinRequest"]

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


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    group: str
    owner: str
    deadline: float
    is_ended: bool
    keys: bytes
    sizes: bytes
    location_ids: list[str]


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
        places: what it holds, in the order of the prefix.
        is_ended: it ends before its deadline, and holds nothing any more.
    """

    id: str
    uid: int
    group: str
    owner: str
    deadline: float
    places: tuple[HeldPlace, ...]
    is_ended: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of what it holds."""
        return sum(place.size_bytes for place in self.places)

    @property
    def block_count(self) -> int:
        """Blocks that it holds."""
        return len({place.key for place in self.places})

    @property
    def last_key(self) -> int:
        """Last block of the prefix, 0 when it holds nothing."""
        return self.places[-1].key if self.places else 0

    def holding(self, places: tuple[HeldPlace, ...]) -> Pin:
        """Return the pin with other places."""
        return replace(self, places=places)

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
                array("q", (place.key for place in self.places)).tobytes(),
                array("q", (place.size_bytes for place in self.places)).tobytes(),
                [place.location_id for place in self.places],
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
            keys, sizes = array("q", stored.keys), array("q", stored.sizes)
            places = tuple(map(HeldPlace._make, zip(keys, stored.location_ids, sizes, strict=True)))
        except ValueError as error:  # msgspec's errors are such, too
            raise StorageIOError(f"a stored pin cannot be read: {error}") from error
        if stored.version != _FORMAT:
            raise StorageIOError(f"a stored pin has format {stored.version}, this release knows {_FORMAT}")
        return cls(pin_id, stored.uid, stored.group, stored.owner, stored.deadline, places, stored.is_ended)
