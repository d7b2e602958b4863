"""The interface of a metadata store, beside the records of blocks: documents and leases.

One deployment has one store (design.md decision 6): the process's memory, a RocksDB in the data directory, or a
Redis/Valkey that several managers share. Registry, write sessions and read leases are *documents*: bytes under a name,
changed by compare-and-set only, so that of several managers exactly one wins and nothing is lost half way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

__all__ = ["PART", "UNVERIFIED", "Lease", "LeaseState", "ReadDocuments", "Replacement", "Store", "Table"]

PART = "deletions"
"""What the names of `Store.parts` begin with."""
UNVERIFIED = "unverified"
"""Table of the storages whose packed locations are to be verified before they are served."""
ReadDocuments = Callable[[str, Sequence[str]], Awaitable[Sequence[bytes | None] | None]]
"""Returns documents of a table on one server, in order; None where that server does not have the table."""


class Replacement(NamedTuple):
    """A replacement of one document.

    Attributes:
        name: of the document.
        old: the expected current document; None for none.
        new: the new document, never due; None removes it.
    """

    name: str
    old: bytes | None
    new: bytes | None


class Table(Protocol):
    """Documents by name. Every call raises StorageIOError when the store cannot be asked; a change may have happened
    nevertheless then."""

    async def get(self, name: str) -> bytes | None:
        """Return a document, None when there is none of that name."""

    async def all(self) -> Mapping[str, bytes]:
        """Return every document by name."""

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        """Put `new` in the place of `old`, atomically.

        Args:
            name: of the document.
            old: the expected current document; None for none.
            new: the new document; None removes it.
            due: unix seconds when the document becomes due, 0 for never.

        Returns:
            Whether `old` was there. False: nothing is changed.
        """

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        """Do several replacements as one change: no reader sees a part of them, also after a crash.

        Args:
            replacements: each of another document; all in one part of the table.

        Returns:
            Whether every `old` was there. False: nothing is changed.
        """

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        """Remove `old`, and keep how it ended for a while, atomically. An outcome is no document: it is never due, no
        call but `outcome` returns it, and it expires by itself.

        Args:
            name: of the document.
            old: the expected current document.
            outcome: how it ended; in the place of an earlier one of that name.
            now: unix time.
            seconds: how long it is kept.

        Returns:
            Whether `old` was there. False: nothing is changed.
        """

    async def outcome(self, name: str, now: float) -> bytes | None:
        """Return how the document of that name ended, None where that is not known or was too long before `now`."""

    async def due(self, now: float, most: int) -> list[str]:
        """Return names of documents that are due at unix time `now`, the earliest first, at most so many."""

    async def version(self) -> int:
        """Return a number that grows with every change of the table."""


class LeaseState(NamedTuple):
    """The holder of a lease.

    Attributes:
        holder: node id, "" for none.
        token: fencing token: grows whenever another holder takes the lease.
    """

    holder: str
    token: int


class Lease(Protocol):
    """The right to run the background tasks; held by one manager at a time."""

    async def acquire(self, node_id: str, seconds: float) -> LeaseState:
        """Take the lease if it is free, renew it if `node_id` holds it, and return the holder.

        Raises:
            StorageIOError: the store failed.
        """

    async def get(self) -> LeaseState:
        """Return the holder of the lease, without taking it.

        Raises:
            StorageIOError: the store failed.
        """

    async def release(self, node_id: str) -> None:
        """Give the lease up if `node_id` holds it."""


class Store(Protocol):
    """One metadata store."""

    @property
    def is_shared(self) -> bool:
        """Whether other managers work on the same store."""

    def table(self, name: str, shard_count: int = 1) -> Table:
        """Return the table of that name.

        Args:
            name: lower-case letters.
            shard_count: parts that can lie on different nodes of a cluster. Names in one part share its version.
        """

    async def parts(self) -> Sequence[str]:
        """Return names of tables, one of them at least in each part of the store that a failover can take back to an
        earlier state by itself.

        Raises:
            StorageIOError: the store cannot be asked.
        """

    async def flush(self) -> None:
        """Return when every change applied so far is as durable as configured.

        Raises:
            StorageIOError: it could not be made so.
        """

    async def sync(self) -> None:
        """Return when every change applied so far survives a power cut, as far as this store can make it so at all:
        to be awaited before something is done elsewhere that must not outlive the change.

        Raises:
            StorageIOError: it could not be made so.
        """

    async def close(self) -> None:
        """Make everything durable and let go of files and connections."""
