"""Known losses of a store, and when they happened: kept in the store, so that they outlive managers.

Managers of a shared store write the time into each of its parts twice a second. A dump, or a replica that lagged, has
an older time than one that was written: so the loss is noticed, also where only blocks were lost, and all that it can
have taken was acknowledged after the time that is there. How many blocks those were nobody can count.

1. The times of a part only grow, whatever the clocks of managers say.
2. The window of a loss begins at the time that the store has, and ends when the loss is noticed.
3. A manager's data directory has the times that it wrote last, beside the store: so an older copy of a store that is
   put in its place while no manager runs, or an empty one, is noticed by the next start. The leader keeps them beside
   the blocks of path storages, too: so is a data directory that is put back as a whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.store.store import ReadDocuments, Revision, Store, Table

__all__ = ["LossJournal", "utc"]

_TIME: Final = Struct(">d")
_ALIVE: Final = "alive"
_TABLE, _NAME = "losses", "last"
_SAME_LOSS_SECONDS: Final = 5.0  # in which what is noticed twice is one loss
_SAME_BLOCKS_SECONDS: Final = 60.0
_STEP_SECONDS: Final = 1e-3
_RECENT: Final = 8
_DEPLOYMENT: Final = "deployment"
_log = structlog.get_logger("kvcm.registry")


class _Entry(NamedTuple):
    """The known losses.

    Attributes:
        losses: how many there were.
        recent: the last of them: in words, by the unix seconds in which each was noticed first, ascending.
        evicted_keys: that servers dropped.
        missing_blocks: whose bytes a verification did not find.
    """

    losses: int = 0
    recent: Mapping[float, str] = MappingProxyType({})
    evicted_keys: int = 0
    missing_blocks: int = 0

    def merged(self, other: _Entry) -> _Entry:
        """Return what both know; of one loss what `other` says."""
        recent = sorted({**self.recent, **other.recent}.items())[-_RECENT:]
        return _Entry(
            max(self.losses, other.losses),
            dict(recent),
            max(self.evicted_keys, other.evicted_keys),
            max(self.missing_blocks, other.missing_blocks),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a place outside of a store knows of it.

    Attributes:
        deployment: id of the store that the times are of.
        times: by part: the last that was written there, unix seconds.
    """

    deployment: str = ""
    times: Mapping[str, float] = field(default_factory=dict)


