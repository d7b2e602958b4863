"""`kvcm group`, `storage`, `quota` and `pin`: what a running manager uses, and may use."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcm.admin_client import AdminClient
from kvcm.capacity_tables import ListedStorage, print_drains, print_storages, print_usage, shown_time
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.refusals import CANNOT_RUN, FAILED, refusals
from kvcm.service.drain_view import DrainStatus
from kvcm.service.translate import read, storage_of
from kvcm.service.usage_values import StorageStatus, UsageReport
from kvcm.sizes import parse_size, shown_size

__all__ = ["capacity_apps"]

_WIDTH = 160
_LONG_SECONDS = 6 * 3600.0  # a look at every object of a storage


def _app(name: str, text: str) -> typer.Typer:
    return typer.Typer(name=name, help=text, no_args_is_help=True, pretty_exceptions_enable=False)


_group_app = _app("group", "Instance groups of a running manager.")
_storage_app = _app("storage", "Storages of a running manager: how they are, and what on them is worth nothing.")
_quota_app = _app("quota", "Limits over several instance groups, by their global_quota_group_name.")
_pin_app = _app("pin", "Prefixes that are kept from eviction.")

capacity_apps = (_group_app, _storage_app, _quota_app, _pin_app)
"""To be added to the command line."""

Manager = Annotated[str, typer.Option("--manager", metavar="URL", help="HTTP address of its admin port.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Delete = Annotated[bool, typer.Option("--delete", help="Delete what is found; without it, only count.")]
_ADMIN, _DATA = "http://127.0.0.1:6492", "http://127.0.0.1:6382"


@_group_app.command("usage")
def group_usage(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Only this group and what it draws from.")] = "",
    manager: Manager = _ADMIN,
    as_json: AsJson = False,
) -> None:
    """Show what groups, storages and global quotas use and may use."""
    request = capacity_pb.GetUsageRequest(instance_group=name)
    with refusals(FAILED, CANNOT_RUN):
        answer = AdminClient(manager).call("GetUsage", request, capacity_pb.GetUsageResponse)
        report = read(UsageReport, answer)
    if as_json:
        typer.echo(json.dumps(asdict(report, dict_factory=_with_names)))
    else:
        print_usage(report, _console())


@_storage_app.command("list")
def list_storages(manager: Manager = _ADMIN, as_json: AsJson = False) -> None:
    """List storages and how they are for the manager that is asked: each manager probes what it has open."""
    with refusals(FAILED, CANNOT_RUN):
        client = AdminClient(manager)
        answer = client.call("ListStorage", admin_pb.ListStorageRequest(), admin_pb.ListStorageResponse)
        usage = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
        storages = _listed(answer, read(UsageReport, usage))
    if as_json:
        typer.echo(json.dumps({"storages": list(map(_storage_fields, storages))}))
    else:
        print_storages(storages, _console())


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
    status = asdict(storage.status, dict_factory=_with_names) if storage.status is not None else {}
    status.pop("storage_unique_name", None)
    return {**fields, "used_bytes": storage.used_bytes, "capacity_bytes": storage.capacity_bytes, **status}


@_storage_app.command("drain")
def drain_storage(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The storage.")],
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Let it take writes again; what is left on it stays.")
    ] = False,
    manager: Manager = _ADMIN,
) -> None:
    """Empty a storage: nothing is written to it any more, and its blocks are evicted in the background."""
    with refusals(FAILED, CANNOT_RUN):
        client = AdminClient(manager)
        if cancel:
            client.call("CancelDrain", storage_pb.CancelDrainRequest(storage_unique_name=name), admin_pb.CommonResponse)
        else:
            request = storage_pb.DrainStorageRequest(storage_unique_name=name)
            client.call("DrainStorage", request, admin_pb.CommonResponse)


@_storage_app.command("drains")
def list_drains(manager: Manager = _ADMIN, as_json: AsJson = False) -> None:
    """List the storages that are being emptied, and removed ones whose blocks are still to be forgotten."""
    with refusals(FAILED, CANNOT_RUN):
        answer = AdminClient(manager).call("ListDrain", storage_pb.ListDrainRequest(), storage_pb.ListDrainResponse)
        drains = [read(DrainStatus, drain) for drain in answer.drains]
    if as_json:
        typer.echo(json.dumps({"drains": [asdict(drain, dict_factory=_with_names) for drain in drains]}))
    else:
        print_drains(drains, _console())


@_storage_app.command("scrub")
def scrub_storage(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The storage.")],
    cluster_id: Annotated[
        str, typer.Option("--cluster-id", help="Bytes of another deployment, which must be gone for good.")
    ] = "",
    delete: Delete = False,
    min_age: Annotated[
        int, typer.Option("--min-age", metavar="SECONDS", min=0, help="Leave younger objects alone; 0 is one hour.")
    ] = 0,
    manager: Manager = _ADMIN,
    as_json: AsJson = False,
) -> None:
    """Look for bytes that no metadata knows; a dry run unless --delete is given.

    Exit code 0: done; 1: refused, or some objects could not be looked at or deleted; 2: the manager could not be asked.
    """
    request = capacity_pb.ScrubStorageRequest(
        storage_unique_name=name, cluster_id=cluster_id, dry_run=not delete, min_age_seconds=min_age
    )
    with refusals(FAILED, CANNOT_RUN):
        client = AdminClient(manager)
        answer = client.call("ScrubStorage", request, capacity_pb.ScrubStorageResponse, _LONG_SECONDS)
    counts = _counts(answer)
    _print_counts(counts, as_json=as_json)
    if not (delete or as_json) and answer.orphans:
        typer.echo("nothing was deleted: give --delete for that")
    if answer.failed:
        raise typer.Exit(FAILED)


@_storage_app.command("garbage")
def collect_garbage(
    instance: Annotated[str, typer.Option("--instance", metavar="ID", help="Only this instance.")] = "",
    check_bytes: Annotated[
        bool, typer.Option("--check-bytes", help="Also ask the storages whether the bytes are there, which is slow.")
    ] = False,
    delete: Delete = False,
    manager: Manager = _ADMIN,
    as_json: AsJson = False,
) -> None:
    """Look for blocks whose prefix or bytes are gone; a dry run unless --delete is given."""
    request = capacity_pb.CollectGarbageRequest(instance_id=instance, dry_run=not delete, check_bytes=check_bytes)
    with refusals(FAILED, CANNOT_RUN):
        client = AdminClient(manager)
        answer = client.call("CollectGarbage", request, capacity_pb.CollectGarbageResponse, _LONG_SECONDS)
    _print_counts(_counts(answer), as_json=as_json)
    found = answer.without_bytes or answer.without_prefix or answer.expired_sessions
    if not (delete or as_json) and found:
        typer.echo("nothing was freed: give --delete for that")


@_quota_app.command("set")
def set_quota(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The global_quota_group_name of the groups.")],
    capacity: Annotated[str, typer.Option("--capacity", metavar="SIZE", help="As in 10GiB, 500MB or plain bytes.")],
    mark: Annotated[
        float, typer.Option("--mark", metavar="RATIO", help="Evict above this share; above 1 is never, 0 is 0.9.")
    ] = 0.0,
    manager: Manager = _ADMIN,
) -> None:
    """Limit what all groups of one name use together; in force at once."""
    with refusals(FAILED, CANNOT_RUN):
        quota = capacity_pb.GlobalQuota(name=name, capacity_bytes=parse_size(capacity), used_percentage=mark)
        request = capacity_pb.SetGlobalQuotaRequest(global_quota=quota)
        AdminClient(manager).call("SetGlobalQuota", request, admin_pb.CommonResponse)


@_quota_app.command("list")
def list_quotas(manager: Manager = _ADMIN, as_json: AsJson = False) -> None:
    """List the limits over groups."""
    with refusals(FAILED, CANNOT_RUN):
        request = capacity_pb.ListGlobalQuotaRequest()
        answer = AdminClient(manager).call("ListGlobalQuota", request, capacity_pb.ListGlobalQuotaResponse)
    quotas = [_counts(quota) for quota in answer.global_quotas]
    if as_json:
        typer.echo(json.dumps({"global_quotas": quotas}))
        return
    rows = ((each["name"], shown_size(each["capacity_bytes"]), _shown_mark(each["used_percentage"])) for each in quotas)
    _print_table(("global quota", "capacity", "evict above"), rows)


@_quota_app.command("remove")
def remove_quota(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The limit.")], manager: Manager = _ADMIN
) -> None:
    """Forget a limit over groups; in force at once."""
    with refusals(FAILED, CANNOT_RUN):
        request = capacity_pb.RemoveGlobalQuotaRequest(name=name)
        AdminClient(manager).call("RemoveGlobalQuota", request, admin_pb.CommonResponse)


@_pin_app.command("list")
def list_pins(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.")],
    manager: Annotated[str, typer.Option("--manager", metavar="URL", help="HTTP address of its data port.")] = _DATA,
    as_json: AsJson = False,
) -> None:
    """List the pins of an instance; those that end first come first."""
    with refusals(FAILED, CANNOT_RUN):
        request = pin_pb.ListPinsRequest(instance_id=instance)
        answer = AdminClient(manager).call("ListPins", request, pin_pb.ListPinsResponse)
    pins = [_counts(pin) for pin in answer.pins]
    if as_json:
        typer.echo(json.dumps({"pins": pins}))
        return
    rows = (
        (pin["pin_id"], pin["owner"], f"{pin['blocks']:,}", shown_size(pin["bytes"]), shown_time(pin["deadline_ms"]))
        for pin in pins
    )
    _print_table(("pin", "owner", "blocks", "bytes", "until"), rows)


def _counts(message: Any) -> dict[str, Any]:
    """Return the plain fields of a message, those that are 0 too."""
    fields = (field for field in message.DESCRIPTOR.fields if field.message_type is None)
    return {field.name: getattr(message, field.name) for field in fields}


def _with_names(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.name if isinstance(value, Enum) else value for name, value in items}


def _shown_mark(ratio: float) -> str:
    return "never" if ratio > 1 else f"{100 * (ratio or 0.9):g} %"


def _print_counts(counts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(counts))
        return
    rows = ((name.replace("_", " "), _shown_count(name, count)) for name, count in counts.items())
    _print_table(("found", "number"), rows)


def _shown_count(name: str, count: int) -> str:
    return shown_size(count) if name == "bytes" or name.endswith("_bytes") else f"{count:,}"


def _console() -> Console:
    """Return where tables go; in a file or pipe they need no more folding than on a wide terminal."""
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_WIDTH)


def _print_table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table)
