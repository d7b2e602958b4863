"""`kvcm storage`: storage backends, their health and configuration, drains, scrubs and garbage collection."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvcm.commands.connection import Connection, instance_ids, storage_names
from kvcm.commands.options import AsJson, DryRun, Yes, confirm, noun, with_options
from kvcm.commands.output import (
    changes,
    console,
    enum_names,
    plain,
    plain_fields,
    print_below,
    print_changes,
    print_counts,
    print_fields,
    print_json,
    print_remark,
    progress,
    spinner,
)
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageType
from kvcm.model.units import format_size, parse_size
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.service.translate import read, storage_of
from kvcm.service.usage_values import DrainState, DrainStatus, StorageStatus, UsageReport
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import FAILED, exit_on_call_errors
from kvcm.terminal.tables import ListedStorage, print_drains, print_storages

__all__ = ["Name", "storage_app"]

storage_app = noun("storage", "Storages of a running manager: health, configuration, drains, orphans and garbage.")
_POLL_SECONDS = 0.5
_LONG_SECONDS = 6 * 3600.0  # a scrub reads every object of a storage
Name = Annotated[str, typer.Argument(metavar="NAME", help="The storage.", autocompletion=storage_names)]
Delete = Annotated[bool, typer.Option("--delete", help="Delete the findings; without it, only count.")]


@storage_app.command("list")
@with_options
def list_storages(connection: Connection, as_json: AsJson = False) -> None:
    """List storages and their health as this manager sees it: each manager probes the storages that it has open."""
    with exit_on_call_errors():
        client = connection.admin()
        answer = client.call("ListStorage", admin_pb.ListStorageRequest(), admin_pb.ListStorageResponse)
        usage = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
        storages = _listed(answer, read(UsageReport, usage))
    if as_json:
        print_json({"storages": list(map(_storage_fields, storages))})
    else:
        print_storages(storages, console())


def _listed(answer: admin_pb.ListStorageResponse, report: UsageReport) -> list[ListedStorage]:
    used = {each.storage_unique_name: each.usage.used_bytes for each in report.storages}
    known = {each.storage_unique_name: read(StorageStatus, each) for each in answer.storage_status}
    listed = []
    for config in map(storage_of, answer.storage):
        name, kind = config.global_unique_name, config.storage_type.kind
        listed.append(ListedStorage(name, kind, used.get(name, 0), config.limit_bytes, known.get(name)))
    return listed


def _storage_fields(storage: ListedStorage) -> dict[str, Any]:
    fields = {"name": storage.name, "type": storage.kind}
    status = asdict(storage.status, dict_factory=enum_names) if storage.status is not None else {}
    status.pop("storage_unique_name", None)
    return {**fields, "used_bytes": storage.used_bytes, "capacity_bytes": storage.capacity_bytes, **status}


@storage_app.command("enable")
@with_options
def enable_storage(connection: Connection, name: Name) -> None:
    """Use a storage again for reads and writes."""
    with exit_on_call_errors():
        request = admin_pb.EnableStorageRequest(storage_unique_name=name)
        connection.admin().call("EnableStorage", request, admin_pb.CommonResponse)


@storage_app.command("disable")
@with_options
def disable_storage(connection: Connection, name: Name) -> None:
    """Disable a storage: its blocks count as missing until it is enabled."""
    with exit_on_call_errors():
        request = admin_pb.DisableStorageRequest(storage_unique_name=name)
        connection.admin().call("DisableStorage", request, admin_pb.CommonResponse)


@storage_app.command("remove")
@with_options
def remove_storage(connection: Connection, name: Name, yes: Yes = False) -> None:
    """Forget a storage and all metadata of the blocks on it; the bytes stay there."""
    confirm(f"Forget storage {name} and every block on it?", yes=yes)
    with exit_on_call_errors():
        request = admin_pb.RemoveStorageRequest(storage_unique_name=name)
        connection.admin().call("RemoveStorage", request, admin_pb.CommonResponse)


@storage_app.command("drain")
@with_options
def drain_storage(
    connection: Connection,
    name: Name,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Let it accept writes again; blocks that are left on it stay.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show how far it is until it is empty; Ctrl-C ends the show, not the drain.")
    ] = False,
) -> None:
    """Empty a storage: nothing is written to it any more, and its blocks are evicted in the background."""
    if cancel:
        _cancel(connection, name)
        return
    with exit_on_call_errors():
        client = connection.admin()
        request = storage_pb.DrainStorageRequest(storage_unique_name=name)
        client.call("DrainStorage", request, admin_pb.CommonResponse)
        if wait:
            _watch(client, name)


def _watch(client: AdminClient, name: str) -> None:
    left = _drain_of(client, name)
    most, reason = max(left.left_bytes, 1), ""
    with progress(f"draining {name}", most) as show:
        while left.state is DrainState.DRAIN_RUNNING:
            show(most - left.left_bytes)
            if left.reason and left.reason != reason:
                reason = left.reason
                typer.echo(f"kvcm: {reason}", err=True)
            time.sleep(_POLL_SECONDS)
            left = _drain_of(client, name)


def _drain_of(client: AdminClient, name: str) -> DrainStatus:
    answer = client.call("ListDrain", storage_pb.ListDrainRequest(), storage_pb.ListDrainResponse)
    for each in answer.drains:
        if each.storage_unique_name == name:
            return read(DrainStatus, each)
    raise InvalidArgumentError(f"storage {name!r} is not being drained any more: the drain was cancelled or removed")


@storage_app.command("cancel")
@with_options
def cancel_drain(connection: Connection, name: Name) -> None:
    """End a drain: the storage accepts writes again, and blocks that are left on it stay."""
    _cancel(connection, name)


def _cancel(connection: Connection, name: str) -> None:
    with exit_on_call_errors():
        request = storage_pb.CancelDrainRequest(storage_unique_name=name)
        connection.admin().call("CancelDrain", request, admin_pb.CommonResponse)


@storage_app.command("drains")
@with_options
def list_drains(connection: Connection, as_json: AsJson = False) -> None:
    """List storages that are being emptied or forgotten, how much is left, and why a drain is stuck."""
    with exit_on_call_errors():
        answer = connection.admin().call("ListDrain", storage_pb.ListDrainRequest(), storage_pb.ListDrainResponse)
        drains = [read(DrainStatus, each) for each in answer.drains]
    if as_json:
        print_json({"drains": [asdict(each, dict_factory=enum_names) for each in drains]})
    else:
        print_drains(drains, console())


@storage_app.command("scrub")
@with_options
def scrub_storage(
    connection: Connection,
    name: Name,
    cluster_id: Annotated[
        str, typer.Option("--cluster-id", help="Bytes of another deployment, which must be gone for good.")
    ] = "",
    delete: Delete = False,
    min_age: Annotated[
        int, typer.Option("--min-age", metavar="SECONDS", min=0, help="Leave younger objects alone; 0 is one hour.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Look for orphans, bytes without metadata; a dry run unless --delete is given.

    Exit code 0: done; 1: refused, or some objects could not be read or deleted; 2: the manager is unavailable.
    """
    request = capacity_pb.ScrubStorageRequest(
        storage_unique_name=name, cluster_id=cluster_id, dry_run=not delete, min_age_seconds=min_age
    )
    with exit_on_call_errors(), spinner(f"reading every object of {name}"):
        client = connection.admin()
        answer = client.call("ScrubStorage", request, capacity_pb.ScrubStorageResponse, _LONG_SECONDS)
    print_counts(plain_fields(answer), as_json=as_json)
    if not (delete or as_json) and answer.orphans:
        print_below("nothing was deleted: give --delete for that")
    if answer.failed:
        raise typer.Exit(FAILED)


