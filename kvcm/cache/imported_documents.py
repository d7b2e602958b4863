"""Documents of an export: reading them, naming them, and telling in what two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from kvcm.cache.archive import Document
from kvcm.cache.fitting import with_store_of
from kvcm.cache.pin_transfer import ExportedPin
from kvcm.model.accounts import Account
from kvcm.model.api_keys import ApiKey
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.storages import StorageConfig
from kvcm.registry.codec import decode_document
from kvcm.registry.taken_keys import TakenKey
from kvcm.registry.validation import check_global_quota, check_group, check_instance, check_storage

__all__ = ["KINDS", "check_valid", "decoded", "difference_of", "title", "title_parts"]

KINDS: Final[Mapping[str, type[Any]]] = {
    "storage": StorageConfig,
    "quota": GlobalQuota,
    "group": InstanceGroup,
    "instance": Instance,
    "account": Account,
    "key": ApiKey,
}
"""What an import adds to the registry, in this order: nothing names what comes later."""

_ALL_KINDS: Final[Mapping[str, type[Any]]] = {**KINDS, "taken_key": TakenKey, "pin": ExportedPin}


def decoded(document: Document) -> object:
    """Read a document.

    Raises:
        InvalidArgumentError: it is of a kind that this release does not know.
        StorageIOError: it is damaged, or of another release.
    """
    kind = _ALL_KINDS.get(document.kind)
    if kind is None:
        raise InvalidArgumentError(f"the export holds a {document.kind!r}, which this release does not know")
    value: object = decode_document(kind, document.document)
    return value


def check_valid(value: object, store_kind: str) -> None:
    """Return if a value could be configured on a store of that kind.

    Raises:
        InvalidArgumentError: it could not.
    """
    if isinstance(value, StorageConfig):
        check_storage(value)
    elif isinstance(value, GlobalQuota):
        check_global_quota(value)
    elif isinstance(value, InstanceGroup):
        check_group(value, store_kind)
    elif isinstance(value, Instance):
        check_instance(value)


def title_parts(value: object) -> tuple[str, str]:
    """Return what a value is and its name, for people."""
    if isinstance(value, StorageConfig):
        return "storage", value.global_unique_name
    if isinstance(value, GlobalQuota):
        return "global quota", value.name
    if isinstance(value, InstanceGroup):
        return "group", value.name
    if isinstance(value, Instance):
        return "instance", value.instance_id
    if isinstance(value, ApiKey):
        return "key", value.name
    assert isinstance(value, Account)
    return "account", value.user_name


def title(value: object) -> str:
    """Return both as one text."""
    return "{} {!r}".format(*title_parts(value))


def difference_of(known: object, new: object) -> str:
    """Return in what two documents differ, "" when an import may take one for the other."""
    if isinstance(known, Instance) and isinstance(new, Instance):
        return known.difference(new) or ""
    if isinstance(known, InstanceGroup) and isinstance(new, InstanceGroup):
        known = with_store_of(known, new)
    ignored = {"is_available", "draining_since"} if isinstance(new, StorageConfig) else {"version"}
    return _first_difference(known, new, ignored)


def _first_difference(known: object, new: object, ignored: set[str], path: str = "") -> str:
    if known == new:
        return ""
    if isinstance(known, Account | ApiKey):
        return "rights or secret"  # neither is shown
    if not is_dataclass(known) or type(known) is not type(new):
        return f"{path or 'its type'} is {known!r} here and {new!r} in the export"
    for each in fields(known):
        if each.name not in ignored:
            below = f"{path}.{each.name}" if path else each.name
            difference = _first_difference(getattr(known, each.name), getattr(new, each.name), set(), below)
            if difference:
                return difference
    return ""
