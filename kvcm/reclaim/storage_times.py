"""Keeps the times of the store beside the blocks of path storages, and compares them with it after a start.

What lies in the store and beside it may be put back together: a snapshot of a machine, a copy of a data directory. The
storages that its managers write to are elsewhere as a rule, and stay as they were.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvcm.model.errors import StorageIOError
from kvcm.registry.loss_journal import LossJournal
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.file import FileStorage

__all__ = ["StorageTimes"]

_SECONDS: Final = 2.0  # for a storage to answer


class StorageTimes:
    """The times on the storages of one manager.

    Args:
        storages: the open storages.
        journal: has the times of the store.

    Attributes:
        journal: as given.
    """

    def __init__(self, storages: StorageDirectory, journal: LossJournal) -> None:
        self._storages = storages
        self.journal = journal
        self._compared: set[str] = set()
        self._written: dict[str, bytes] = {}

    async def keep(self, *, is_leader: bool) -> None:
        """Compare each storage once, and write the times as the leader. One that does not answer is left to later."""
        storages = self._storages.path_storages().items()
        await asyncio.gather(*(self._keep(name, each, writes=is_leader) for name, each in storages))

    async def _keep(self, name: str, storage: FileStorage, *, writes: bool) -> None:
        with suppress(StorageIOError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                if name not in self._compared:
                    self.journal.compare_place(await storage.read_times() or b"", f"storage {name!r}")
                    self._compared.add(name)
                seen = self.journal.seen
                if writes and self._written.get(name) != seen:  # an idle manager gives the medium nothing to do
                    await storage.write_times(seen)
                    self._written[name] = seen
