"""Messages of JSON documents that are edited by hand: an unknown field is an error that names its path.

Bodies of requests are read by `json_codec`, which ignores what it does not know. Here its rules for values hold, too,
but unknown fields, unknown names and numbers of enums, nulls and repeated keys are errors.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.principals import AccountRole
from kvcm.model.storages import StorageConfig
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.registry.config_snapshots import AccountEntry, ConfigChange, ConfigSnapshots, Configuration, located
from kvcm.registry.secrets import redacted
from kvcm.service.calls import Reply
from kvcm.service.json_codec import INT64_VALUE, MAX_DEPTH, MalformedBody, integers_as_text, parse_request
from kvcm.service.request_limits import MAX_SNAPSHOT_BYTES, RequestLimits, RequestSizes, check_text
from kvcm.service.translate import fill, read, storage_of, write_storage

__all__ = ["FORMAT", "VERSION", "ConfigSnapshotApi", "decode", "print_snapshot", "print_value", "read_snapshot"]

M = TypeVar("M", bound=Message)
_SHOWN_CHARACTERS = 80


def decode(text: str, title: str) -> Any:
    """Return the values of a JSON document.

    Args:
        text: the document.
        title: what it is called in messages.

    Raises:
        InvalidArgumentError: it is no JSON, is nested too deep, repeats a key or holds a number that JSON has not.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgumentError(f"{title} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{title} is no JSON document: {error}") from None
    _check_depth(value, title)
    return value


def _read_message(value: Any, message_type: type[M], path: str) -> M:
    """Return the message that a decoded value describes.

    Args:
        value: of a document.
        message_type: class of the message.
        path: of the value, for messages.

    Raises:
        InvalidArgumentError: naming the path of the first thing that is wrong.
    """
    _check_known(value, message_type.DESCRIPTOR, path)
    try:
        return parse_request(json.dumps(value).encode(), message_type)
    except MalformedBody as error:
        place, _, problem = str(error).partition(": ")
        where = path if place == "body" else f"{path}.{place}"
        raise InvalidArgumentError(f"{where} {problem}") from None


def _refuse_unknown(given: Iterable[str], known: Iterable[str], path: str) -> None:
    """Refuse keys of an object that are not known.

    Raises:
        InvalidArgumentError: naming the first, and what may have been meant.
    """
    allowed = list(known)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(key[:_SHOWN_CHARACTERS], allowed, 1) or allowed
            where = f"{path}.{_truncated(key)}".lstrip(".")
            raise InvalidArgumentError(f"{where} is unknown, allowed is {' or '.join(near)}")


def _truncated(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half of a surrogate pair is in no answer
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_truncated(repeated)!r} is given twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: Any, title: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise InvalidArgumentError(f"{title} is nested deeper than {MAX_DEPTH} levels")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_known(value: Any, descriptor: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} must be an object")
    fields = {field.name: field for field in descriptor.fields}
    _refuse_unknown(value, fields, path)
    for name, item in value.items():
        for place, each in _each(item, f"{path}.{name}"):
            _check_value(each, fields[name], place)


def _each(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, list):
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(item))
    else:
        yield path, item


def _check_value(value: Any, field: FieldDescriptor, path: str) -> None:
    if value is None:
        raise InvalidArgumentError(f"{path} is null: leave it out, or give a value")
    if field.message_type is not None and field.message_type.full_name != INT64_VALUE:
        _check_known(value, field.message_type, path)
    elif field.enum_type is not None and isinstance(value, str | int):
        known = {each.name: each.number for each in field.enum_type.values}
        if value not in known and (isinstance(value, str) or value not in known.values()):
            shown = _truncated(value) if isinstance(value, str) else value
            raise InvalidArgumentError(f"{path} is {shown!r}, allowed are {', '.join(known)}")


