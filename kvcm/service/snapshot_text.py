"""A configuration as text, for people and for version control::

    {
      "format": "kvcm-config",
      "version": 1,
      "cluster_id": "…",           where it was taken: for people, not looked at when it is loaded
      "created_at_ms": "…",        when, in unix milliseconds: likewise
      "storages": […],             StorageConfig of the admin API, and `is_available`
      "groups": […],               InstanceGroup
      "quotas": […],               GlobalQuota
      "instances": […],            InstanceInfo
      "accounts": […]              Account: no passwords
    }

Each value is what the admin API prints for it, so that operators know it and can send it back in other calls: 64-bit
numbers are strings, enums are names, every field is there, what is not set at all is left out. All five lists are
required, each ordered by name when printed: two snapshots of one configuration differ in their time alone. The format's
version grows only with what an older release would not understand.

Requests of the API may hold fields that a server does not know. A snapshot may not (`strict_json`): it is kept for
years and edited by hand, and a misspelt limit that is ignored is no limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.storages import StorageConfig
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.registry.configuration import AccountEntry, Configuration, located
from kvcm.registry.secrets import redacted
from kvcm.service.json_codec import shaped
from kvcm.service.limits import RequestLimits
from kvcm.service.request_sizes import MOST_SNAPSHOT_BYTES, RequestSizes, check_text
from kvcm.service.strict_json import decoded, read_message, refuse_unknown
from kvcm.service.translate import fill, read, storage_of, write_storage

__all__ = ["FORMAT", "VERSION", "print_snapshot", "print_value", "read_snapshot"]

FORMAT = "kvcm-config"
VERSION = 1
_TITLE = "config_snapshot"
_SIZES = RequestSizes(RequestLimits())  # what a call of its own would take
_AVAILABLE = "is_available"


class _Section(NamedTuple):
    """How the values of one list are printed and read."""

    message_type: type[Message]
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


def _write_account(message: Any, account: AccountEntry) -> None:
    message.user_name = account.user_name
    message.role = int(account.role)


def _read_account(message: Any) -> AccountEntry:
    try:
        role = AccountRole(message.role)
    except ValueError:
        allowed = ", ".join(each.name for each in AccountRole)
        raise InvalidArgumentError(f"role is {message.role}, allowed are {allowed}") from None
    return AccountEntry(message.user_name, role)


def _read_group(message: Any) -> InstanceGroup:
    return read(InstanceGroup, message)


def _read_quota(message: Any) -> GlobalQuota:
    return read(GlobalQuota, message)


def _read_instance(message: Any) -> Instance:
    return read(Instance, message)


_SECTIONS: Mapping[str, _Section] = {
    "storages": _Section(pb.StorageConfig, write_storage, storage_of),
    "groups": _Section(pb.InstanceGroup, fill, _read_group),
    "quotas": _Section(capacity_pb.GlobalQuota, fill, _read_quota),
    "instances": _Section(pb.InstanceInfo, fill, _read_instance),
    "accounts": _Section(pb.Account, _write_account, _read_account),
}
_HEAD: Mapping[str, type[Any]] = {"format": str, "version": int, "cluster_id": str, "created_at_ms": str}


def print_snapshot(configuration: Configuration, cluster_id: str, created_at_ms: int) -> str:
    """Print a configuration without its secrets.

    Args:
        configuration: to print.
        cluster_id: of the deployment.
        created_at_ms: when it was taken, in unix milliseconds.
    """
    head = {"format": FORMAT, "version": VERSION, "cluster_id": cluster_id, "created_at_ms": str(created_at_ms)}
    lists = {name: [_shaped(name, value) for value in getattr(configuration, name)] for name in _SECTIONS}
    return json.dumps({**head, **lists}, ensure_ascii=False, indent=2) + "\n"


def print_value(value: object) -> str:
    """Print one value of a configuration in one line without its secrets, as it stands in a snapshot."""
    names: Mapping[type[Any], str] = {
        StorageConfig: "storages",
        InstanceGroup: "groups",
        GlobalQuota: "quotas",
        Instance: "instances",
        AccountEntry: "accounts",
    }
    return json.dumps(_shaped(names[type(value)], value), ensure_ascii=False, separators=(",", ":"))


def _shaped(name: str, value: Any) -> dict[str, Any]:
    section = _SECTIONS[name]
    message = section.message_type()
    section.write(message, redacted(value))
    shape = shaped(message)
    return {**shape, _AVAILABLE: value.is_available} if isinstance(value, StorageConfig) else shape


def read_snapshot(text: str) -> Configuration:
    """Read a configuration; whether its values make sense is for `ConfigSnapshots.load` to say.

    Raises:
        InvalidArgumentError: it is too large, no JSON, of another format or version, or a value in it is not what its
            field takes; the message names the path.
    """
    check_text(_TITLE, text, MOST_SNAPSHOT_BYTES)
    document = decoded(text, _TITLE)
    _check_head(document)
    lists: dict[str, Any] = {}
    for name, section in _SECTIONS.items():
        items = document.get(name)
        if not isinstance(items, list):
            raise InvalidArgumentError(f"{_TITLE}: {name} must be a list, [] for none")
        lists[name] = tuple(_read_item(section, item, f"{name}[{index}]") for index, item in enumerate(items))
    return Configuration(**lists)


def _check_head(document: Any) -> None:
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"{_TITLE} must be a JSON object, as GenConfigSnapshot returns it")
    if document.get("format") != FORMAT:
        raise InvalidArgumentError(f"{_TITLE}: format must be {FORMAT!r}: is this a snapshot?")
    if document.get("version") != VERSION or type(document["version"]) is not int:
        raise InvalidArgumentError(f"{_TITLE}: version must be {VERSION}, which is what this release reads")
    refuse_unknown(document, (*_HEAD, *_SECTIONS), "")
    for name, kind in _HEAD.items():
        if not isinstance(document.get(name, kind()), kind):
            raise InvalidArgumentError(f"{_TITLE}: {name} must be a {'string' if kind is str else 'number'}")


def _read_item(section: _Section, item: Any, path: str) -> Any:
    is_storage = section.message_type is pb.StorageConfig
    if not (is_storage and isinstance(item, dict)):
        return _read_value(section, item, path)
    is_available = item.get(_AVAILABLE, True)
    if not isinstance(is_available, bool):
        raise InvalidArgumentError(f"{path}.{_AVAILABLE} must be true or false")
    config = _read_value(section, {key: value for key, value in item.items() if key != _AVAILABLE}, path)
    return replace(config, is_available=is_available)


def _read_value(section: _Section, item: Any, path: str) -> Any:
    message = read_message(item, section.message_type, path)
    try:
        _SIZES.check(message)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}.{error}") from error
    try:
        return section.read(message)
    except InvalidArgumentError as error:
        raise located(error, path) from error
