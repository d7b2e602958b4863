"""The interface of a metadata store, beside the records of blocks: documents and leases.

One deployment has one store (design.md decision 6): the process's memory, a RocksDB in the data directory, or a
Redis/Valkey that several managers share. Registry, write sessions and read leases are *documents*: bytes under a name,
changed by compare-and-set only, so that of several managers exactly one wins and nothing is lost half way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcm.model.errors import NotReadyError

__all__ = [
    "MARK_BITS",
    "PART",
    "UNVERIFIED",
    "BlocksMovedError",
    "Lease",
    "LeaseState",
    "ReadDocuments",
    "Replacement",
    "Revision",
    "Store",
    "StoreGate",
    "StoreHealth",
    "Table",
]

PART = "deletions"
"""What the names of `Store.parts` begin with."""
UNVERIFIED = "unverified"
"""Table of the storages whose packed locations are to be verified before they are served."""
ReadDocuments = Callable[[str, Sequence[str]], Awaitable[Sequence[bytes | None] | None]]
"""Returns documents of a table on one server, in order; None where that server does not have the table."""


Revision = tuple[int, ...]
"""What was read is current as long as the revision is the one from before the read."""
MARK_BITS = 64
"""Lower bits of the version of a table that has a mark (`RedisTable`): they are random, those above count changes."""


@dataclass(slots=True)
class StoreGate:
    """Why a shared store is not to be used now; read before every call, for all parts of a manager.

    Attributes:
        closed: why nothing is asked and nothing changed, "" while all is well.
        full: why nothing new is stored, "" while all is well; what ends, renews or removes something goes on.
        moved: whether it is closed since what was there lies in another store by now.
    """

    closed: str = ""
    full: str = ""
    moved: bool = False


class BlocksMovedError(NotReadyError):
    """The blocks of an instance are on their way to another metadata store, or lie there by now. Calls wait for the end
    of that (`CacheManager`), so a client gets this one only where it takes too long.

    Args:
        text: the error.
        move: number of the move that they wait for, 0 where that is not known.
    """

    def __init__(self, text: str, move: int = 0) -> None:
        super().__init__(text)
        self.move = move


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """Faults of a store beside that it may not answer; nothing of a store of this manager alone.

    Attributes:
        closed: why it is not used, "" while it is.
        evicts: that its servers drop keys, "" while they do not.
        restorations: how often this manager put the registry back.
        losses: how often it saw that changes were lost.
        last_loss: the last losses and their windows of time, newest first; "" for nothing.
        lost_at: when the newest was noticed, unix seconds.
        new_servers: how often a server answered as a master that was not known as one.
        evicted_keys: keys that the servers dropped.
        missing_blocks: blocks whose bytes verifications of storages did not find.
    """

    closed: str = ""
    evicts: str = ""
    restorations: int = 0
    losses: int = 0
    last_loss: str = ""
    lost_at: float = 0.0
    new_servers: int = 0
    evicted_keys: int = 0
    missing_blocks: int = 0


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

    @property
    def due_from(self) -> float:
        """Unix seconds before which `due` finds nothing, as far as this manager was notified of changes; 0 where only
        the store knows. For what asks again and again: a change of another manager may be in flight for milliseconds.
        """

    @property
    def revision(self) -> Revision | None:
        """Another one after every change, as far as this manager was notified of it; None where only the store knows.
        As `due_from`."""

    async def version(self) -> int:
        """Return a number that grows with every change of the table. Of the registry it never comes again, also where
        the store went back to an earlier state and on from there."""


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

    @property
    def revision(self) -> Revision | None:
        """Another one after every change of the lease, its renewals and its end included, as far as this manager was
        notified of it; None where only the store knows."""

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