# A configuration as text, for people and for version control::
#
#     {
#       "format": "kvcm-config",
#       "version": 1,
#       "cluster_id": "…",           where it was taken: for people, not looked at when it is loaded
#       "created_at_ms": "…",        when, in unix milliseconds: likewise
#       "storages": […],             StorageConfig of the admin API, and `is_available`
#       "groups": […],               InstanceGroup
#       "quotas": […],               GlobalQuota
#       "instances": […],            InstanceInfo
#       "accounts": […]              Account: no passwords
#     }
#
# Each value is what the admin API prints for it, so that operators know it and can send it back in other calls: 64-bit
# numbers are strings, enums are names, every field is there, unset messages are left out. All five lists are
# required, each ordered by name when printed: two snapshots of one configuration differ in their time alone. The
# format's version grows only with what an older release would not understand.
#
# Requests of the API may hold fields that a server does not know. A snapshot may not (`strict_json`): it is kept for
# years and edited by hand, and a misspelt limit that is ignored is no limit.

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
    lists = {name: [_plain_value(name, value) for value in getattr(configuration, name)] for name in _SECTIONS}
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
    return json.dumps(_plain_value(names[type(value)], value), ensure_ascii=False, separators=(",", ":"))


def _plain_value(name: str, value: Any) -> dict[str, Any]:
    section = _SECTIONS[name]
    message = section.message_type()
    section.write(message, redacted(value))
    shape = integers_as_text(message)
    return {**shape, _AVAILABLE: value.is_available} if isinstance(value, StorageConfig) else shape


def read_snapshot(text: str) -> Configuration:
    """Read a configuration; whether its values make sense is for `ConfigSnapshots.load` to say.

    Raises:
        InvalidArgumentError: it is too large, no JSON, of another format or version, or a value in it is not what its
            field takes; the message names the path.
    """
    check_text(_TITLE, text, MAX_SNAPSHOT_BYTES)
    document = decode(text, _TITLE)
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
    _refuse_unknown(document, (*_HEAD, *_SECTIONS), "")
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
    message = _read_message(item, section.message_type, path)
    try:
        _SIZES.check(message)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}.{error}") from error
    try:
        return section.read(message)
    except InvalidArgumentError as error:
        raise located(error, path) from error


# GenConfigSnapshot and LoadConfigSnapshot. Thin translation; a load is decided in the registry.


class ConfigSnapshotApi:
    """Handlers of the calls about the configuration as a whole.

    Args:
        snapshots: takes and loads it.
        cluster_id: of the deployment.
        end_logins: ends the logins of an account.
        now: wall clock in unix seconds.
    """

    def __init__(
        self,
        snapshots: ConfigSnapshots,
        cluster_id: str,
        end_logins: Callable[[str], Awaitable[None]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._snapshots = snapshots
        self._cluster_id = cluster_id
        self._end_logins = end_logins
        self._now = now

    async def generate(self, _request: Any) -> Reply:
        """Return all that is configured, without secrets."""
        taken = await self._snapshots.export()
        # Thousands of instances take a while: not on the loop.
        text = await asyncio.to_thread(print_snapshot, taken, self._cluster_id, int(self._now() * 1000))
        return Reply(pb.ConfigSnapShotResponse(config_snapshot=text))

    async def load(self, request: Any) -> Reply:
        """Load a configuration, or return the changes that this would make."""
        if not request.config_snapshot:
            raise InvalidArgumentError("config_snapshot is empty, must be a text of GenConfigSnapshot")
        wanted = await asyncio.to_thread(read_snapshot, request.config_snapshot)
        changes = await self._snapshots.load(wanted, prune=request.prune, dry_run=request.dry_run)
        if not request.dry_run:
            for change in changes:
                if change.kind == "account" and change.action in {"change", "remove"}:  # of its role: logins have it
                    await self._end_logins(change.name)
        return Reply(await asyncio.to_thread(_answer, changes))


def _answer(changes: Sequence[ConfigChange]) -> Any:
    message = pb.LoadConfigSnapshotResponse()
    for change in changes:
        message.changes.add(**_printed(change))
    return message


def _printed(change: ConfigChange) -> dict[str, str]:
    return {
        "kind": change.kind,
        "name": change.name,
        "action": change.action,
        "old_value": print_value(change.old) if change.old is not None else "",
        "new_value": print_value(change.new) if change.new is not None else "",
    }
