"""Snapshots: the whole configuration as one value, which is exported, compared and loaded as a whole.

A load is checked completely, then decided against the configuration, then all documents change together
(`DocumentBatch`); if another manager was faster it is decided again. So a load is never half done, and two loads at a
time end as one after the other. Rules:

* A configured value that is not in the snapshot stays (`keep`), unless `prune` is set. Then groups, global quotas and
  accounts are removed, as their own calls would. Instances and storages never are: that deletes blocks. A prune that
  would have to is refused; RemoveInstance and RemoveStorage say so by name.
* The version of a group is not compared. A group that changes gets the snapshot's version, or the one above the
  stored one if that is higher; a new one gets the snapshot's.
* An instance's config never changes: one that is registered with another layout refuses the load. What takes no part
  in that comparison (user data, the quota group at its registration) stays as it is registered, as RegisterInstance
  does.
* A storage that is added, or gets another medium, is opened first, as by AddStorage and UpdateStorage: one that does
  not open refuses the load. Opening may make the storage's directories, and those stay; a dry run opens nothing.
  Whether a storage is enabled is loaded; a drain is no configuration, it goes on.
* A new account is added without a password, so login is impossible; an existing one keeps its own.
* Secrets are not in snapshots (`kvcm.registry.secrets`); a text that lacks one gets it from the configured value, or
  refuses the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from kvcm.model.errors import InvalidArgumentError, KvcmError, NotReadyError, StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance, Registration
from kvcm.model.principals import Account, AccountRole
from kvcm.model.storages import StorageConfig
from kvcm.model.uri import check_name
from kvcm.registry.document_cache import DocumentBatch, DocumentCache, Flush
from kvcm.registry.instances import BatchRegistration, same_registration, with_sorted_groups
from kvcm.registry.secrets import restored
from kvcm.registry.storages import StorageRegistry, check_name_is_free, check_same_type, medium_of
from kvcm.registry.validation import (
    check_global_quota,
    check_group,
    check_instance,
    check_storage,
    check_storages_of_group,
    check_storages_of_named_group,
    require,
)
from kvcm.store.store import Table

__all__ = [
    "AccountEntry",
    "ConfigChange",
    "ConfigDocuments",
    "ConfigDraft",
    "ConfigSnapshots",
    "Configuration",
    "Entry",
    "located",
    "name_of",
]

Error = TypeVar("Error", bound=KvcmError)
_MOST_CHARACTERS = 1000  # of an error: a name may be as long as the whole text


class AccountEntry(NamedTuple):
    """An account without its password."""

    user_name: str
    role: AccountRole

    @classmethod
    def of(cls, account: Account) -> AccountEntry:
        """Return what may leave the manager of an account."""
        return cls(account.user_name, account.role)


ConfigValue = StorageConfig | InstanceGroup | GlobalQuota | Instance | AccountEntry


class Entry(NamedTuple):
    """One thing that is configured.

    Attributes:
        kind: storage, group, quota, instance or account.
        name: unique in its kind.
        path: where it stands in its configuration, as in `groups[2]`.
        value: what it is.
    """

    kind: str
    name: str
    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class Configuration:
    """What operators configure; no pins, no drains, no numbers that the manager chose."""

    storages: tuple[StorageConfig, ...] = ()
    groups: tuple[InstanceGroup, ...] = ()
    quotas: tuple[GlobalQuota, ...] = ()
    instances: tuple[Instance, ...] = ()
    accounts: tuple[AccountEntry, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, kind by kind."""
        for section, kind in _KINDS.items():
            for index, value in enumerate(getattr(self, section)):
                yield Entry(kind, name_of(value), f"{section}[{index}]", value)


class ConfigChange(NamedTuple):
    """What a load does to one entry.

    Attributes:
        kind: as of its entry.
        name: of the entry.
        action: `add`, `change`, `remove`, or `keep`: it is not in the snapshot and stays.
        old: value so far, None for none; with its secrets.
        new: value afterwards, None for none; with its secrets.
    """

    kind: str
    name: str
    action: str
    old: ConfigValue | None
    new: ConfigValue | None


_KINDS = {"storages": "storage", "groups": "group", "quotas": "quota", "instances": "instance", "accounts": "account"}

# Where a path of a check says another name than the field has.
_FIELDS = {
    "LocalStorageSpec": "local",
    "ThreeFSStorageSpec": "threefs",
    "VcnsThreeFSStorageSpec": "vcnsthreefs",
    "MooncakeStorageSpec": "mooncake",
    "TairMemPoolStorageSpec": "tair_mem_pool",
    "NfsStorageSpec": "nfs",
    "DummyStorageSpec": "dummy",
    "EventReportStorageSpec": "event_report",
    "ModelDeployment": "model_deployment",
    "instance_group": "instance_group_name",
}


