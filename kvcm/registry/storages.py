"""The configured storages. A storage that does not open where it is added is refused and not stored. An event report
storage has no medium: it is configured, and never open.

Configured and open storages differ: another manager may have added a storage that this one cannot
reach. It stays closed, its locations count as absent, and it is tried again at refreshes, less and less often.
Only adding and updating create anything on a medium: one that is opened later may not be mounted yet.

A drain, and a removal while there are still blocks that lay on the storage, stand in the storage's own document: so of
a drain, a removal and an addition at the same time each sees the other, and the name of a storage that is still to be
forgotten is not given to another medium (`drains`; carried out by `kvcm.cache.drains`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import structlog

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageConfig, StorageType, TairMemPoolStorageSpec
from kvcm.registry.document_cache import DocumentCache, Flush
from kvcm.registry.secrets import restored
from kvcm.registry.validation import check_storage, check_storages_of_named_group

__all__ = [
    "ClosedStorages",
    "StorageDrain",
    "StorageOpener",
    "StorageRegistry",
    "check_name_is_free",
    "check_same_type",
    "medium_of",
]

# What may become of a storage's config, and what of it has to be opened.


def medium_of(config: StorageConfig) -> StorageConfig:
    """Return what has to be opened: switches and limit make no difference."""
    return replace(config, is_available=True, capacity_bytes=0, used_percentage=0.0, draining_since=0.0)


def _limit_of(config: StorageConfig) -> tuple[int, float]:
    """Return what can be changed without opening anything."""
    return config.capacity_bytes, config.used_percentage


def check_name_is_free(config: StorageConfig, known: StorageConfig | None) -> None:
    """Refuse to add a storage whose name is taken.

    Raises:
        DuplicateEntityError: the name is taken.
        NotReadyError: a storage of that name and another medium is still to be forgotten.
    """
    name = config.global_unique_name
    if known is not None and not known.is_removed:
        raise DuplicateEntityError(f"storage {name!r} exists; use UpdateStorage to change it")
    if known is not None and known.spec != config.spec:
        raise NotReadyError(
            f"storage {name!r} is being forgotten, there are still blocks that lay on it: until ListDrain names it no "
            "more it can only be added with the medium that it had; try again, or take another name"
        )


def check_same_type(config: StorageConfig, known: StorageConfig) -> None:
    """Refuse to make another thing of a storage than it is.

    Raises:
        InvalidArgumentError: its type would change, or the memory of a pool.
    """
    if config.storage_type is not known.storage_type:
        raise InvalidArgumentError(
            f"storage {config.global_unique_name!r} is of type {known.storage_type.kind} and holds blocks of "
            f"that: to make it {config.storage_type.kind}, remove it and add it again"
        )
    _check_same_pool(config, known)


def _check_same_pool(config: StorageConfig, known: StorageConfig) -> None:
    """The memory of a pool is divided by its size, and addresses in it name its node."""
    if not isinstance(config.spec, TairMemPoolStorageSpec) or not isinstance(known.spec, TairMemPoolStorageSpec):
        return
    before, wanted = ((spec.node_id, spec.capacity_bytes) for spec in (known.spec, config.spec))
    if before != wanted:
        raise InvalidArgumentError(
            f"storage {config.global_unique_name!r} is a pool of {before[1]} bytes on node {before[0]!r}, wanted are "
            f"{wanted[1]} bytes on node {wanted[0]!r}: to change that, remove it and add it again"
        )


def _existing_storage(name: str, known: StorageConfig | None) -> StorageConfig:
    """Return a storage that is there.

    Raises:
        InvalidArgumentError: there is no such storage.
    """
    if known is None or known.is_removed:
        raise InvalidArgumentError(f"storage {name!r} does not exist")
    return known


_log = structlog.get_logger("kvcm.registry")
_MOST_ROUNDS_BETWEEN_TRIES = 256


class StorageOpener(Protocol):
    """Opens and closes storages; the registry decides which."""

    def prepare(self, config: StorageConfig, *, is_new: bool) -> Any:
        """Open a storage's medium, which may block, and change nothing else; raises KvcmError if it cannot.

        Only for one that is being configured, `is_new`, anything may be created on the medium: one that was configured
        earlier may just not be mounted here.
        """

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> Any:
        """Do `prepare` in a thread that nothing else waits for: a medium may hang for ever."""

    def discard(self, prepared: Any) -> None:
        """Close a prepared medium that will not be installed."""

    def install(self, config: StorageConfig, prepared: Any) -> None:
        """Install a prepared medium in place of an open storage of that name."""

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make an open storage available for reads and writes, or not."""

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Keep new blocks off an open storage, or take them again."""

    def close(self, name: str) -> None:
        """Close a storage."""


class StorageDrain(NamedTuple):
    """A storage that is being emptied, or that was removed and is still to be forgotten.

    Attributes:
        name: of the storage.
        started_at: unix seconds when that was asked for.
        is_removal: it was removed.
    """

    name: str
    started_at: float
    is_removal: bool


class _Failure(NamedTuple):
    """A storage that did not open: how often, and the round of refreshes in which it is tried again."""

    tries: int
    again_in_round: int


class StorageRegistry:
    """Storages by their unique name.

    Args:
        opener: opens added storages.
        cache: where the configs are kept.
        flush: returns when all changes are durable.
        groups: returns the groups, which may name a storage before it is added.
    """

    def __init__(
        self,
        opener: StorageOpener,
        cache: DocumentCache[StorageConfig],
        flush: Flush,
        groups: Callable[[], Iterable[InstanceGroup]] = tuple,
    ) -> None:
        self._opener = opener
        self.compare: Callable[[str, Any], Awaitable[None]] = _compare_later
        self._cache = cache
        self._flush = flush
        self._groups = groups
        self._open: dict[str, StorageConfig] = {}
        # By medium, so that a corrected config does not wait for the hopeless one of that name.
        self._opening: dict[StorageConfig, asyncio.Task[None]] = {}
        self._failures: dict[StorageConfig, _Failure] = {}
        self._round = 0
        self._drains: tuple[int, Sequence[StorageDrain]] = (-1, ())  # as of a generation of the shelf

    async def add(self, config: StorageConfig) -> None:
        """Add and open a storage, before the manager serves: opening its medium blocks.

        One that was removed and is not forgotten yet comes back as it was, with the rest of its blocks.

        Raises:
            InvalidArgumentError: a field is missing or malformed.
            DuplicateEntityError: the name is taken.
            NotReadyError: a storage of that name and another medium is still to be forgotten.
            KvcmError: it cannot be opened, or the store cannot be asked.
        """
        config = await self._new(config)
        await self._add(config, None if config.is_event_report else self._opener.prepare(config, is_new=True))

    async def add_in_background(self, config: StorageConfig) -> None:
        """Do `add` without holding up other requests."""
        config = await self._new(config)
        await self._add(config, await self._prepare(config))

    async def update(self, config: StorageConfig) -> None:
        """Replace a storage's config; the old one stays in force when the new one cannot be opened, and secrets that
        the new one lacks stay. Blocks as `add`.

        Raises:
            InvalidArgumentError: a field is malformed, there is no such storage, or its type would change.
            KvcmError: it cannot be opened, or the store cannot be asked.
        """
        config, is_only_limited = await self._changing(config)
        if is_only_limited:
            await self._replace_limit(config)
        else:
            await self._replace(config, None if config.is_event_report else self._opener.prepare(config, is_new=True))

    async def update_in_background(self, config: StorageConfig) -> None:
        """Do `update` without holding up other requests."""
        config, is_only_limited = await self._changing(config)
        if is_only_limited:
            await self._replace_limit(config)
        else:
            await self._replace(config, await self._prepare(config))

    async def _prepare(self, config: StorageConfig) -> Any:
        return None if config.is_event_report else await self.prepare(config)

    async def _new(self, config: StorageConfig) -> StorageConfig:
        """Return the config with its secrets, if it may be added."""
        check_storage(config)
        self._check_groups(config)
        known = await self._cache.read(config.global_unique_name)
        config = restored(config, known)
        check_name_is_free(config, known)
        return config

    def _check_groups(self, config: StorageConfig) -> None:
        """Refuse a storage whose type does not fit the groups that name it already."""
        name = config.global_unique_name
        for group in self._groups():
            if name in group.storage_candidates or name in group.event_report_storage_candidates:
                check_storages_of_named_group(group, lambda other: config if other == name else self.find(other))

    async def _changing(self, config: StorageConfig) -> tuple[StorageConfig, bool]:
        """Return the config with its secrets, and whether only its limit changes: then nothing has to be opened, which
        its medium may not allow now."""
        check_storage(config)
        known = _existing_storage(config.global_unique_name, await self._cache.read(config.global_unique_name))
        config = restored(config, known)
        return config, _limit_of(config) != _limit_of(known) and medium_of(config) == medium_of(known)

    async def _add(self, config: StorageConfig, prepared: Any) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            check_name_is_free(config, known)  # another manager may have added it meanwhile
            return config

        await self._cache.change(config.global_unique_name, decide)
        await self._changed(config, prepared)

    async def _replace_limit(self, config: StorageConfig) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            known = _existing_storage(config.global_unique_name, known)
            return replace(known, capacity_bytes=config.capacity_bytes, used_percentage=config.used_percentage)

        await self._put(config.global_unique_name, decide)

    async def _replace(self, config: StorageConfig, prepared: Any) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            known = _existing_storage(config.global_unique_name, known)
            check_same_type(config, known)
            return replace(config, is_available=known.is_available, draining_since=known.draining_since)

        await self._cache.change(config.global_unique_name, decide)
        await self._changed(config, prepared)

    async def _changed(self, config: StorageConfig, prepared: Any) -> None:
        self._install(config, prepared)
        await self._flush()

    async def prepare(self, config: StorageConfig) -> Any:
        """Open the medium of a storage that is about to be configured, without holding up other requests.

        Raises:
            KvcmError: it cannot be opened.
        """
        return await self._opener.prepare_in_thread(config, is_new=True)

    def apply(self, config: StorageConfig, prepared: Any = None) -> None:
        """Apply a stored config to the open storage, with its medium if that had to be opened."""
        if prepared is not None:
            self._install(config, prepared)
        self._sync_open(config.global_unique_name)

    def discard(self, prepared: Any) -> None:
        """Close a medium that was opened in vain."""
        self._opener.discard(prepared)

    async def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make a storage available for reads and writes, or not.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """
        await self._put(name, lambda known: replace(_existing_storage(name, known), is_available=enabled))

    async def retire(self, name: str, now: float) -> None:
        """Remove a storage at once; its locations count as missing from now on. Its name is kept from other media until
        `forget`: there are blocks that lie on it. An event report storage has none, and is gone at once.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: StorageConfig | None) -> StorageConfig | None:
            known = _existing_storage(name, known)
            return None if known.is_event_report else replace(known, removed_at=now, draining_since=0.0)

        await self._put(name, decide)

    async def forget(self, drain: StorageDrain) -> None:
        """Forget a removed storage of which nothing is left, unless it was added again meanwhile.

        Raises:
            StorageIOError: the store cannot be asked.
        """

        def decide(known: StorageConfig | None) -> StorageConfig | None:
            is_it = known is not None and known.is_removed and known.removed_at == drain.started_at
            return None if is_it else known

        await self._put(drain.name, decide)

    async def drain(self, name: str, now: float) -> None:
        """Begin to empty a storage: it takes no writes from now on. Doing this again changes nothing.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: StorageConfig | None) -> StorageConfig:
            known = _existing_storage(name, known)
            if known.is_event_report:
                raise InvalidArgumentError(
                    f"storage {name!r} is of type {known.storage_type.kind}: no bytes lie on it that could be drained"
                )
            return known if known.is_draining else replace(known, draining_since=now)

        await self._put(name, decide)

    async def cancel_drain(self, name: str) -> None:
        """Let a storage take writes again; fine without a drain.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """
        await self._put(name, lambda known: replace(_existing_storage(name, known), draining_since=0.0))

    async def _put(self, name: str, decide: Callable[[StorageConfig | None], StorageConfig | None]) -> None:
        """Change what needs no medium."""
        await self._cache.change(name, decide)
        self._sync_open(name)
        await self._flush()

    def drains(self) -> list[StorageDrain]:
        """Return the storages that are to be emptied or forgotten, ordered by name."""
        if self._drains[0] != self._cache.generation:
            drains = (_drain_of(config) for config in self._cache.all())
            self._drains = self._cache.generation, tuple(drain for drain in drains if drain is not None)
        return list(self._drains[1])

    def find_draining(self, drain: StorageDrain) -> StorageConfig | None:
        """Return the storage of a drain that is not over as far as this manager knows, else None."""
        known = self._cache.get(drain.name)
        return known if known is not None and _drain_of(known) == drain else None

    def check_new(self, config: StorageConfig) -> None:
        """Reject a config that `add` would reject, by the view of this manager.

        Raises:
            InvalidArgumentError: a field is missing or malformed.
            DuplicateEntityError: the name is taken.
            NotReadyError: a storage of that name and another medium is still to be forgotten.
        """
        check_storage(config)
        self._check_groups(config)
        check_name_is_free(config, self._cache.get(config.global_unique_name))

    def all(self) -> list[StorageConfig]:
        """Return all storages, ordered by name."""
        return [config for config in self._cache.all() if not config.is_removed]

    def existing(self, names: Iterable[str]) -> list[StorageConfig]:
        """Return those of `names` that exist, ordered by name."""
        return [config for name in sorted(set(names)) if (config := self.find(name)) is not None]

    def find_event_report(self, group: InstanceGroup, storage_type: StorageType) -> StorageConfig | None:
        """Return the event report storage of a type that a group names, None when there is none: of several, which
        were added after the group, the first that it names."""
        named = (self.find(name) for name in group.event_report_storage_candidates)
        return next((each for each in named if each is not None and each.storage_type is storage_type), None)

    def is_configured(self, name: str) -> bool:
        """Return whether there is a storage of a name, open here or not, readable by this release or not."""
        return self.find(name) is not None or name in self._cache.unreadable

    def find(self, name: str) -> StorageConfig | None:
        """Return a storage, None when there is none of that name."""
        known = self._cache.get(name)
        return None if known is None or known.is_removed else known

    async def open_missing(self, wait_seconds: float) -> None:
        """Open, close and switch storages as configured; media are opened in threads.

        Args:
            wait_seconds: for media to open; those that take longer go on in the background.
        """
        self._round += 1
        wanting = [name for name in {*self._cache.names(), *self._open} if not self._sync_open(name)]
        media = [medium_of(config) for config in self.existing(wanting)]
        self._failures = {medium: self._failures[medium] for medium in media if medium in self._failures}
        started = [self._start_opening(medium) for medium in media if self._is_retry_due(medium)]
        if started:
            await asyncio.wait(started, timeout=wait_seconds)

    def _sync_open(self, name: str) -> bool:
        """Close or switch an open storage as configured. False: its medium has to be opened."""
        wanted, is_open = self.find(name), self._open.get(name)
        if wanted is None or wanted.is_event_report:
            if is_open is not None:
                del self._open[name]
                self._opener.close(name)
            return True
        if is_open is wanted:  # nearly always
            return True
        if is_open is None or medium_of(is_open) != medium_of(wanted):
            return False
        self._open[name] = wanted  # with its limit
        if is_open.is_available is not wanted.is_available:
            self._opener.set_enabled(name, enabled=wanted.is_available)
        if is_open.is_draining is not wanted.is_draining:
            self._opener.set_draining(name, is_draining=wanted.is_draining)
        return True

    def _is_retry_due(self, medium: StorageConfig) -> bool:
        failure = self._failures.get(medium)
        return medium not in self._opening and (failure is None or self._round >= failure.again_in_round)

    def _start_opening(self, medium: StorageConfig) -> asyncio.Task[None]:
        task = asyncio.create_task(self._open_medium(medium))
        self._opening[medium] = task
        return task

    async def _open_medium(self, medium: StorageConfig) -> None:
        try:
            prepared = await self._opener.prepare_in_thread(medium, is_new=False)
            # Before it takes part: while its blocks are hidden, writes would store them a second time.
            await self.compare(medium.global_unique_name, prepared)
            self._install(medium, prepared)
        except Exception as error:  # whatever it is, the manager goes on without this storage
            self._failed(medium, error)
        finally:
            del self._opening[medium]

    def _failed(self, medium: StorageConfig, error: Exception) -> None:
        known = self._failures.get(medium)
        tries = known.tries + 1 if known is not None else 1
        pause = min(1 << min(tries, 16), _MOST_ROUNDS_BETWEEN_TRIES)
        self._failures[medium] = _Failure(tries, self._round + pause)
        _log.warning("storage_stays_closed", storage=medium.global_unique_name, tries=tries, reason=str(error))

    def _install(self, config: StorageConfig, prepared: Any) -> None:
        """Put an opened medium in place, unless something else is configured by now: then it is left to refreshes."""
        name = config.global_unique_name
        wanted, is_open = self.find(name), self._open.get(name)
        if wanted is None or wanted.is_event_report or medium_of(wanted) != medium_of(config):
            return
        if is_open is not None and is_open.storage_type is not wanted.storage_type:
            self._opener.close(name)  # it was removed and added again, as another thing
        self._opener.install(wanted, prepared)
        self._open[name] = wanted


async def _compare_later(_name: str, _prepared: Any) -> None:
    """Leave it to the start of the manager."""


def _drain_of(config: StorageConfig) -> StorageDrain | None:
    if not (config.is_removed or config.is_draining):
        return None
    started_at = config.removed_at if config.is_removed else config.draining_since
    return StorageDrain(config.global_unique_name, started_at, config.is_removed)


# For tools that read and change the registry without touching the storages that it names.


class ClosedStorages:
    """Opens nothing: takes the place of the storage directory where no bytes are read, written or deleted.

    Attributes:
        generation: never changes, as no storage becomes available.
    """

    generation = 0

    def prepare(self, config: StorageConfig, *, is_new: bool) -> None:
        """Open nothing."""

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> None:
        """Open nothing."""

    def discard(self, prepared: None) -> None:
        """Nothing was prepared."""

    def install(self, config: StorageConfig, prepared: None) -> None:
        """Keep nothing open."""

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Nothing is open that could be switched."""

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Nothing is open that could take writes."""

    def close(self, name: str) -> None:
        """Nothing is open that could be closed."""

    def rank(self, storage: str) -> int | None:
        """Return None: no storage can be read here."""
        return None
