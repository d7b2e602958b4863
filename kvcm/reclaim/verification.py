"""Verification of packed storages after a restore, a rollback of the store or of a storage, or a failover.

Metadata and packed files that are not of the same time fit together no more: a block's slot may be deleted, or another
block's. The storage's witness says so (`kvcm.storage.witness`). Every manager compares it with the store before it
serves: at its start, when a storage is opened, and when it meets a Redis server that it did not know as a master. An
import is not seen by that, so it marks the storages of its blocks.

1. While a storage is unverified, no manager answers its blocks, and none of its slots is deleted unless store and
   witness are of the same time. Writes go on.
2. A storage stays unverified until the leader has verified all of its locations after the last doubt. A mark in the
   store says so to all managers; without it, the witness does, whose number the store lacks until then. So whatever is
   killed, or rolled back again, the verification begins again.
3. The verification waits for deletions that are in flight: they may be of metadata that was rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import KvcmError, NotReadyError, StorageIOError
from kvcm.reclaim.garbage import GarbageCollector
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.file import FileStorage
from kvcm.store.numbers import DeletionNumber, DeletionNumbers, Witnessed
from kvcm.store.store import UNVERIFIED, ReadDocuments, Revision, Store, Table

__all__ = ["StorageVerification"]

_READ_SECONDS: Final = 2.0  # a storage that does not answer for so long is not served until it does
_SETTLE_SECONDS: Final = 1.0
_log = structlog.get_logger("kvcm.reclaim")


@dataclass(slots=True, eq=False)
class StorageVerification:
    """Keeps the blocks of unverified storages from lookups, and verifies them.

    Args:
        storages: the open storages.
        store: of the metadata.
        garbage: goes through all blocks.
        clock: time source.
        is_leader: whether this manager verifies.
        on_lost: called with a storage and the number of its blocks whose bytes a verification did not find.
    """

    storages: StorageDirectory
    store: Store
    garbage: GarbageCollector
    clock: Clock
    is_leader: Callable[[], bool]
    on_lost: Callable[[str, int], Awaitable[None]] | None = None
    _reasons: dict[str, str] = field(default_factory=dict)
    _ended: int = 0  # verifications
    _known_marks: tuple[Revision | None, Mapping[str, bytes]] = (None, MappingProxyType({}))  # of a revision

    @property
    def _marks(self) -> Table:
        return self.store.table(UNVERIFIED)

    async def _current_marks(self) -> Mapping[str, bytes]:
        """Return the marks; the store is asked where they may have changed."""
        revision = self._marks.revision
        if revision is None or revision != self._known_marks[0]:
            self._known_marks = revision, await self._marks.all()
        return self._known_marks[1]

    async def _replace_mark(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        self._known_marks = None, {}
        return await self._marks.replace(name, old, new)

    async def check(self) -> None:
        """Compare what was not compared yet, and follow the marks of other managers.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        doubts, ended = self.storages.doubts, self._ended
        marks = await self._current_marks()
        if ended != self._ended:
            return  # one of the marks may be gone
        for name, storage in self.storages.path_storages().items():
            if name in marks:
                self._hide(name, self._reasons.get(name, "it is marked as unverified"))
            elif name in self.storages.unverified:
                await self._compare(name, storage, doubts)

    async def _compare(self, name: str, storage: FileStorage, doubts: int) -> None:
        try:
            are_apart = await DeletionNumbers(self.store).are_apart(name, lambda: _read(storage))
        except _UnreadableError as error:
            self._hide(name, str(error))
            return
        if are_apart:
            self._hide(name, "it and the metadata are not of the same time")
            await self._replace_mark(name, None, secrets.token_bytes(16))
        elif doubts == self.storages.doubts:  # else another server answers by now
            self._show(name)

    async def compare_opened(self, name: str, storage: object) -> None:
        """Compare a storage that is being opened; one that does not fit, or does not answer, is left to `check`."""
        if not isinstance(storage, FileStorage) or storage.is_verified:
            return
        doubts = self.storages.doubts
        with contextlib.suppress(StorageIOError):
            is_marked = name in await self._marks.all()
            are_apart = await DeletionNumbers(self.store).are_apart(name, lambda: _read(storage))
            storage.is_verified = not is_marked and not are_apart and doubts == self.storages.doubts

    async def on_new_server(self, read: ReadDocuments, seconds: float) -> None:
        """Compare the storages with a server before it answers anything else, and hide those that fit no more, or do
        not answer in so many seconds."""
        open_now = self.storages.path_storages()
        reads = (_read(storage, seconds) for storage in open_now.values())
        for name, found in zip(open_now, await asyncio.gather(*reads, return_exceptions=True), strict=True):
            if isinstance(found, BaseException) or not await _fits(name, found or {}, read):
                self._hide(name, "a server of the store is not known to have what its packed files need")
                self.storages.doubts += 1

    def doubt(self, reason: str) -> None:
        """Hide all storages until they are compared again: the store lost changes."""
        for name in self.storages.path_storages():
            self._hide(name, f"the metadata store lost changes: {reason}")
        self.storages.doubts += 1

    def _hide(self, name: str, reason: str) -> None:
        if self._reasons.get(name) != reason:
            _log.warning("storage_unverified", storage=name, reason=reason)
        self._reasons[name] = reason
        self.storages.set_verified(name, is_verified=False)

    def _show(self, name: str) -> None:
        self._reasons.pop(name, None)
        self.storages.set_verified(name, is_verified=True)

    async def verify(self) -> None:
        """Verify marked storages, one after the other, as the leader. One that fails is tried at the next call.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        marks = await self._current_marks()
        for name, storage in self.storages.path_storages().items():
            try:
                if name in marks:
                    await self._verify(name, storage, marks[name])
            except KvcmError as error:
                _log.warning("verification_interrupted", storage=name, reason=str(error))

    async def _verify(self, name: str, storage: FileStorage, mark: bytes) -> None:
        begin, doubts = self.clock.now(), self.storages.doubts

        def is_current() -> bool:
            return self.is_leader() and doubts == self.storages.doubts

        await _read(storage)  # a storage that is away is not worth to go through all blocks
        if not await storage.witness.deletions_ended(_SETTLE_SECONDS):
            raise NotReadyError("deletions are in flight, which may be of metadata that was rolled back")
        report = await self.garbage.verify_slots(name, storage, is_current)
        if report.lost and self.on_lost is not None:
            await self.on_lost(name, report.lost)
        await storage.advance_witness(DeletionNumbers(self.store))
        self._ended += 1
        if not is_current():  # the numbers may be those of a server that took over just now
            await self._replace_mark(name, None, secrets.token_bytes(16))
        elif await self._replace_mark(name, mark, None):
            self._show(name)
            seconds = round(self.clock.now() - begin, 3)
            _log.info("storage_verified", storage=name, seconds=seconds, **report._asdict())


class _UnreadableError(StorageIOError):
    """A witness cannot be read now."""


async def _read(storage: FileStorage, seconds: float = _READ_SECONDS) -> Witnessed | None:
    try:
        async with asyncio.timeout(seconds):
            return await storage.read_witness()
    except (StorageIOError, TimeoutError) as error:
        raise _UnreadableError(str(error) or "no answer") from error


async def _fits(name: str, witnessed: Witnessed, read: ReadDocuments) -> bool:
    for part, seen in witnessed.items():
        documents = await read(part, [name])
        if documents is not None and DeletionNumber.decoded(documents[0]).number < seen:
            return False
    return True
