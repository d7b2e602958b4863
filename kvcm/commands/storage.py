"""`kvcm storage`: what there is to write to, how it is, and what on it is worth nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer

from kvcm.admin_client import AdminClient
from kvcm.capacity_tables import ListedStorage, print_drains, print_storages
from kvcm.commands.completion import instance_ids, storage_names
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, Yes, confirm, noun, with_options
from kvcm.commands.shown import console, plain_fields, print_below, print_counts, print_json, progress, waiting
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import storage_service_pb2 as storage_pb
from kvcm.refusals import FAILED, asking
from kvcm.service.translate import read, storage_of
from kvcm.service.usage_values import DrainState, DrainStatus, StorageStatus, UsageReport

__all__ = ["Name", "storage_app"]

storage_app = noun("storage", "Storages of a running manager: how they are, and what on them is worth nothing.")

_POLL_SECONDS = 0.5
_LONG_SECONDS = 6 * 3600.0  # a look at every object of a storage

Name = Annotated[str, typer.Argument(metavar="NAME", help="The storage.", autocompletion=storage_names)]
Delete = Annotated[bool, typer.Option("--delete", help="Delete what is found; without it, only count.")]


@storage_app.command("list")
@with_options
def list_storages(connection: Connection, as_json: AsJson = False) -> None:
    """List storages and how they are for the manager that is asked: each manager probes what it has open."""
    with asking():
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
    status = asdict(storage.status, dict_factory=_with_names) if storage.status is not None else {}
    status.pop("storage_unique_name", None)
    return {**fields, "used_bytes": storage.used_bytes, "capacity_bytes": storage.capacity_bytes, **status}


def _with_names(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.name if isinstance(value, Enum) else value for name, value in items}


@storage_app.command("enable")
@with_options
def enable_storage(connection: Connection, name: Name) -> None:
    """Use a storage again for reads and writes."""
    with asking():
        request = admin_pb.EnableStorageRequest(storage_unique_name=name)
        connection.admin().call("EnableStorage", request, admin_pb.CommonResponse)


@storage_app.command("disable")
@with_options
def disable_storage(connection: Connection, name: Name) -> None:
    """Take a storage out of use: its blocks count as missing until it is enabled."""
    with asking():
        request = admin_pb.DisableStorageRequest(storage_unique_name=name)
        connection.admin().call("DisableStorage", request, admin_pb.CommonResponse)


@storage_app.command("remove")
@with_options
def remove_storage(connection: Connection, name: Name, yes: Yes = False) -> None:
    """Forget a storage and all metadata of what lies on it; the bytes stay there."""
    confirm(f"Forget storage {name} and every block on it?", yes=yes)
    with asking():
        request = admin_pb.RemoveStorageRequest(storage_unique_name=name)
        connection.admin().call("RemoveStorage", request, admin_pb.CommonResponse)


@storage_app.command("drain")
@with_options
def drain_storage(
    connection: Connection,
    name: Name,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Let it take writes again; what is left on it stays.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show how far it is until it is empty; Ctrl-C ends the show, not the drain.")
    ] = False,
) -> None:
    """Empty a storage: nothing is written to it any more, and its blocks are evicted in the background."""
    if cancel:
        _cancel(connection, name)
        return
    with asking():
        client = connection.admin()
        request = storage_pb.DrainStorageRequest(storage_unique_name=name)
        client.call("DrainStorage", request, admin_pb.CommonResponse)
        if wait:
            _watch(client, name)


def _watch(client: AdminClient, name: str) -> None:
    left = _drain_of(client, name)
    most, reason = max(left.left_bytes, 1), ""
    with progress(f"draining {name}", most) as told:
        while left.state is DrainState.DRAIN_RUNNING:
            told(most - left.left_bytes)
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
    raise InvalidArgumentError(f"storage {name!r} is not being drained any more: somebody cancelled it, or removed it")


@storage_app.command("cancel")
@with_options
def cancel_drain(connection: Connection, name: Name) -> None:
    """End a drain: the storage takes writes again, and what is left on it stays."""
    _cancel(connection, name)


def _cancel(connection: Connection, name: str) -> None:
    with asking():
        request = storage_pb.CancelDrainRequest(storage_unique_name=name)
        connection.admin().call("CancelDrain", request, admin_pb.CommonResponse)


@storage_app.command("drains")
@with_options
def list_drains(connection: Connection, as_json: AsJson = False) -> None:
    """List what is being emptied or forgotten, how much is left, and why it does not go on."""
    with asking():
        answer = connection.admin().call("ListDrain", storage_pb.ListDrainRequest(), storage_pb.ListDrainResponse)
        drains = [read(DrainStatus, each) for each in answer.drains]
    if as_json:
        print_json({"drains": [asdict(each, dict_factory=_with_names) for each in drains]})
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
    """Look for bytes that no metadata knows; a dry run unless --delete is given.

    Exit code 0: done; 1: refused, or some objects could not be looked at or deleted; 2: the manager could not be asked.
    """
    request = capacity_pb.ScrubStorageRequest(
        storage_unique_name=name, cluster_id=cluster_id, dry_run=not delete, min_age_seconds=min_age
    )
    with asking(), waiting(f"looking at every object of {name}"):
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
    with asking(), waiting("looking at every block"):
        client = connection.admin()
        answer = client.call("CollectGarbage", request, capacity_pb.CollectGarbageResponse, _LONG_SECONDS)
    print_counts(plain_fields(answer), as_json=as_json)
    found = answer.without_bytes or answer.without_prefix or answer.expired_sessions
    if not (delete or as_json) and found:
        print_below("nothing was freed: give --delete for that")
