"""All that is configured as one value, and what a load of it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvcm.model.accounts import Account, AccountRole
from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.names import check_name
from kvcm.model.storages import StorageConfig
from kvcm.registry.validation import check_global_quota, check_group, check_instance, check_storage, require

__all__ = ["AccountEntry", "ConfigChange", "Configuration", "Entry", "check_configuration", "located", "name_of"]

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
        action: `add`, `change`, `remove`, or `keep`: it is not in what is loaded and stays.
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


def check_configuration(configuration: Configuration, store_kind: str) -> None:
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