class LossJournal:
    """The losses of one store.

    Args:
        clock: time source.
        store: keeps them; None where only this process does.
        beside: file that keeps the times that were written last; None for none.
        changes: counts the changes of a store that only this process changes: without a new one no time is written.
            None where others change it too.

    Attributes:
        is_ours: asked before the store is changed, which may be another deployment's by now.
    """

    def __init__(
        self,
        clock: Clock,
        store: Store | None = None,
        beside: Path | None = None,
        changes: Callable[[], int] | None = None,
    ) -> None:
        self._clock = clock
        self._store = store
        self._beside = beside
        self._changes = changes
        self._changes_then = -1
        self.is_ours: Callable[[], Awaitable[bool]] = _always
        self._deployment = ""
        self._writer = secrets.token_hex(4)
        self._begun: dict[str, tuple[float, float]] = {}  # by part: the time that it had at first, and was given then
        self._entry = _Entry()
        self._unstored: dict[float, int] = {}  # losses that the store does not know yet, and their missing blocks
        self._times: dict[str, float] = {}  # by part: the last that was written there
        self._missing: dict[str, tuple[float, int]] = {}  # by storage: when blocks were found missing first, how many
        self._loaded: Revision | None = None  # what `load` read last
        self._noticed_at = 0.0
        self._kept: Mapping[str, float] = {}  # times that the store has for good
        self._back_to: float | None = None  # since when changes are lost, of the loss that was noticed then

    @property
    def deployment(self) -> str:
        """Random id of the store, "" before `open`."""
        return self._deployment

    @property
    def losses(self) -> int:
        """How often managers saw that the store lost changes."""
        return self._entry.losses

    @property
    def last_loss(self) -> str:
        """The last losses and their windows of time, newest first; "" for none."""
        return "; before that: ".join(reversed([*self._entry.recent.values()]))

    @property
    def lost_at(self) -> float:
        """When the last loss was noticed, unix seconds."""
        return max(self._entry.recent, default=0.0)

    @property
    def evicted_keys(self) -> int:
        """How many keys the servers dropped by their policy."""
        return self._entry.evicted_keys

    @property
    def missing_blocks(self) -> int:
        """How many blocks verifications found to be without their bytes."""
        return self._entry.missing_blocks

    async def open(self, deployment: str = "", made_at: float = 0.0) -> None:
        """Compare the store with what the data directory knows of it, and go on with the losses that it knows.

        Args:
            deployment: id that a shared store has; one of its own has it in the store.
            made_at: when it got that, unix seconds.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if self._store is None:
            return
        known = (deployment, made_at) if deployment else await self._local_deployment(self._store.table(_TABLE))
        self._deployment, made_at = known
        seen = await asyncio.to_thread(self._read_beside)
        await self.load()
        if seen.deployment == self._deployment:
            self._times = dict(seen.times)
        elif seen.times and made_at >= max(seen.times.values()):
            self.note("it was emptied, or another one is in its place: all that it had is lost", 0.0)
        await self.beat()

    async def _local_deployment(self, table: Table) -> tuple[str, float]:
        document = await table.get(_DEPLOYMENT)
        with suppress(msgspec.MsgspecError):
            if document is not None:
                return msgspec.json.decode(document, type=tuple[str, float])
        new = (secrets.token_hex(8), self._clock.now())
        with suppress(StorageIOError):  # a full disk: the next start begins it
            await table.replace(_DEPLOYMENT, document, msgspec.json.encode(new))
        return new

    async def load(self) -> None:
        """Go on with the losses that the store knows, and keep there what it does not know yet.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if self._store is None:
            return
        table = self._store.table(_TABLE)
        document = await table.get(_NAME)
        known = _Entry()
        if document is not None:
            with suppress(msgspec.MsgspecError):
                known = msgspec.json.decode(document, type=_Entry)
        unknown = [blocks for at, blocks in self._unstored.items() if at not in known.recent]
        missing = known.missing_blocks + sum(unknown)
        mine = known._replace(losses=known.losses + len(unknown), missing_blocks=missing)
        await self._refuse_foreign()
        self._entry = mine.merged(self._entry)
        if self._entry != known and await table.replace(_NAME, document, msgspec.json.encode(self._entry)):
            self._unstored.clear()

    async def _follow(self) -> None:
        """Do `load` where there may be something new: another manager may have been the first to notice."""
        assert self._store is not None
        revision = self._store.table(_TABLE).revision
        if self._unstored or revision is None or revision != self._loaded:
            await self.load()
            self._loaded = revision

    async def _keep(self) -> None:
        """Put new losses into the store; one that is away gets them later."""
        if self._unstored:
            with suppress(StorageIOError):
                await self.load()

    async def beat(self) -> None:
        """Write the time, and notice a part that went back; what a store that is away does not take is tried again."""
        if self._store is None or (self._changes is not None and self._changes() == self._changes_then):
            return
        with suppress(StorageIOError):
            for part in await self._store.parts():
                with suppress(StorageIOError):  # a store that is away keeps no other one from its time
                    await self._beat(self._store.table(part), part)
            await self._follow()
            changes, times = self._changes() if self._changes is not None else -1, dict(self._times)
            await self._store.flush()  # or a process that is killed now leaves a time that the store never had
            self._kept, self._changes_then = times, changes
            await asyncio.to_thread(self._write_beside)

    async def _beat(self, table: Table, part: str) -> None:
        document = await table.get(_ALIVE)
        await self._refuse_foreign()
        there, mine = _decoded(document), self._times.get(part)
        if mine is not None and there < mine:
            self.note("changes are lost: the store went back in time", there)
        now = max(self._clock.now(), there + _STEP_SECONDS)
        if await table.replace(_ALIVE, document, _TIME.pack(now)):
            self._times[part] = now
            self._begun.setdefault(part, (there, now))

    async def _refuse_foreign(self) -> None:
        """Raise where the store is not ours. It is asked between reading and writing: a store that is put there after
        this has another document than was read, and keeps it."""
        if not await self.is_ours():
            raise StorageIOError("the registry of the metadata store is another one than it was")

    @property
    def seen(self) -> bytes:
        """What a place outside of the store is to know of it."""
        return msgspec.json.encode(_Seen(self._deployment, self._kept))

    def compare_place(self, content: bytes, place: str) -> None:
        """Compare what another place knew of the store when it was opened; what it got since then says nothing.

        Args:
            content: a `seen` of some manager.
            place: where it was, for people.
        """
        seen = _decoded_seen(content)
        times = seen.times.items() if seen.deployment == self._deployment else ()
        begun = [self._begun[part] for part, time in times if part in self._begun and _lacks(self._begun[part], time)]
        if begun:
            self.note(f"changes are lost: the store is older than {place} knows it", min(begun)[0])

    def _read_beside(self) -> _Seen:
        if self._beside is not None:
            with suppress(OSError):
                return _decoded_seen(self._beside.read_bytes())
        return _Seen()

    def _write_beside(self) -> None:
        """Keep the times; a disk that does not take them has older ones, which are no less true."""
        if self._beside is not None:
            new = self._beside.with_name(f"{self._beside.name}.{self._writer}.new")  # managers may share the directory
            with suppress(OSError):
                new.write_bytes(self.seen)
                new.replace(self._beside)

    async def compare(self, read: ReadDocuments) -> float | None:
        """Return the time that a server has which is not asked yet, None where it has none; one that is older than it
        was is a loss."""
        found = [(part, await read(part, [_ALIVE])) for part in self._times]
        times = {part: _decoded(documents[0]) for part, documents in found if documents is not None}
        behind = [time for part, time in times.items() if time < self._times[part]]
        if behind:
            self.note("changes are lost: a server of the store lacks the newest", min(behind))
        return min(times.values(), default=None)

    async def note_blocks(self, storage: str, blocks: int) -> None:
        """Note blocks whose bytes a verification of a storage did not find; those of one minute are one loss."""
        now = self._clock.now()
        noticed_at, before = self._missing.get(storage, (now, 0))
        if now - noticed_at > _SAME_BLOCKS_SECONDS:
            noticed_at, before = now, 0
        self._missing[storage] = (noticed_at, before + blocks)
        what = f"{before + blocks} blocks on storage {storage!r} have no bytes of theirs any more"
        self._add(what, noticed_at, blocks)
        await self._keep()

    def note(self, what: str, since: float) -> None:
        """Note a loss of changes that were acknowledged after a time, 0 for any."""
        now = self._clock.now()
        is_same = self._back_to is not None and now - self._noticed_at < _SAME_LOSS_SECONDS
        if not is_same or self._back_to is None:
            self._noticed_at, self._back_to = now, since
        self._back_to = min(since, self._back_to)
        self._add(f"{what} (acknowledged between {utc(self._back_to)} and {utc(now)})", self._noticed_at)
        _log.error("store_lost_changes", reason=what, sound_until=utc(since), noticed_at=utc(now))

    def _add(self, what: str, noticed_at: float, missing_blocks: int = 0) -> None:
        losses = self._entry.losses + (noticed_at not in self._entry.recent)
        missing = self._entry.missing_blocks + missing_blocks
        self._entry = self._entry.merged(_Entry(losses, {noticed_at: what}, missing_blocks=missing))
        self._unstored[noticed_at] = self._unstored.get(noticed_at, 0) + missing_blocks

    def note_evicted(self, keys: int) -> None:
        """Note that the servers dropped keys, whenever these were written."""
        self.note(f"{keys} keys were dropped by the servers of the store", 0.0)
        self._entry = self._entry._replace(evicted_keys=self._entry.evicted_keys + keys)


async def _always() -> bool:
    return True


def utc(seconds: float) -> str:
    """Return a time for people and logs."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _decoded(document: bytes | None) -> float:
    """Return a time, 0 where there is none."""
    return float(_TIME.unpack(document)[0]) if document is not None and len(document) == _TIME.size else 0.0


def _decoded_seen(content: bytes) -> _Seen:
    """Return what a place knows; nothing where it is damaged, or another release's."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content, type=_Seen)
    return _Seen()


def _lacks(begun: tuple[float, float], time: float) -> bool:
    """Return whether a part had a time, and had no more when it was opened. Later ones were written since then."""
    there, given = begun
    return there < time < given
