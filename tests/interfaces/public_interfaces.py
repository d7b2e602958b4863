"""The public interfaces as plain data: wire, settings, metrics, resources under /v1, commands, stored documents.

Help texts and descriptions are left out: they may change from commit to commit, the rest must not. Run as a script,
this module writes the snapshots that `test_public_interfaces.py` compares the code with. Do that only for a change of
an interface that is wanted.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor
from typer.main import get_command

import kvcm.protocol

__all__ = ["INTERFACES", "snapshot"]

_FOLDER: Final = Path(__file__).parent
_SITE: Final = _FOLDER.parents[1] / "docs" / "site"
_PROSE: Final = {"description", "summary", "title", "example", "examples"}


def wire() -> dict[str, Any]:
    """Return messages, enums and services of the contract by full name."""
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kvcm.protocol.__path__, "kvcm.protocol."):
        if module.name.endswith("_pb2"):
            file: FileDescriptor = importlib.import_module(module.name).DESCRIPTOR
            for message in file.message_types_by_name.values():
                found.update(_message(message))
            found.update(map(_enum, file.enum_types_by_name.values()))
            found.update(map(_service, file.services_by_name.values()))
    return found


def _message(message: Descriptor) -> Iterator[tuple[str, Any]]:
    yield message.full_name, {field.name: _field(field) for field in message.fields}
    for nested in message.nested_types:
        yield from _message(nested)
    yield from map(_enum, message.enum_types)


def _field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    oneof = f" in {field.containing_oneof.name}" if field.containing_oneof else ""
    return f"{field.number}: {label}{kind.full_name if kind else f'type {field.type}'}{oneof}"


def _enum(enum: EnumDescriptor) -> tuple[str, Any]:
    return enum.full_name, {value.name: value.number for value in enum.values}


def _service(service: ServiceDescriptor) -> tuple[str, Any]:
    calls = service.methods_by_name.values()
    return service.full_name, {
        call.name: f"{call.input_type.full_name} -> {call.output_type.full_name}" for call in calls
    }


def settings() -> dict[str, Any]:
    """Return defaults of settings by their keys, and whether a running manager takes them over."""
    from kvcm.config import Settings

    shown = {True: "hot", False: "at start"}
    fields = dataclasses.fields(Settings)
    return {field.metadata["key"]: [repr(field.default), shown[field.metadata["hot"]]] for field in fields}


def metrics() -> dict[str, Any]:
    """Return kinds and labels of metrics by their names."""
    from kvcm.telemetry.metrics import METRICS

    return {metric.name: [metric.kind.value, *metric.labels] for metric in METRICS}


def resources() -> dict[str, Any]:
    """Return the OpenAPI document of the resources under /v1, and where calls are served, as a manager answers them."""
    sys.path.insert(0, str(_SITE))
    from served import ask

    served = ask()
    document = {key: value for key, value in served.resources.items() if key in ("paths", "components", "security")}
    calls = {f"{service}.{name}": f"{call.plane} {call.path}" for (service, name), call in served.calls.items()}
    return {"calls": calls, **_without_prose(document)}


def _without_prose(value: Any, *, names: bool = False) -> Any:
    """Return a part of the document without texts for people; `names` says that its keys are names of fields."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if names or key not in _PROSE}
        return {key: _without_prose(inner, names=not names and key == "properties") for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_prose(inner) for inner in value]
    return value


def commands() -> dict[str, Any]:
    """Return arguments and options of commands by the typed words."""
    from kvcm.cli import app

    return dict(_commands(get_command(app), "kvcm"))


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each not in arguments]
    yield (
        path,
        {
            **{f"argument {position}": _parameter(each) for position, each in enumerate(arguments)},
            **{"/".join((*each.opts, *each.secondary_opts)): _parameter(each) for each in options},
        },
    )
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(inner, f"{path} {name}")


def _parameter(parameter: Any) -> str:
    default = None if callable(parameter.default) else parameter.default
    default = getattr(default, "value", default)
    parts = [parameter.param_type_name, _type(parameter), f"default {default!r}", f"takes {parameter.nargs}"]
    flags = [name for name in ("required", "multiple", "is_flag", "hidden") if getattr(parameter, name, False)]
    return ", ".join((*parts, *flags, *([f"or {parameter.envvar}"] if parameter.envvar else [])))


