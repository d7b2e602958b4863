"""Documents of the registry's table, as this manager read them last, changed by compare-and-set.

A document is JSON with a version number, made from a frozen value of the model. Every change reads the document first,
validates against it, and writes only if no other manager was faster: of several managers one wins, and the others
validate again against its value. No lock is held meanwhile: a slow store delays one change only. Reads use the local
view; `refresh_from` brings in changes of other managers.

Invariants:

1. Every document here was in the table.
2. A document that was read before a change made here never replaces that change (`watching`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import structlog

from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.groups import EvictionPolicy, InstanceGroup, ReclaimPolicy
from kvcm.model.instances import Registration
from kvcm.model.principals import Account
from kvcm.model.storages import (
    DummyStorageSpec,
    EventReportStorageSpec,
    LocalStorageSpec,
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    StorageType,
    TairMemPoolStorageSpec,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.store.store import Replacement, Table

__all__ = ["ChangeListener", "DocumentBatch", "DocumentCache", "Flush", "decode_document", "encode_document"]

_VERSION = 1  # grows with every change that an older release could not read or would lose
# Of a storage that is drained or removed, which an older release would take for any other, of an account without a
# password, which it could not read, and of a group with `lfu` or `lfu_aging`: older releases called that one `lfu`.
_VERSION_OF_SPECIAL = 2
_KINDS_WITH_SPECIAL = (StorageConfig, Account, InstanceGroup, Registration)
Value = TypeVar("Value")
_SPECS: dict[str, type[Any]] = {
    spec.__name__: spec
    for spec in (
        LocalStorageSpec,
        ThreeFSStorageSpec,
        VcnsThreeFSStorageSpec,
        MooncakeStorageSpec,
        TairMemPoolStorageSpec,
        NfsStorageSpec,
        DummyStorageSpec,
        EventReportStorageSpec,
    )
}


@runtime_checkable
class _Stored(Protocol):
    """A value that has a stored form of its own."""

    def stored(self) -> object:
        """Return that."""


class _Document(msgspec.Struct):
    version: int
    value: msgspec.Raw


class _Storage(msgspec.Struct):
    """A StorageConfig whose spec says its class: unions of plain dataclasses carry no tag."""

    global_unique_name: str
    spec_type: str
    spec: msgspec.Raw
    check_storage_available_when_open: bool
    is_available: bool
    capacity_bytes: int = 0
    used_percentage: float = 0.0
    draining_since: float | msgspec.UnsetType = msgspec.UNSET
    removed_at: float | msgspec.UnsetType = msgspec.UNSET
    report_type: StorageType | msgspec.UnsetType = msgspec.UNSET


def encode_document(value: object) -> bytes:
    """Print a value of the model; equal values give equal bytes, bytes become base64.

    Raises:
        InvalidArgumentError: a text is not valid UTF-8.
    """
    try:
        shape = _shape_of(value)
        return msgspec.json.encode(_Document(_version_of(value), msgspec.Raw(msgspec.json.encode(shape))))
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a text is not valid UTF-8: {error.object[error.start : error.end]!r}") from error


def decode_document(kind: type[Value], document: bytes) -> Value:
    """Read a value of class `kind`.

    Raises:
        StorageIOError: the document is damaged, or of a version that this release does not know.
    """
    try:
        outer = msgspec.json.decode(document, type=_Document)
        known = {_VERSION, _VERSION_OF_SPECIAL} if kind in _KINDS_WITH_SPECIAL else {_VERSION}
        if outer.version not in known:
            raise StorageIOError(
                f"document of version {outer.version}, this release reads version {max(known)}: "
                "it was written by another release, run that one"
            )
        value: Any = _storage(outer.value) if kind is StorageConfig else msgspec.json.decode(outer.value, type=kind)
        if kind is InstanceGroup and outer.version == _VERSION:
            value = _renamed_lfu(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageIOError(f"document is damaged: {error}") from error
    else:
        decoded: Value = value
        return decoded


def _version_of(value: object) -> int:
    is_leaving = isinstance(value, StorageConfig) and (value.is_draining or value.is_removed)
    is_locked = isinstance(value, Account) and value.password is None
    counts_reads = isinstance(value, InstanceGroup) and not _LFU.isdisjoint(value.policy_names)
    has_runs = isinstance(value, Registration) and value.placement.tags > 0
    return _VERSION_OF_SPECIAL if is_leaving or is_locked or counts_reads or has_runs else _VERSION


_LFU = {"lfu", "lfu_aging"}


def _renamed_lfu(group: InstanceGroup) -> InstanceGroup:
    """Return a group of a release in which `lfu` and POLICY_LFU aged, under the name that says so: it goes on evicting
    as it did."""
    if "lfu" not in group.policy_names:
        return group

    def renamed(policy: EvictionPolicy) -> EvictionPolicy:
        return replace(policy, name="lfu_aging") if policy.name == "lfu" else policy

    strategy = group.cache_config.reclaim_strategy
    in_force = strategy.policy
    if strategy.reclaim_policy is ReclaimPolicy.POLICY_LFU and not in_force.name:
        in_force = replace(in_force, name="lfu")
    strategy = replace(
        strategy,
        policy=renamed(in_force),
        prefix_classes=tuple(replace(each, policy=renamed(each.policy)) for each in strategy.prefix_classes),
        instance_overrides=tuple(replace(each, policy=renamed(each.policy)) for each in strategy.instance_overrides),
    )
    return replace(group, cache_config=replace(group.cache_config, reclaim_strategy=strategy))


def _shape_of(value: object) -> object:
    """Return the printed form of a value: for one that has nothing of a newer release, that of the release before."""
    if isinstance(value, StorageConfig):
        return _storage_document(value)
    return value.stored() if isinstance(value, _Stored) else value


def _storage_document(config: StorageConfig) -> _Storage:
    return _Storage(
        config.global_unique_name,
        spec_type=type(config.spec).__name__,
        spec=msgspec.Raw(msgspec.json.encode(config.spec)),
        check_storage_available_when_open=config.check_storage_available_when_open,
        is_available=config.is_available,
        capacity_bytes=config.capacity_bytes,
        used_percentage=config.used_percentage,
        draining_since=config.draining_since or msgspec.UNSET,
        removed_at=config.removed_at or msgspec.UNSET,
        report_type=config.report_type or msgspec.UNSET,
    )


def _time(stored: float | msgspec.UnsetType) -> float:
    return 0.0 if isinstance(stored, msgspec.UnsetType) else stored


def _storage(value: msgspec.Raw) -> StorageConfig:
    stored = msgspec.json.decode(value, type=_Storage)
    spec_type = _SPECS.get(stored.spec_type)
    if spec_type is None:
        raise StorageIOError(f"document names storage spec {stored.spec_type!r}, this release knows {sorted(_SPECS)}")
    return StorageConfig(
        stored.global_unique_name,
        spec=msgspec.json.decode(stored.spec, type=spec_type),
        check_storage_available_when_open=stored.check_storage_available_when_open,
        is_available=stored.is_available,
        capacity_bytes=stored.capacity_bytes,
        used_percentage=stored.used_percentage,
        draining_since=_time(stored.draining_since),
        removed_at=_time(stored.removed_at),
        report_type=StorageType.ST_UNSPECIFIED if stored.report_type is msgspec.UNSET else stored.report_type,
    )


_log = structlog.get_logger("kvcm.registry")
Flush = Callable[[], Awaitable[None]]
"""Returns when every change made so far is as durable as configured."""
ChangeListener = Callable[[str, object, object], None]
"""Receives a change that was made here: full name of the document, old and new value, None for none."""


class DocumentCache(Generic[Value]):
    """Documents of one kind.

    Args:
        table: holds them.
        prefix: what their names begin with.
        kind: class of the values.
        listener: receives changes that are made here.
        on_put: called after every change of the local view.

    Attributes:
        values: the present values by name, for callers on the path of every request.
    """

    def __init__(
        self,
        table: Table,
        prefix: str,
        kind: type[Value],
        listener: ChangeListener | None = None,
        on_put: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._on_put = on_put
        self._table = table
        self._prefix = prefix
        self._kind = kind
        self._values: dict[str, Value] = {}
        self.get: Callable[[str], Value | None] = self._values.get  # no frame of ours: each request reads several
        """Returns a value, None when there is none of that name."""
        self.values: Mapping[str, Value] = MappingProxyType(self._values)
        self._documents: dict[str, bytes] = {}
        self._order: list[str] | None = None  # of the names, until one comes or goes: duties ask for it all the time
        self._unreadable: dict[str, bytes] = {}  # logged once each
        self._watchers: list[set[str]] = []
        self.origin = self
        self.generation = 0

    def copy(self) -> DocumentCache[Value]:
        """Return the local view as it is now, whose `origin` is this cache: for a thread, while this one changes."""
        copied = DocumentCache(self._table, self._prefix, self._kind)
        copied._values.update(self._values)
        copied._documents.update(self._documents)
        copied._unreadable = dict(self._unreadable)
        copied.origin = self
        return copied

    @property
    def unreadable(self) -> list[str]:
        """Names of documents that cannot be read, in order: their old values are in force, if there were any."""
        return sorted(self._unreadable)

    def names(self) -> list[str]:
        """Return all names in order."""
        if self._order is None:
            self._order = sorted(self._values)
        return list(self._order)

    def all(self) -> list[Value]:
        """Return all values, ordered by name."""
        return [self._values[name] for name in self.names()]

    async def read(self, name: str) -> Value | None:
        """Bring one document up to date and return its value.

        Raises:
            StorageIOError: the table cannot be asked, or the document cannot be read.
        """
        while True:
            with self.watching() as changed:
                document = await self._table.get(self._prefix + name)
            if name not in changed:
                self._put(name, document)
                return self._values.get(name)

    async def change(self, name: str, decide: Callable[[Value | None], Value | None]) -> Value | None:
        """Put what `decide` makes of the present value in its place.

        Args:
            name: of the document.
            decide: from the present value, None for none, to the new one, None to remove it; raises to refuse. Called
                again whenever another manager was faster.

        Returns:
            The new value.

        Raises:
            StorageIOError: as `read`.
        """
        while True:
            known = await self.read(name)
            new = decide(known)
            if new == known:
                return new
            if await self._replace(name, new):
                if self._listener is not None:
                    self._listener(self._prefix + name, known, new)
                return new

    def replacement(self, name: str, new: Value | None) -> Replacement:
        """Return what puts a value in the place of the one that is known here, None for none."""
        document = None if new is None else encode_document(new)
        return Replacement(self._prefix + name, self._documents.get(name), document)

    def apply(self, replacement: Replacement, new: Value | None) -> None:
        """Apply a replacement that was just stored, of a document that did not change here meanwhile."""
        self._put(replacement.name.removeprefix(self._prefix), replacement.new, new)

    def notify(self, replacement: Replacement, new: Value | None) -> None:
        """Report a replacement that was just stored to the listener."""
        if self._listener is not None:
            old = None if replacement.old is None else decode_document(self._kind, replacement.old)
            self._listener(replacement.name, old, new)

    async def _replace(self, name: str, new: Value | None) -> bool:
        document = None if new is None else encode_document(new)
        with self.watching() as changed:
            won = await self._table.replace(self._prefix + name, self._documents.get(name), document)
        if won and name in changed:  # another manager changed it before or after this change
            await self.read(name)
        elif won:
            self._put(name, document, new)
        return won

    @contextlib.contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Yield the names that change here while the block runs: what it read of them may be out of date."""
        changed: set[str] = set()
        self._watchers.append(changed)
        try:
            yield changed
        finally:
            # By identity: equal sets of other watchers stay.
            self._watchers = [watcher for watcher in self._watchers if watcher is not changed]

    def refresh_from(self, documents: Mapping[str, bytes], changed: Container[str]) -> None:
        """Make the view that of the whole table; a document that cannot be read leaves its old value in force.

        Args:
            documents: everything in the table, by full name.
            changed: names here that are newer than `documents`.
        """
        start = len(self._prefix)
        found = {name[start:]: document for name, document in documents.items() if name.startswith(self._prefix)}
        for name in found.keys() | self._documents.keys() | self._unreadable.keys():
            if name not in changed:
                self._put_if_readable(name, found.get(name))

    def _put_if_readable(self, name: str, document: bytes | None) -> None:
        try:
            self._put(name, document)
        except StorageIOError as error:
            if self._unreadable.get(name) != document:
                _log.warning("document_unreadable", name=self._prefix + name, reason=str(error))
            self._unreadable[name] = document or b""

    def _put(self, name: str, document: bytes | None, value: Value | None = None) -> None:
        if document == self._documents.get(name):
            self._unreadable.pop(name, None)  # it was repaired
            return
        if document is None or name not in self._values:
            self._order = None
        if document is None:
            del self._documents[name], self._values[name]
        else:
            self._values[name] = decode_document(self._kind, document) if value is None else value
            self._documents[name] = document
        self._unreadable.pop(name, None)
        self.generation += 1
        self._on_put()
        for watcher in self._watchers:
            watcher.add(name)


