"""What becomes of every document when a configuration is loaded; the rules are in `kvcm.registry.snapshots`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvcm.model.accounts import Account
from kvcm.model.errors import InvalidArgumentError, KvcmError, StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance, Registration
from kvcm.model.storages import StorageConfig
from kvcm.registry.batch import Batch
from kvcm.registry.configuration import AccountEntry, ConfigChange, Configuration, Entry, located
from kvcm.registry.enrolment import Enrolment
from kvcm.registry.instances import same_registration
from kvcm.registry.secrets import restored
from kvcm.registry.shelf import Shelf
from kvcm.registry.storage_rules import medium_of, refuse_another_kind, refuse_taken

__all__ = ["ConfigDraft", "ConfigDrafting", "ConfigShelves"]

_MOST_VERSION = (1 << 63) - 1
_ORDER = {kind: at for at, kind in enumerate(("storage", "group", "quota", "instance", "account"))}


class ConfigShelves(NamedTuple):
    """Where what is configured is kept, by kind."""

    storages: Shelf[StorageConfig]
    groups: Shelf[InstanceGroup]
    quotas: Shelf[GlobalQuota]
    registrations: Shelf[Registration]
    accounts: Shelf[Account]

    def copy(self) -> ConfigShelves:
        """Return them as they are now."""
        return ConfigShelves(
            self.storages.copy(),
            self.groups.copy(),
            self.quotas.copy(),
            self.registrations.copy(),
            self.accounts.copy(),
        )

    def configuration(self) -> Configuration:
        """Return what this manager knows to be configured, ordered by name.

        Raises:
            StorageIOError: a document cannot be read, so that it would be missing.
        """
        shelves: Mapping[str, Shelf[Any]] = self._asdict()
        unreadable = [f"{kind} {name!r}" for kind, shelf in shelves.items() for name in shelf.unreadable]
        if unreadable:
            raise StorageIOError(
                f"the configuration cannot be read as a whole, unreadable are {unreadable[:5]}: see `kvcm index verify`"
            )
        return Configuration(
            tuple(each for each in self.storages.all() if not each.is_removed),
            tuple(self.groups.all()),
            tuple(self.quotas.all()),
            tuple(each.instance for each in self.registrations.all()),
            tuple(map(AccountEntry.of, self.accounts.all())),
        )


class ConfigDraft:
    """What a load comes to, as of what was known when it was decided.

    Attributes:
        changes: what to tell.
        batch: what to store.
        storages: those that are added or changed.
        to_open: those of them whose medium has to be opened first.
    """

    def __init__(self) -> None:
        self.changes: list[ConfigChange] = []
        self.batch = Batch()
        self.storages: list[StorageConfig] = []
        self.to_open: list[StorageConfig] = []

    def note(self, entry: Entry, old: Any, new: Any) -> None:
        """Write down what becomes of an entry."""
        self.changes.append(ConfigChange(entry.kind, entry.name, "add" if old is None else "change", old, new))


class ConfigDrafting:
    """Decides loads. Asks nobody and waits for nothing, so that it may run on a thread.

    Args:
        shelves: what is configured, in copies of their own.
        enrolment: registers instances, likewise.
    """

    def __init__(self, shelves: ConfigShelves, enrolment: Enrolment) -> None:
        self._shelves = shelves
        self._enrolment = enrolment

    def draft(self, wanted: Configuration, *, prune: bool) -> ConfigDraft:
        """Return what a load comes to.

        Args:
            wanted: the configuration, which was checked by itself.
            prune: also remove groups, quotas and accounts that it does not have.

        Raises:
            KvcmError: it cannot take the place of what is configured.
        """
        present = self._shelves.configuration()
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
        self._enrolment.stage(draft.batch, instances, groups)
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
        stored = self._shelves.storages.get(entry.name)
        known = None if stored is None or stored.is_removed else stored
        new: StorageConfig = _restored(entry, stored)
        if known is None:
            refuse_taken(new, stored)
        else:
            refuse_another_kind(new, known)
            new = replace(new, draining_since=known.draining_since)
        if new == known:
            return
        draft.note(entry, known, new)
        draft.batch.stage(self._shelves.storages, entry.name, new)
        draft.storages.append(new)
        if known is None or medium_of(new) != medium_of(known):
            draft.to_open.append(new)

    def _draft_group(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._shelves.groups.get(entry.name)
        new: InstanceGroup = _restored(entry, known)
        if known is not None:
            if replace(new, version=known.version) == known:
                return
            new = replace(new, version=_next_version(entry, new.version, known.version))
        draft.note(entry, known, new)
        draft.batch.stage(self._shelves.groups, entry.name, new)

    def _draft_quota(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._shelves.quotas.get(entry.name)
        if entry.value != known:
            draft.note(entry, known, entry.value)
            draft.batch.stage(self._shelves.quotas, entry.name, entry.value)

    def _draft_account(self, draft: ConfigDraft, entry: Entry) -> None:
        known = self._shelves.accounts.get(entry.name)
        if known is not None and known.role is entry.value.role:
            return
        draft.note(entry, None if known is None else AccountEntry.of(known), entry.value)
        new = Account(entry.name, entry.value.role, None) if known is None else replace(known, role=entry.value.role)
        draft.batch.stage(self._shelves.accounts, entry.name, new)

    def _new_instance(self, draft: ConfigDraft, entry: Entry) -> list[Instance]:
        known = self._shelves.registrations.get(entry.name)
        new: Instance = _restored(entry, known.instance if known is not None else None)
        if known is None:
            draft.note(entry, None, new)
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
        shelves: Mapping[str, Shelf[Any]] = {
            "group": self._shelves.groups,
            "quota": self._shelves.quotas,
            "account": self._shelves.accounts,
        }
        for entry in absent:
            if prune:
                draft.changes.append(ConfigChange(entry.kind, entry.name, "remove", entry.value, None))
                draft.batch.stage(shelves[entry.kind], entry.name, None)
            else:
                draft.changes.append(ConfigChange(entry.kind, entry.name, "keep", entry.value, entry.value))


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
            "remove what is meant by RemoveInstance and RemoveStorage first, or load without prune"
        )
