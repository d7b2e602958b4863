"""`kvcm group`: instance groups, what they may use and what they use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer

from kvcm.admin_client import AdminClient
from kvcm.capacity_tables import print_usage
from kvcm.commands.changes import changes, print_changes
from kvcm.commands.completion import group_names
from kvcm.commands.connection import Connection
from kvcm.commands.group_options import GroupOptions, new_group
from kvcm.commands.options import AsJson, DryRun, Yes, confirm, noun, with_options
from kvcm.commands.shown import console, plain, print_below, print_fields, print_json, print_table
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import DEFAULT_HYSTERESIS, InstanceGroup
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.refusals import asking
from kvcm.service.translate import read
from kvcm.service.usage_values import UsageReport
from kvcm.sizes import shown_size

__all__ = ["group_app", "group_usage"]

group_app = noun("group", "Instance groups of a running manager: who may use how much of what.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The group.", autocompletion=group_names)]


@group_app.command("usage")
@with_options
def group_usage(
    connection: Connection,
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="Only this group and what it draws from.", autocompletion=group_names),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show what groups, storages and global quotas use and may use."""
    request = capacity_pb.GetUsageRequest(instance_group=name)
    with asking():
        answer = connection.admin().call("GetUsage", request, capacity_pb.GetUsageResponse)
        report = read(UsageReport, answer)
    if as_json:
        print_json(asdict(report, dict_factory=_with_names))
    else:
        print_usage(report, console())


def _with_names(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.name if isinstance(value, Enum) else value for name, value in items}


@group_app.command("list")
@with_options
def list_groups(connection: Connection, as_json: AsJson = False) -> None:
    """List the groups and what they may use; `kvcm group usage` shows what they use."""
    with asking():
        request = group_pb.ListInstanceGroupRequest()
        answer = connection.admin().call("ListInstanceGroup", request, group_pb.ListInstanceGroupResponse)
        groups = [read(InstanceGroup, each) for each in answer.instance_groups]
    if as_json:
        print_json({"groups": [plain(each) for each in answer.instance_groups]})
        return
    columns = ("group", "storages", "quota", "evict above", "policy", "global quota", "pin budget", "version")
    rows = (
        (
            each.name,
            ", ".join(each.storage_candidates),
            shown_size(each.quota.capacity),
            _marks(each)[0],
            each.policy_of("").name,
            each.global_quota_group_name,
            shown_size(each.pin_budget_bytes),
            str(each.version),
        )
        for each in groups
    )
    print_table(columns, rows, words=("storages", "policy", "global quota"))


@group_app.command("show")
@with_options
def show_group(connection: Connection, name: Name, as_json: AsJson = False) -> None:
    """Show how a group is configured."""
    with asking():
        message = _found(connection.admin(), name)
        group = read(InstanceGroup, message)
    if as_json:
        print_json(plain(message))
    else:
        print_fields(_fields(group))


def _fields(group: InstanceGroup) -> list[tuple[str, str]]:
    strategy = group.cache_config.reclaim_strategy
    policy = group.policy_of("")
    high, low = _marks(group)
    delay = f"{strategy.delay_before_delete_ms} ms after eviction"
    return [
        ("name", group.name),
        ("storages", ", ".join(group.storage_candidates)),
        ("prefers", group.cache_config.data_storage_strategy.name),
        ("quota", shown_size(group.quota.capacity)),
        *((f"quota on {each.storage_type.kind}", shown_size(each.capacity)) for each in group.quota.quota_config),
        *(
            (f"guaranteed on {each.storage_unique_name}", shown_size(each.guaranteed_bytes))
            for each in group.storage_guarantees
        ),
        ("global quota", group.global_quota_group_name),
        ("pin budget", shown_size(group.pin_budget_bytes)),
        ("policy", policy.name),
        ("blocks leave at age", f"{policy.ttl_seconds} s" if policy.ttl_seconds else "no age"),
        ("evicts above", high),
        ("down to", low),
        ("bytes are deleted", delay),
        ("instances share by", strategy.share or "group_lru"),
        ("prefix classes", ", ".join(each.name for each in strategy.prefix_classes) or "none"),
        ("instances apart", ", ".join(each.instance_id for each in strategy.instance_overrides) or "none"),
        ("most instances", str(group.max_instance_count or "no limit")),
        ("most blocks of one", str(group.cache_config.meta_indexer_config.max_key_count or "default")),
        ("user data", group.user_data),
        ("version", str(group.version)),
    ]


def _marks(group: InstanceGroup) -> tuple[str, str]:
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    if not 0 < trigger.used_percentage <= 1:
        size = trigger.used_size
        return (shown_size(size), "") if size else ("never", "never")
    hysteresis = DEFAULT_HYSTERESIS if trigger.hysteresis is None else trigger.hysteresis
    low = max(0.0, trigger.used_percentage - hysteresis)
    return f"{100 * trigger.used_percentage:g} %", f"{100 * low:g} %"


@group_app.command("create")
@with_options
def create_group(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group, not taken yet.")],
    options: GroupOptions,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create a group; --storage and --quota have to be given, everything else has a default.

    Without more it evicts above 80 % (leaf_lru), and its global quota has its own name.
    """
    with asking():
        if not options.storages or options.quota is None:
            raise InvalidArgumentError(
                "a group needs --storage, once at least, and --quota: --storage nfs_01 --quota 10GiB"
            )
        group = new_group(name)
        options.write(group)
        if not dry_run:
            request = pb.CreateInstanceGroupRequest(instance_group=group)
            answer = connection.admin().call("CreateInstanceGroup", request, pb.CommonResponse)
            _warn(answer)
    if as_json:
        print_json(plain(group))
    elif dry_run:
        print_fields(_fields(read(InstanceGroup, group)))
        print_below("nothing was created: leave --dry-run out for that")


@group_app.command("update")
@with_options
def update_group(
    connection: Connection, name: Name, options: GroupOptions, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Change what is given of a group, and nothing else; in force at once.

    Refused when somebody else changed the group meanwhile: run it again.
    """
    with asking():
        client = connection.admin()
        old = _found(client, name)
        new = pb.InstanceGroup()
        new.CopyFrom(old)
        options.write(new)
        found = changes(old, new)
        if found and not dry_run:
            new.version = old.version + 1
            request = pb.UpdateInstanceGroupRequest(instance_group=new, current_version=old.version)
            _warn(client.call("UpdateInstanceGroup", request, pb.CommonResponse))
    print_changes(found, dry_run=dry_run, as_json=as_json)


@group_app.command("delete")
@with_options
def delete_group(connection: Connection, name: Name, yes: Yes = False) -> None:
    """Forget a group: its instances can still be read, and take no writes any more."""
    confirm(f"Forget group {name}?", yes=yes)
    with asking():
        request = pb.RemoveInstanceGroupRequest(name=name)
        connection.admin().call("RemoveInstanceGroup", request, pb.CommonResponse)


def _found(client: AdminClient, name: str) -> pb.InstanceGroup:
    request = pb.GetInstanceGroupRequest(name=name)
    return client.call("GetInstanceGroup", request, pb.GetInstanceGroupResponse).instance_group


def _warn(answer: pb.CommonResponse) -> None:
    if message := answer.header.status.message:
        typer.echo(f"kvcm: {message}", err=True)