# Changes of documents of any kind that are made together or not at all.
#
# A single change (`DocumentCache.change`) decides again when another manager was faster. A batch is decided from many
# documents: it is rejected as a whole then, and its caller starts again.


class _Staged(NamedTuple):
    cache: DocumentCache[Any]
    name: str
    replacement: Replacement
    new: Any


class DocumentBatch:
    """Staged changes, each of another document, based on the view of its cache at that time."""

    def __init__(self) -> None:
        self._staged: list[_Staged] = []

    def __bool__(self) -> bool:
        return bool(self._staged)

    def stage(self, cache: DocumentCache[Value], name: str, new: Value | None) -> None:
        """Add a change of a document of a cache or of its copy; None removes the document."""
        self._staged.append(_Staged(cache.origin, name, cache.replacement(name, new), new))

    async def commit(self, table: Table) -> bool:
        """Make all changes. False: a document is another one by now, and nothing was changed.

        Raises:
            StorageIOError: the store cannot be asked; all may have happened nevertheless, or nothing.
        """
        with contextlib.ExitStack() as watches:
            watched = {id(each.cache): each.cache for each in self._staged}
            changed = {key: watches.enter_context(cache.watching()) for key, cache in watched.items()}
            won = await table.replace_together([each.replacement for each in self._staged])
        if won:
            for each in self._staged:
                each.cache.notify(each.replacement, each.new)
                await self._apply(each, is_newer=each.name in changed[id(each.cache)])
        return won

    async def _apply(self, staged: _Staged, *, is_newer: bool) -> None:
        if is_newer:  # another manager changed it before or after this change
            await staged.cache.read(staged.name)
        else:
            staged.cache.apply(staged.replacement, staged.new)