@storage_app.command("garbage")
@with_options
def collect_garbage(
    connection: Connection,
    instance: Annotated[
        str, typer.Option("--instance", metavar="ID", help="Only this instance.", autocompletion=instance_ids)
    ] = "",
    check_bytes: Annotated[
        bool, typer.Option("--check-bytes", help="Also ask the storages whether the bytes are there, which is slow.")
    ] = False,
    delete: Delete = False,
    as_json: AsJson = False,
) -> None:
    """Look for blocks whose prefix or bytes are gone; a dry run unless --delete is given."""
    request = capacity_pb.CollectGarbageRequest(instance_id=instance, dry_run=not delete, check_bytes=check_bytes)
    with exit_on_call_errors(), spinner("checking every block"):
        client = connection.admin()
        answer = client.call("CollectGarbage", request, capacity_pb.CollectGarbageResponse, _LONG_SECONDS)
    print_counts(plain_fields(answer), as_json=as_json)
    found = answer.without_bytes or answer.without_prefix or answer.expired_sessions
    if not (delete or as_json) and found:
        print_below("nothing was freed: give --delete for that")


# Configuration: `kvcm storage show`, `add` and `update`.

_REPORTS = [each for each in StorageType if each.is_event_report]
_SPECS = {
    "file": "nfs",
    "hf3fs": "threefs",
    "vcns_hf3fs": "vcnsthreefs",
    "mooncake": "mooncake",
    "pace": "tair_mem_pool",
    "dummy": "dummy",
    **{each.kind: "event_report" for each in _REPORTS},
}
_HELD_BY = {field: kind for kind, field in _SPECS.items()}
_NUMBERS = {
    FieldDescriptor.TYPE_INT32: lambda text: _integer(text, 1 << 31),
    FieldDescriptor.TYPE_INT64: lambda text: _integer(text, 1 << 63),
}
Capacity = Annotated[
    str,
    typer.Option("--capacity", metavar="SIZE", help="What all groups together may use, as in 10GiB; 0 is no limit."),
]
Watermark = Annotated[
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
    """Show the configuration of a storage; `kvcm storage list` shows its health."""
    with exit_on_call_errors():
        config = _found(connection.admin(), name)
    if as_json:
        print_json(plain(config))
        return
    kind = config.WhichOneof("storage_spec") or ""
    spec = plain(getattr(config, kind)) if kind else {}
    print_fields(
        [
            ("name", config.global_unique_name),
            ("type", StorageType(config.storage_type).kind if config.storage_type else _HELD_BY.get(kind, kind)),
            *((field, str(value)) for field, value in spec.items()),
            ("capacity", format_size(config.capacity_bytes) if config.capacity_bytes else "no limit"),
            ("evict above", "never" if config.used_percentage > 1 else f"{100 * (config.used_percentage or 0.9):g} %"),
        ]
    )


@storage_app.command("add")
@with_options
def add_storage(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of letters, digits, '.', '_' and '-'; not taken yet.")],
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="file, hf3fs, vcns_hf3fs, mooncake, pace, dummy, event_report_l1p5 or event_report_l2.",
        ),
    ],
    root: Annotated[
        str, typer.Option("--root", metavar="PATH", help="file and dummy: the directory that all engines have mounted.")
    ] = "",
    fields: Set = None,
    capacity: Capacity = "",
    mark: Watermark = None,
    check: Check = None,
) -> None:
    """Add a storage; groups use it when it is among their candidates, or those for reports.

    3FS needs --set mountpoint=… --set root_dir=…; mooncake local_hostname, metadata_connstring, protocol and
    master_service_entry; a memory pool (pace) node_id and capacity_bytes.
    """
    with exit_on_call_errors():
        config = admin_pb.StorageConfig(global_unique_name=name)
        spec = _spec_of(config, kind)
        if root:
            _set(spec, "root_path", root if root.endswith("/") else f"{root}/")
        _apply(config, spec, fields, capacity=capacity, mark=mark, check=check)
        request = admin_pb.AddStorageRequest(storage=config)
        print_remark(connection.admin().call("AddStorage", request, admin_pb.CommonResponse))


