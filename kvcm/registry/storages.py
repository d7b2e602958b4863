"""The configured storages. A storage that does not open where it is added is refused and not stored.

What is configured and what is open here are two things: another manager may have added a storage that this one cannot
reach. It stays closed, its locations count as absent, and it is tried again at refreshes, less and less often.
Only adding and updating make anything on a medium: what is opened later may not be mounted yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import structlog

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.storages import StorageConfig
from kvcm.registry.shelf import Flush, Shelf
from kvcm.registry.validation import check_storage

__all__ = ["StorageOpener", "StorageRegistry"]

_log = structlog.get_logger("kvcm.registry")

_MOST_ROUNDS_BETWEEN_TRIES = 256


class StorageOpener(Protocol):
    """Opens and closes storages; the registry decides which."""

    def prepare(self, config: StorageConfig, *, is_new: bool) -> Any:
        """Open a storage's medium, which may block, and change nothing else; raises KvcmError if it cannot.

        Only for one that is being configured, `is_new`, anything may be made on the medium: what was configured
        earlier may just not be mounted here.
        """

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> Any:
        """Do `prepare` in a thread that nothing else waits for: a medium may hang for ever."""

    def install(self, config: StorageConfig, prepared: Any) -> None:
        """Put what was prepared in place of an open storage of that name."""

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make an open storage available for reads and writes, or not."""

    def close(self, name: str) -> None:
        """Close a storage."""


class _Failure(NamedTuple):
    """A storage that did not open: how often, and the round of refreshes in which it is tried again."""

    tries: int
    again_in_round: int