def _type(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {[value.value for value in kind]}"
    return getattr(kind, "__name__", str(kind))


def stored_documents() -> dict[str, str]:
    """Return an example of each stored document as it is encoded: values of the registry as text, others in hex."""
    return {**_registry_documents(), **_block_documents(), **_other_documents()}


def _registry_documents() -> dict[str, str]:
    from kvcm.model.groups import GlobalQuota, InstanceGroup
    from kvcm.model.instances import Registration
    from kvcm.model.principals import Account, ApiKey
    from kvcm.model.storages import StorageConfig
    from kvcm.registry.api_keys import KeyUse
    from kvcm.registry.document_cache import encode_document

    kinds = (Account, InstanceGroup, Registration, ApiKey, GlobalQuota, KeyUse)
    values = {kind.__name__: _example(kind) for kind in kinds}
    config = _example(StorageConfig)
    for spec in get_args(get_type_hints(StorageConfig)["spec"]):
        values[f"StorageConfig of {spec.__name__}"] = dataclasses.replace(config, spec=_example(spec))
    return {name: encode_document(value).decode() for name, value in values.items()}


def _example(kind: Any, name: str = "") -> Any:
    """Return a value of a type in which every field is set."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _example(inner[0], name)
    if origin is tuple:
        return tuple(_example(each, name) for each in inner if each is not Ellipsis)
    if origin is frozenset:
        return frozenset({_example(inner[0], name)})
    if origin is not None:  # a mapping
        return {_example(inner[0], name): _example(inner[1], name)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    if kind in _EXAMPLES:
        return _EXAMPLES[kind](name)
    hints = get_type_hints(kind)
    return kind(**{each: _example(hint, each) for each, hint in hints.items() if each in _fields(kind)})


def _fields(kind: Any) -> Collection[str]:
    return kind._fields if hasattr(kind, "_fields") else {each.name for each in dataclasses.fields(kind) if each.init}


_EXAMPLES: Final[dict[Any, Callable[[str], Any]]] = {
    str: lambda name: f"a {name}",
    bytes: lambda name: name.encode(),
    int: lambda name: 1000 + len(name),
    float: lambda name: len(name) + 0.25,
    bool: lambda _name: True,
}


def _block_documents() -> dict[str, str]:
    from kvcm.index import codec
    from kvcm.model.keys import mixed_key
    from kvcm.model.locations import BlockRecord, Location, LocationStatus, SpecUri, encode_chunk
    from kvcm.model.storages import StorageType

    def record(location: Location) -> str:
        parent = None if location.priority else mixed_key(-5)
        return codec.encode_payload(BlockRecord(parent, 3, (location,))).hex()

    chunk = encode_chunk(StorageType.ST_NFS, 4096, [SpecUri("kv", "file://disk/a?size=4096", 1), SpecUri("s", "b", 2)])
    locations = {status: _example(Location)._replace(status=status, chunk=chunk) for status in LocationStatus}
    plain = Location("id", "disk", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",), chunk, 4096, 1.5)
    found = {f"block, {status.name}": record(location) for status, location in locations.items()}
    return {"location": chunk.hex(), "block": record(plain), **found}


def _other_documents() -> dict[str, str]:
    from kvcm.cache.pins import Pin, PinnedLocation, PinnedLocations
    from kvcm.cache.read_leases import ReadLease
    from kvcm.cache.write_sessions import Checksums, EndedSession, FinishedWrite, WriteSession
    from kvcm.model.keys import mixed
    from kvcm.storage.mempool import PoolChunk, PoolState

    keys = one, other, _ = mixed((1, -2, 3))
    session = WriteSession("id", 7, 12.5, "place", tuple(keys))
    checked = dataclasses.replace(session, decision=(True, False, True), checksums=Checksums(("kv",), b"12345678" * 3))
    pinned = PinnedLocations.of([PinnedLocation(one, "a", 10), PinnedLocation(other, "b", 20)])
    values = {
        "session": session,
        "session, hinted": dataclasses.replace(session, priority=2, keep_until=99.5),
        "session, decided": checked,
        "session, owned": dataclasses.replace(checked, starter="engine"),
        "session, ended": EndedSession(7, "engine", (True, False, True), FinishedWrite(2, 1, 0)),
        "session, ended, a prefix": EndedSession(7, "", (True, True, False), FinishedWrite(2, 1, 0)),
        "read lease": ReadLease("id", 7, 12.5, ((7, one, "a"), (7, other, "b"))),
        "pin": Pin("id", 7, "group", "owner", 12.5, pinned),
        "state of a memory pool": PoolState(2, 3, 12.5, 4000, 1),
        "chunk of a memory pool": PoolChunk(1 << 21, 9, 1 << 19, np.array([4, 0, 9], np.uint64), 1 << 20),
    }
    return {name: value.encoded().hex() for name, value in values.items()}


INTERFACES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    made.__name__: made for made in (wire, settings, metrics, resources, commands, stored_documents)
}


def snapshot(name: str) -> Path:
    """Return where an interface's snapshot lies."""
    return _FOLDER / f"{name}.json"


if __name__ == "__main__":
    for interface, current in INTERFACES.items():
        snapshot(interface).write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