@storage_app.command("update")
@with_options
def update_storage(
    connection: Connection,
    name: Name,
    fields: Set = None,
    capacity: Capacity = "",
    mark: Watermark = None,
    check: Check = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a storage, and no others; in force at once."""
    with exit_on_call_errors():
        client = connection.admin()
        old = _found(client, name)
        new = admin_pb.StorageConfig()
        new.CopyFrom(old)
        spec = getattr(new, str(new.WhichOneof("storage_spec")))
        _apply(new, spec, fields, capacity=capacity, mark=mark, check=check)
        found = changes(old, new)
        if found and not dry_run:
            request = admin_pb.UpdateStorageRequest(storage=new)
            print_remark(client.call("UpdateStorage", request, admin_pb.CommonResponse))
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
    if StorageType.of_kind(kind).is_event_report:  # of others the spec says the type
        config.MergeFrom(admin_pb.StorageConfig(storage_type=StorageType.of_kind(kind).name))
    return spec


def _apply(
    config: admin_pb.StorageConfig,
    spec: Message,
    fields: list[str] | None,
    *,
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
        return _bool
    return _NUMBERS.get(field.type, str)


def _bool(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("true or false")
    return text == "true"


def _integer(text: str, end: int) -> int:
    if not text.isdecimal() or int(text) >= end:
        raise ValueError(f"a whole number below {end}")
    return int(text)