class StorageRegistry:
    """Storages by their unique name.

    Args:
        opener: opens what is added.
        shelf: where the configs are kept.
        flush: returns when what was changed is durable.
    """

    def __init__(self, opener: StorageOpener, shelf: Shelf[StorageConfig], flush: Flush) -> None:
        self._opener = opener
        self._shelf = shelf
        self._flush = flush
        self._open: dict[str, StorageConfig] = {}
        # By medium, so that a corrected config does not wait for the hopeless one of that name.
        self._opening: dict[StorageConfig, asyncio.Task[None]] = {}
        self._failures: dict[StorageConfig, _Failure] = {}
        self._round = 0

    async def add(self, config: StorageConfig) -> None:
        """Add and open a storage, before the manager serves: opening its medium blocks.

        Raises:
            InvalidArgumentError: a field is missing or malformed.
            DuplicateEntityError: the name is taken.
            KvcmError: it cannot be opened, or the store cannot be asked.
        """
        await self._check_new(config)
        await self._add(config, self._opener.prepare(config, is_new=True))

    async def add_while_serving(self, config: StorageConfig) -> None:
        """Do `add` without holding up other requests."""
        await self._check_new(config)
        await self._add(config, await self._opener.prepare_in_thread(config, is_new=True))

    async def update(self, config: StorageConfig) -> None:
        """Replace a storage's config; the old one stays in force when the new one cannot be opened. Blocks as `add`.

        Raises:
            InvalidArgumentError: a field is malformed, there is no such storage, or its type would change.
            KvcmError: it cannot be opened, or the store cannot be asked.
        """
        if await self._is_only_limited(config):
            await self._replace_limit(config)
        else:
            await self._replace(config, self._opener.prepare(config, is_new=True))

    async def update_while_serving(self, config: StorageConfig) -> None:
        """Do `update` without holding up other requests."""
        if await self._is_only_limited(config):
            await self._replace_limit(config)
        else:
            await self._replace(config, await self._opener.prepare_in_thread(config, is_new=True))

    async def _check_new(self, config: StorageConfig) -> None:
        check_storage(config)
        _refuse_taken(config.global_unique_name, await self._shelf.read(config.global_unique_name))

    async def _is_only_limited(self, config: StorageConfig) -> bool:
        """Return whether only its limit changes: then nothing has to be opened, which its medium may not allow now."""
        check_storage(config)
        known = _existing(config.global_unique_name, await self._shelf.read(config.global_unique_name))
        return _limit(config) != _limit(known) and _medium(config) == _medium(known)

    async def _add(self, config: StorageConfig, prepared: Any) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            _refuse_taken(config.global_unique_name, known)  # somebody may have added it meanwhile
            return config

        await self._shelf.change(config.global_unique_name, decide)
        await self._changed(config, prepared)

    async def _replace_limit(self, config: StorageConfig) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            known = _existing(config.global_unique_name, known)
            return replace(known, capacity_bytes=config.capacity_bytes, used_percentage=config.used_percentage)

        await self._shelf.change(config.global_unique_name, decide)
        self._is_as_wanted(config.global_unique_name)
        await self._flush()

    async def _replace(self, config: StorageConfig, prepared: Any) -> None:
        def decide(known: StorageConfig | None) -> StorageConfig:
            known = _existing(config.global_unique_name, known)
            if config.storage_type is not known.storage_type:
                raise InvalidArgumentError(
                    f"storage {config.global_unique_name!r} is of type {known.storage_type.kind} and holds blocks of "
                    f"that: to make it {config.storage_type.kind}, remove it and add it again"
                )
            return replace(config, is_available=known.is_available)

        await self._shelf.change(config.global_unique_name, decide)
        await self._changed(config, prepared)

    async def _changed(self, config: StorageConfig, prepared: Any) -> None:
        self._install(config, prepared)
        await self._flush()

    async def set_enabled(self, name: str, *, enabled: bool) -> None:
        """Make a storage available for reads and writes, or not.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """
        await self._shelf.change(name, lambda known: replace(_existing(name, known), is_available=enabled))
        self._is_as_wanted(name)
        await self._flush()

    async def remove(self, name: str) -> None:
        """Forget a storage; its locations count as missing from now on.

        Raises:
            InvalidArgumentError: there is no such storage.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: StorageConfig | None) -> None:
            _existing(name, known)

        await self._shelf.change(name, decide)
        self._is_as_wanted(name)
        await self._flush()

    def all(self) -> list[StorageConfig]:
        """Return all storages, ordered by name."""
        return self._shelf.all()

    def existing(self, names: Iterable[str]) -> list[StorageConfig]:
        """Return those of `names` that exist, ordered by name."""
        return [config for name in sorted(set(names)) if (config := self._shelf.get(name)) is not None]

    def is_configured(self, name: str) -> bool:
        """Return whether there is a storage of a name, open here or not, readable by this release or not."""
        return self._shelf.get(name) is not None or name in self._shelf.unreadable

    async def open_missing(self, wait_seconds: float) -> None:
        """Make what is open here agree with what is configured; media are opened in threads.

        Args:
            wait_seconds: for media to open; those that take longer go on in the background.
        """
        self._round += 1
        wanting = [name for name in {*self._shelf.names(), *self._open} if not self._is_as_wanted(name)]
        media = [_medium(config) for config in self.existing(wanting)]
        self._failures = {medium: self._failures[medium] for medium in media if medium in self._failures}
        started = [self._start_opening(medium) for medium in media if self._is_worth_a_try(medium)]
        if started:
            await asyncio.wait(started, timeout=wait_seconds)

    def _is_as_wanted(self, name: str) -> bool:
        """Close or switch an open storage as it is configured. False: its medium has to be opened."""
        wanted, is_open = self._shelf.get(name), self._open.get(name)
        if wanted is None:
            if is_open is not None:
                del self._open[name]
                self._opener.close(name)
            return True
        if is_open is None or _medium(is_open) != _medium(wanted):
            return False
        self._open[name] = wanted  # with its limit
        if is_open.is_available is not wanted.is_available:
            self._opener.set_enabled(name, enabled=wanted.is_available)
        return True

    def _is_worth_a_try(self, medium: StorageConfig) -> bool:
        failure = self._failures.get(medium)
        return medium not in self._opening and (failure is None or self._round >= failure.again_in_round)

    def _start_opening(self, medium: StorageConfig) -> asyncio.Task[None]:
        task = asyncio.create_task(self._open_medium(medium))
        self._opening[medium] = task
        return task

    async def _open_medium(self, medium: StorageConfig) -> None:
        try:
            self._install(medium, await self._opener.prepare_in_thread(medium, is_new=False))
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
        wanted, is_open = self._shelf.get(name), self._open.get(name)
        if wanted is None or _medium(wanted) != _medium(config):
            return
        if is_open is not None and is_open.storage_type is not wanted.storage_type:
            self._opener.close(name)  # it was removed and added again, as another thing
        self._opener.install(wanted, prepared)
        self._open[name] = wanted


def _medium(config: StorageConfig) -> StorageConfig:
    """What has to be opened: switch and limit make no difference."""
    return replace(config, is_available=True, capacity_bytes=0, used_percentage=0.0)


def _limit(config: StorageConfig) -> tuple[int, float]:
    return config.capacity_bytes, config.used_percentage


def _refuse_taken(name: str, known: StorageConfig | None) -> None:
    if known is not None:
        raise DuplicateEntityError(f"storage {name!r} exists; use UpdateStorage to change it")


def _existing(name: str, known: StorageConfig | None) -> StorageConfig:
    if known is None:
        raise InvalidArgumentError(f"storage {name!r} does not exist")
    return known