def name_of(value: ConfigValue) -> str:
    """Return the name of a value, unique in its kind."""
    if isinstance(value, StorageConfig):
        return value.global_unique_name
    if isinstance(value, Instance):
        return value.instance_id
    return value.user_name if isinstance(value, AccountEntry) else value.name


def _check_configuration(configuration: Configuration, store_kind: str) -> None:
    """Check every value by itself, and that no name is there twice.

    Args:
        configuration: to check.
        store_kind: the deployment's metadata store, which groups may name.

    Raises:
        KvcmError: of the first that is wrong, naming its place.
    """
    checks: dict[str, Callable[[Any], None]] = {
        "storage": check_storage,
        "group": lambda group: check_group(group, store_kind),
        "quota": check_global_quota,
        "instance": check_instance,
        "account": _check_account,
    }
    seen: dict[tuple[str, str], str] = {}
    for entry in configuration.entries():
        try:
            checks[entry.kind](entry.value)
        except KvcmError as error:
            raise located(error, entry.path) from error
        first = seen.setdefault((entry.kind, entry.name), entry.path)
        if first != entry.path:
            raise InvalidArgumentError(f"{entry.path} is {entry.kind} {entry.name!r}, which {first} is already")


def _check_account(account: AccountEntry) -> None:
    require(account.user_name, "Account.user_name")
    check_name("user_name", account.user_name)


