"""What is known of the memory of a pool, by the reports of its host: a document of the metadata store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.memory_pool import pool_bytes
from kvcm.model.storages import TairMemPoolStorageSpec

__all__ = ["PoolReport", "PoolState"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a host tells of a pool.

    Attributes:
        node_id: the host.
        generation: made at random with the memory, never 0.
        capacity_bytes: that can be handed out.
        valid_ms: the pool counts as gone when it is not told of for so long; 0 is as the last report of this generation
            said, for good if none said anything.
    """

    node_id: str
    generation: int
    capacity_bytes: int
    valid_ms: int = 0

    def check(self, storage: str, spec: TairMemPoolStorageSpec) -> None:
        """Refuse a report that is not of the pool as it is configured.

        Raises:
            InvalidArgumentError: naming the field and what is allowed.
        """
        if self.node_id != spec.node_id:
            raise InvalidArgumentError(
                f"node_id is {self.node_id!r}, but storage {storage!r} is on node {spec.node_id!r}"
            )
        if not self.generation:
            raise InvalidArgumentError("generation is 0, must be the random number that was made with the memory")
        if self.capacity_bytes < pool_bytes(spec.capacity_bytes):
            raise InvalidArgumentError(
                f"capacity_bytes is {self.capacity_bytes}, storage {storage!r} is configured with "
                f"{spec.capacity_bytes}: make the pool at least as large, or add the storage with what it has"
            )
        if self.valid_ms < 0:
            raise InvalidArgumentError(f"valid_ms is {self.valid_ms}, must be >= 0 (0 is as the last report said)")


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    generation: int
    floor: int
    reported_at: float
    valid_ms: int
    purged: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


class PoolState(NamedTuple):
    """The memory of a pool, as last told.

    Attributes:
        generation: of the memory; 0 before anybody told of it.
        floor: the memory of everything with this stamp or a smaller one is gone.
        reported_at: unix seconds of the last report.
        valid_ms: the pool counts as gone when it is not told of for so long; 0 is never.
        purged: the floor up to which all locations were forgotten.
    """

    generation: int = 0
    floor: int = 0
    reported_at: float = 0.0
    valid_ms: int = 0
    purged: int = 0

    def encoded(self) -> bytes:
        """Return the state's document."""
        return _encoder.encode(_Document(_FORMAT, *self))

    @classmethod
    def decoded(cls, document: bytes | None) -> PoolState:
        """Read what `encoded` wrote; None is a pool that nobody told of.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        if document is None:
            return cls()
        try:
            stored = _decoder.decode(document)
        except ValueError as error:
            raise StorageIOError(f"the stored state of a memory pool cannot be read: {error}") from error
        if stored.version != _FORMAT:
            raise StorageIOError(
                f"the stored state of a memory pool has format {stored.version}, this release knows {_FORMAT}: "
                "upgrade it first"
            )
        return cls(stored.generation, stored.floor, stored.reported_at, stored.valid_ms, stored.purged)

    def why_not_usable(self, node_id: str, now: float) -> str:
        """Return why nothing can be written to the pool or read, "" while it can.

        Args:
            node_id: of the pool.
            now: unix seconds.
        """
        if not self.generation:
            return f"no host agent has told of the pool on node {node_id!r} yet"
        seconds = now - self.reported_at
        if self.valid_ms and seconds > self.valid_ms / 1000:
            return f"no host agent has told of the pool on node {node_id!r} for {seconds:.0f} s"
        return ""
