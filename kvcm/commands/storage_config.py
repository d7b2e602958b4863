"""`kvcm storage show`, `add` and `update`: how a storage is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvcm.admin_client import AdminClient
from kvcm.commands.changes import changes, print_changes
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, DryRun, with_options
from kvcm.commands.shown import plain, print_fields, print_json
from kvcm.commands.storage import Name, storage_app
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.refusals import asking
from kvcm.sizes import parse_size, shown_size

__all__: list[str] = []

_SPECS = {
    "file": "nfs",
    "hf3fs": "threefs",
    "vcns_hf3fs": "vcnsthreefs",
    "mooncake": "mooncake",
    "pace": "tair_mem_pool",
    "dummy": "dummy",
}
_HELD_BY = {field: kind for kind, field in _SPECS.items()}
_NUMBERS = {
    FieldDescriptor.TYPE_INT32: lambda text: _whole(text, 1 << 31),
    FieldDescriptor.TYPE_INT64: lambda text: _whole(text, 1 << 63),
}

Capacity = Annotated[
    str,
    typer.Option("--capacity", metavar="SIZE", help="What all groups together may use, as in 10GiB; 0 is no limit."),
]
Mark = Annotated[
    float | None,
    typer.Option("--mark", metavar="RATIO", help="Evict above this share of the capacity; above 1 is never, 0 is 0.9."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="A field of the type's settings, as `show` names it; repeatable."
    ),
]
Check = Annotated[
    bool | None, typer.Option("--check/--no-check", help="3FS: look for mount point and directory when it is opened.")
]


@storage_app.command("show")
@with_options
def show_storage(connection: Connection, name: Name, as_json: AsJson = False) -> None:
    """Show how a storage is configured; `kvcm storage list` shows how it is."""
    with asking():
        config = _found(connection.admin(), name)
    if as_json:
        print_json(plain(config))
        return
    kind = config.WhichOneof("storage_spec") or ""
    spec = plain(getattr(config, kind)) if kind else {}
    print_fields(
        [
            ("name", config.global_unique_name),
            ("type", _HELD_BY.get(kind, kind)),
            *((field, str(value)) for field, value in spec.items()),
            ("capacity", shown_size(config.capacity_bytes) if config.capacity_bytes else "no limit"),
            ("evict above", "never" if config.used_percentage > 1 else f"{100 * (config.used_percentage or 0.9):g} %"),
        ]
    )


@storage_app.command("add")
@with_options
def add_storage(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of letters, digits, '.', '_' and '-'; not taken yet.")],
    kind: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="file, hf3fs, vcns_hf3fs, mooncake, pace or dummy.")
    ],
    root: Annotated[
        str, typer.Option("--root", metavar="PATH", help="file and dummy: the directory that all engines have mounted.")
    ] = "",
    fields: Set = None,
    capacity: Capacity = "",
    mark: Mark = None,
    check: Check = None,
) -> None:
    """Add a storage; groups use it when it is among their candidates.

    3FS needs --set mountpoint=… --set root_dir=…; mooncake local_hostname, metadata_connstring, protocol and
    master_service_entry; a memory pool (pace) node_id and capacity_bytes.
    """
    with asking():
        config = admin_pb.StorageConfig(global_unique_name=name)
        spec = _spec_of(config, kind)
        if root:
            _set(spec, "root_path", root if root.endswith("/") else f"{root}/")
        _apply(config, spec, fields, capacity, mark, check)
        connection.admin().call("AddStorage", admin_pb.AddStorageRequest(storage=config), admin_pb.CommonResponse)


@storage_app.command("update")
@with_options
def update_storage(
    connection: Connection,
    name: Name,
    fields: Set = None,
    capacity: Capacity = "",
    mark: Mark = None,
    check: Check = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change what is given of a storage, and nothing else; in force at once."""
    with asking():
        client = connection.admin()
        old = _found(client, name)
        new = admin_pb.StorageConfig()
        new.CopyFrom(old)
        _apply(new, getattr(new, str(new.WhichOneof("storage_spec"))), fields, capacity, mark, check)
        found = changes(old, new)
        if found and not dry_run:
            client.call("UpdateStorage", admin_pb.UpdateStorageRequest(storage=new), admin_pb.CommonResponse)
    print_changes(found, dry_run=dry_run, as_json=as_json)


def _found(client: AdminClient, name: str) -> admin_pb.StorageConfig:
    answer = client.call("ListStorage", admin_pb.ListStorageRequest(), admin_pb.ListStorageResponse)
    for config in answer.storage:
        if config.global_unique_name == name:
            return config
    raise InvalidArgumentError(f"storage {name!r} does not exist")


def _spec_of(config: admin_pb.StorageConfig, kind: str) -> Message:
    if kind not in _SPECS:
        raise InvalidArgumentError(f"--type is {kind!r}, must be one of {', '.join(_SPECS)}")
    spec: Message = getattr(config, _SPECS[kind])
    spec.SetInParent()
    return spec


def _apply(
    config: admin_pb.StorageConfig,
    spec: Message,
    fields: list[str] | None,
    capacity: str,
    mark: float | None,
    check: bool | None,
) -> None:
    for text in fields or ():
        name, separator, value = text.partition("=")
        if not separator:
            raise InvalidArgumentError(f"--set {text!r} is not FIELD=VALUE")
        _set(spec, name, value)
    if capacity:
        config.capacity_bytes = parse_size(capacity)
    if mark is not None:
        config.used_percentage = mark
    if check is not None:
        config.check_storage_available_when_open = check


def _set(spec: Message, name: str, text: str) -> None:
    field = spec.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        known = ", ".join(spec.DESCRIPTOR.fields_by_name)
        raise InvalidArgumentError(f"a storage of this type has no field {name!r}, it has {known}")
    try:
        setattr(spec, name, _parser(field)(text))
    except ValueError as error:
        raise InvalidArgumentError(f"{name} is {text!r}, must be {error}") from None


def _parser(field: Any) -> Callable[[str], Any]:
    if field.name.endswith("_bytes"):
        return parse_size
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _truth
    return _NUMBERS.get(field.type, str)


def _truth(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("true or false")
    return text == "true"


def _whole(text: str, end: int) -> int:
    if not text.isdecimal() or int(text) >= end:
        raise ValueError(f"a whole number below {end}")
    return int(text)