def located(error: Error, path: str) -> Error:
    """Return an error that says where in a configuration the value is that it speaks of.

    Args:
        error: of a check of that value.
        path: of the value.
    """
    text = f"{path}: {error}"
    if isinstance(error, InvalidArgumentError) and error.field:
        _, *names = error.field.split(".")
        text = f"{'.'.join([path, *(_FIELDS.get(name, name) for name in names)])} {error.reason}"
    return type(error)(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…")


# What becomes of every document when a configuration is loaded; the rules are in `kvcm.registry.snapshots`.

_MOST_VERSION = (1 << 63) - 1
_ORDER = {kind: at for at, kind in enumerate(("storage", "group", "quota", "instance", "account"))}


class ConfigDocuments(NamedTuple):
    """The document caches of the configuration, by kind."""

    storages: DocumentCache[StorageConfig]
    groups: DocumentCache[InstanceGroup]
    quotas: DocumentCache[GlobalQuota]
    registrations: DocumentCache[Registration]
    accounts: DocumentCache[Account]

    def copy(self) -> ConfigDocuments:
        """Return them as they are now."""
        return ConfigDocuments(
            self.storages.copy(),
            groups=self.groups.copy(),
            quotas=self.quotas.copy(),
            registrations=self.registrations.copy(),
            accounts=self.accounts.copy(),
        )

    def configuration(self) -> Configuration:
        """Return what this manager knows to be configured, ordered by name.

        Raises:
            StorageIOError: a document cannot be read, so that it would be missing.
        """
        caches: Mapping[str, DocumentCache[Any]] = self._asdict()
        unreadable = [f"{kind} {name!r}" for kind, cache in caches.items() for name in cache.unreadable]
        if unreadable:
            raise StorageIOError(
                f"the configuration cannot be read as a whole, unreadable are {unreadable[:5]}: see `kvcm index verify`"
            )
        return Configuration(
            tuple(each for each in self.storages.all() if not each.is_removed),
            groups=tuple(self.groups.all()),
            quotas=tuple(self.quotas.all()),
            instances=tuple(each.instance for each in self.registrations.all()),
            accounts=tuple(map(AccountEntry.of, self.accounts.all())),
        )


class ConfigDraft:
    """The outcome of a load, by the view at the time of the decision.

    Attributes:
        changes: for the answer.
        batch: what to store.
        storages: those that are added or changed.
        to_open: those of them whose medium has to be opened first.
    """

    def __init__(self) -> None:
        self.changes: list[ConfigChange] = []
        self.batch = DocumentBatch()
        self.storages: list[StorageConfig] = []
        self.to_open: list[StorageConfig] = []

    def record(self, entry: Entry, old: Any, new: Any) -> None:
        """Write down what becomes of an entry."""
        self.changes.append(
            ConfigChange(entry.kind, name=entry.name, action="add" if old is None else "change", old=old, new=new)
        )


class _ConfigDrafting:
    """Decides loads. It does no I/O, so that it may run on a thread.

    Args:
        caches: the configuration, in copies of their own.
        batch_registration: registers instances, likewise.
    """

    def __init__(self, caches: ConfigDocuments, batch_registration: BatchRegistration) -> None:
        self._caches = caches
        self._batch_registration = batch_registration

    def draft(self, wanted: Configuration, *, prune: bool) -> ConfigDraft:
        """Return what a load comes to.

        Args:
            wanted: the configuration, which was checked by itself.
            prune: also remove groups, quotas and accounts that it does not have.

        Raises:
            KvcmError: it cannot replace the configured value.
        """
        present = self._caches.configuration()
        _check_storages_of_groups(present, wanted)
        draft = ConfigDraft()
        instances = []
        for entry in wanted.entries():
            if entry.kind == "instance":
                instances += self._new_instance(draft, entry)
            else:
                self._draft_entry(draft, entry)
        groups = {each.name: each for each in present.groups} | {
            change.name: change.new for change in draft.changes if isinstance(change.new, InstanceGroup)
        }
        self._batch_registration.stage(draft.batch, instances, groups)
        self._draft_absent(draft, present, wanted, prune=prune)
        draft.changes.sort(key=lambda change: (_ORDER[change.kind], change.name))
        return draft

    def _draft_entry(self, draft: ConfigDraft, entry: Entry) -> None:
        drafts: Mapping[str, Callable[[ConfigDraft, Entry], None]] = {
            "storage": self._draft_storage,
            "group": self._draft_group,
            "quota": self._draft_quota,
            "account": self._draft_account,
        }
        drafts[entry.kind](draft, entry)

    def _draft_storage(self, draft: ConfigDraft, entry: Entry) -> None:
        stored = self._caches.storages.get(entry.name)
        known = None if stored is None or stored.is_removed else stored
        new: StorageConfig = _restored(entry, stored)
        if known is None:
            check_name_is_free(new, stored)
        else:
            check_same_type(new, known)
            new = replace(new, draining_since=known.draining_since)
        if new == known:
            return
        draft.record(entry, known, new)
        draft.batch.stage(self._caches.storages, entry.name, new)
        draft.storages.append(new)
        if not new.is_event_report and (known is None or medium_of(new) != medium_of(known)):
            draft.to_open.append(new)

    def _draft_group(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._caches.groups.get(entry.name)
        new: InstanceGroup = _restored(entry, known)
        if known is not None:
            if replace(new, version=known.version) == known:
                return
            new = replace(new, version=_next_version(entry, new.version, known.version))
        draft.record(entry, known, new)
        draft.batch.stage(self._caches.groups, entry.name, new)

    def _draft_quota(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._caches.quotas.get(entry.name)
        if entry.value != known:
            draft.record(entry, known, entry.value)
            draft.batch.stage(self._caches.quotas, entry.name, entry.value)

    def _draft_account(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._caches.accounts.get(entry.name)
        if known is not None and known.role is entry.value.role:
            return
        draft.record(entry, None if known is None else AccountEntry.of(known), entry.value)
        new = Account(entry.name, entry.value.role, None) if known is None else replace(known, role=entry.value.role)
        draft.batch.stage(self._caches.accounts, entry.name, new)

    def _new_instance(self, draft: ConfigDraft, entry: Entry) -> list[Instance]:
        known = self._caches.registrations.get(entry.name)
        new: Instance = _restored(entry, known.instance if known is not None else None)
        if known is None:
            draft.record(entry, None, new)
            return [new]
        try:
            same_registration(known.instance, new)
        except KvcmError as error:
            raise located(error, entry.path) from error
        return []

    def _draft_absent(self, draft: ConfigDraft, present: Configuration, wanted: Configuration, *, prune: bool) -> None:
        names = {(entry.kind, entry.name) for entry in wanted.entries()}
        absent = [entry for entry in present.entries() if (entry.kind, entry.name) not in names]
        if prune:
            _refuse_loss(absent)
        caches: Mapping[str, DocumentCache[Any]] = {
            "group": self._caches.groups,
            "quota": self._caches.quotas,
            "account": self._caches.accounts,
        }
        for entry in absent:
            if prune:
                draft.changes.append(
                    ConfigChange(entry.kind, name=entry.name, action="remove", old=entry.value, new=None)
                )
                draft.batch.stage(caches[entry.kind], entry.name, None)
            else:
                draft.changes.append(
                    ConfigChange(entry.kind, name=entry.name, action="keep", old=entry.value, new=entry.value)
                )


def _check_storages_of_groups(present: Configuration, wanted: Configuration) -> None:
    """Refuse groups that name storages of types that do not fit, among those that there will be."""
    storages = {each.global_unique_name: each for each in (*present.storages, *wanted.storages)}
    for entry in wanted.entries():
        if entry.kind == "group":
            try:
                check_storages_of_group(entry.value, storages.get)
            except KvcmError as error:
                raise located(error, entry.path) from error
    named = {group.name for group in wanted.groups}
    for group in present.groups:
        if group.name not in named:
            check_storages_of_named_group(group, storages.get)


def _restored(entry: Entry, known: object) -> Any:
    try:
        return restored(entry.value, known)
    except InvalidArgumentError as error:
        raise located(error, entry.path) from error


def _next_version(entry: Entry, wanted: int, stored: int) -> int:
    if stored >= _MOST_VERSION:
        raise InvalidArgumentError(
            f"{entry.path}.version: group {entry.name!r} has version {stored}, there is none above it: "
            "remove the group and create it again"
        )
    return max(wanted, stored + 1)


def _refuse_loss(absent: Iterable[Entry]) -> None:
    """A prune takes no blocks along."""
    lost = [f"{entry.kind} {entry.name!r}" for entry in absent if entry.kind in {"storage", "instance"}]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise InvalidArgumentError(
            f"prune would remove {', '.join(lost[:5])}{more}, and blocks with it: "
            "remove them by RemoveInstance and RemoveStorage first, or load without prune"
        )


_MOST_TRIES = 32


class ConfigSnapshots:
    """The configuration as a whole.

    Args:
        table: holds all of it.
        caches: the parts of it.
        batch_registration: registers instances.
        storages: opens added storages.
        refresh_view: brings the caches up to date with the table.
        flush: returns when all changes are durable.
        store_kind: the deployment's metadata store, which groups may name.
    """

    def __init__(
        self,
        table: Table,
        caches: ConfigDocuments,
        batch_registration: BatchRegistration,
        storages: StorageRegistry,
        refresh_view: Callable[[], Awaitable[None]],
        flush: Flush,
        store_kind: str,
    ) -> None:
        self._table = table
        self._caches = caches
        self._batch_registration = batch_registration
        self._storages = storages
        self._refresh_view = refresh_view
        self._flush = flush
        self._store_kind = store_kind

    async def export(self) -> Configuration:
        """Return all that is configured, with its secrets.

        Raises:
            StorageIOError: the store cannot be asked, or a document in it cannot be read.
        """
        await self._refresh_view()
        return self._caches.configuration()

    async def load(self, wanted: Configuration, *, prune: bool = False, dry_run: bool = False) -> list[ConfigChange]:
        """Replace the configuration by `wanted`, as a whole or not at all.

        Args:
            wanted: the configuration; values that are configured already may lack their secrets.
            prune: also remove groups, quotas and accounts that it does not have.
            dry_run: change nothing and open nothing.

        Returns:
            The changes, made or planned, and the values that stay although `wanted` lacks them.

        Raises:
            InvalidArgumentError: a value is wrong, or cannot replace the configured one.
            DuplicateEntityError: an instance is registered with another config.
            CapacityError: a group would have more instances than it may.
            NotReadyError: the configuration changes all the time, or a storage's name is still taken.
            KvcmError: a storage does not open, or the store cannot be asked.
        """
        wanted = await asyncio.to_thread(_checked, wanted, self._store_kind)  # thousands of instances take a while
        opened: dict[StorageConfig, Any] = {}
        try:
            for _ in range(_MOST_TRIES):
                draft = await self._drafted(wanted, prune=prune)
                if dry_run or not draft.batch:
                    return draft.changes
                await self._open(draft.to_open, opened)
                if await draft.batch.commit(self._table):
                    await self._apply(draft, opened)
                    return draft.changes
        finally:
            for prepared in opened.values():
                self._storages.discard(prepared)
        raise NotReadyError("others change the configuration all the time; nothing was loaded, try again")

    async def _drafted(self, wanted: Configuration, *, prune: bool) -> ConfigDraft:
        await self._refresh_view()
        await self._batch_registration.refresh(wanted.instances)
        drafting = _ConfigDrafting(self._caches.copy(), self._batch_registration.copy())
        return await asyncio.to_thread(drafting.draft, wanted, prune=prune)

    async def _open(self, configs: Iterable[StorageConfig], opened: dict[StorageConfig, Any]) -> None:
        for config in configs:
            medium = medium_of(config)
            if medium not in opened:
                opened[medium] = await self._storages.prepare(config)

    async def _apply(self, draft: ConfigDraft, opened: dict[StorageConfig, Any]) -> None:
        to_open = set(draft.to_open)
        for config in draft.storages:
            self._storages.apply(config, opened.pop(medium_of(config)) if config in to_open else None)
        await self._flush()


def _checked(wanted: Configuration, store_kind: str) -> Configuration:
    wanted = replace(wanted, instances=tuple(map(with_sorted_groups, wanted.instances)))
    _check_configuration(wanted, store_kind)
    return wanted
