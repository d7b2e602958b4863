"""`kvcm group`, `kvcm usage` and `kvcm quota`: instance groups, their usage and limits, and global quotas."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvcm.commands.connection import Connection, block_store_names, group_names, quota_names, storage_names
from kvcm.commands.options import AsJson, DryRun, Yes, confirm, noun, one_of, with_options
from kvcm.commands.output import (
    changes,
    console,
    enum_names,
    plain,
    plain_fields,
    print_below,
    print_changes,
    print_fields,
    print_json,
    print_remark,
    print_table,
    progress,
)
from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.model.groups import DEFAULT_HYSTERESIS, InstanceGroup
from kvcm.model.storages import StorageType
from kvcm.model.units import format_size, parse_duration, parse_size
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.service.translate import read
from kvcm.service.usage_values import BlockMoveState, BlockStoreStatus, GroupStoreStatus, UsageReport
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import exit_on_call_errors
from kvcm.terminal.tables import print_group_stores, print_usage

__all__ = ["GroupOptions", "group_app", "group_usage", "quota_app"]

# Options of a group: those that are given are written into its message, the other fields stay.

_DEFAULT_HIGH = 0.8
_DEFAULT_DELAY_MS = 1000
_POLICIES = ("leaf_lru", "lru", "lfu", "lfu_aging", "ttl", "fifo", "sieve", "s3fifo")
_SHARES = ("group_lru", "proportional", "fixed")
_TYPES = {
    each.kind: each for each in StorageType if each is not StorageType.ST_UNSPECIFIED and not each.is_event_report
}
_PREFERENCES = {
    name.removeprefix("CPS_").lower().replace("_", "-"): name
    for name, number in pb.CachePreferStrategy.items()
    if number
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Options of `kvcm group create` and `update`; fields of options that are None stay as they are."""

    storages: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            metavar="NAME",
            help="A storage that it may use; repeatable, the preferred one first. Replaces the list.",
            autocompletion=storage_names,
        ),
    ] = None
    quota: Annotated[
        str | None, typer.Option("--quota", metavar="SIZE", help="What it may use in all, as in 10GiB.")
    ] = None
    quota_types: Annotated[
        list[str] | None,
        typer.Option(
            "--quota-type",
            metavar="TYPE=SIZE",
            help="What it may use on one type (file, hf3fs, vcns_hf3fs, mooncake, pace, dummy), TYPE=none for no limit "
            "of its own; repeatable.",
        ),
    ] = None
    global_quota: Annotated[
        str | None,
        typer.Option(
            "--global-quota",
            metavar="NAME",
            help="Its global_quota_group_name, for `kvcm quota set`.",
            autocompletion=quota_names,
        ),
    ] = None
    guarantees: Annotated[
        list[str] | None,
        typer.Option(
            "--guarantee",
            metavar="STORAGE=SIZE",
            help="Bytes on a storage that no other group may use, STORAGE=none for nothing; repeatable.",
        ),
    ] = None
    pin_budget: Annotated[
        str | None, typer.Option("--pin-budget", metavar="SIZE", help="What its pins may hold; 0 is nothing.")
    ] = None
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help=f"What leaves first: {', '.join(_POLICIES)}.")
    ] = None
    ttl: Annotated[
        str | None,
        typer.Option(
            "--ttl", metavar="TIME", help="Age at which blocks leave although there is space, as in 12h; 0 is never."
        ),
    ] = None
    high: Annotated[
        float | None,
        typer.Option("--high", metavar="RATIO", help="Evict above this share of a limit; above 1 is never."),
    ] = None
    low: Annotated[
        float | None, typer.Option("--low", metavar="RATIO", help="Evict down to this share; below --high.")
    ] = None
    share: Annotated[
        str | None,
        typer.Option("--share", metavar="NAME", help=f"Which instance gives up blocks: {', '.join(_SHARES)}."),
    ] = None
    delete_delay_ms: Annotated[
        int | None,
        typer.Option("--delete-delay-ms", metavar="MS", min=0, help="How long an evicted location stays readable."),
    ] = None
    max_instances: Annotated[
        int | None, typer.Option("--max-instances", metavar="N", min=0, help="Most instances; 0 is no limit.")
    ] = None
    max_keys: Annotated[
        int | None, typer.Option("--max-keys", metavar="N", min=0, help="Most blocks of an instance; 0 is the default.")
    ] = None
    prefer: Annotated[
        str | None,
        typer.Option("--prefer", metavar="NAME", help=f"Which type gets new blocks: {', '.join(_PREFERENCES)}."),
    ] = None
    user_data: Annotated[str | None, typer.Option("--user-data", metavar="TEXT", help="Free text.")] = None
    reports: Annotated[
        list[str] | None,
        typer.Option(
            "--event-report-storage",
            metavar="NAME",
            help="An event report storage whose reporters its instances have; repeatable. Replaces the list.",
            autocompletion=storage_names,
        ),
    ] = None
    extra_info: Annotated[
        str | None, typer.Option("--extra-info", metavar="TEXT", help="Text for clients, which registrations answer.")
    ] = None

    def write(self, group: pb.InstanceGroup) -> None:
        """Write the given options into a group.

        Raises:
            InvalidArgumentError: a value is malformed; the message names the option.
        """
        self._write_limits(group)
        self._write_eviction(group.cache_config.reclaim_strategy)
        if self.storages:
            group.storage_candidates[:] = self.storages
        if self.global_quota is not None:
            group.global_quota_group_name = self.global_quota
        if self.prefer is not None:
            name = one_of("--prefer", self.prefer, _PREFERENCES)
            group.cache_config.MergeFrom(pb.CacheConfig(data_storage_strategy=_PREFERENCES[name]))
        if self.user_data is not None:
            group.user_data = self.user_data
        if self.reports:
            group.event_report_storage_candidates[:] = self.reports
        if self.extra_info is not None:
            group.extra_info = self.extra_info

    def _write_limits(self, group: pb.InstanceGroup) -> None:
        if self.quota is not None:
            group.quota.capacity = parse_size(self.quota)
        for text in self.quota_types or ():
            _write_type(group.quota, text)
        for text in self.guarantees or ():
            _write_guarantee(group, text)
        if self.pin_budget is not None:
            group.pin_budget_bytes = parse_size(self.pin_budget)
        if self.max_instances is not None:
            group.max_instance_count = self.max_instances
        if self.max_keys is not None:
            group.cache_config.meta_indexer_config.max_key_count = self.max_keys

    def _write_eviction(self, strategy: pb.CacheReclaimStrategy) -> None:
        if self.policy is not None:
            strategy.policy.name = one_of("--policy", self.policy, _POLICIES)
        if self.ttl is not None:
            strategy.policy.ttl_seconds = parse_duration(self.ttl)
        if self.share is not None:
            strategy.share = one_of("--share", self.share, _SHARES)
        if self.delete_delay_ms is not None:
            strategy.delay_before_delete_ms = self.delete_delay_ms
        if self.high is not None or self.low is not None:
            _write_watermarks(strategy.trigger_strategy, self.high, self.low)


def _new_group(name: str) -> pb.InstanceGroup:
    """Return a group with its required fields, but without storages and quota."""
    group = pb.InstanceGroup(name=name, global_quota_group_name=name, version=1)
    config = group.cache_config
    config.data_storage_strategy = pb.CPS_PREFER_3FS
    config.reclaim_strategy.storage_unique_name = "unused"  # required by the contract, without effect
    config.reclaim_strategy.trigger_strategy.used_percentage = _DEFAULT_HIGH
    config.reclaim_strategy.delay_before_delete_ms = _DEFAULT_DELAY_MS
    config.meta_indexer_config.meta_storage_backend_config.storage_type = "local"
    config.meta_indexer_config.meta_cache_policy_config.type = "lru"
    return group


def _write_watermarks(strategy: pb.TriggerStrategy, high: float | None, low: float | None) -> None:
    old_high = strategy.used_percentage
    hysteresis = strategy.hysteresis if strategy.HasField("hysteresis") else DEFAULT_HYSTERESIS
    new_high = old_high if high is None else high
    new_low = max(0.0, old_high - hysteresis) if low is None else low
    if not new_high > 0:
        raise InvalidArgumentError(f"--high is {new_high:g}, must be above 0; above 1 is never")
    if low is not None and not 0 <= new_low < new_high:
        raise InvalidArgumentError(f"--low is {new_low:g}, must be from 0 to below --high, which is {new_high:g}")
    strategy.used_percentage = new_high
    if low is not None:
        strategy.hysteresis = round(new_high - new_low, 9)


def _write_type(quota: pb.InstanceGroupQuota, text: str) -> None:
    kind, size = _named_size("--quota-type", text)
    if kind not in _TYPES:
        raise InvalidArgumentError(f"--quota-type names {kind!r}, must be one of {', '.join(_TYPES)}")
    number = _TYPES[kind].value
    kept = [each for each in quota.quota_config if each.storage_type != number]
    added = [] if size is None else [pb.QuotaConfig(storage_type=_TYPES[kind].name, capacity=size)]
    quota.ClearField("quota_config")
    quota.quota_config.extend([*kept, *added])


def _write_guarantee(group: pb.InstanceGroup, text: str) -> None:
    name, size = _named_size("--guarantee", text)
    kept = [each for each in group.storage_guarantees if each.storage_unique_name != name]
    added = [] if size is None else [pb.StorageGuarantee(storage_unique_name=name, guaranteed_bytes=size)]
    group.ClearField("storage_guarantees")
    group.storage_guarantees.extend([*kept, *added])


def _named_size(option: str, text: str) -> tuple[str, int | None]:
    name, separator, size = text.partition("=")
    if not (name and separator):
        raise InvalidArgumentError(f"{option} {text!r} must be a name and a size: NAME=10GiB")
    return name, None if size == "none" else parse_size(size)


group_app = noun("group", "Instance groups of a running manager: their storages, quotas and eviction.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The group.", autocompletion=group_names)]
_STORE = "Metadata store for its blocks: a name of kvcm.store.block_stores, or registry."
_POLL_SECONDS = 0.5


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
    with exit_on_call_errors():
        answer = connection.admin().call("GetUsage", request, capacity_pb.GetUsageResponse)
        report = read(UsageReport, answer)
    if as_json:
        print_json(asdict(report, dict_factory=enum_names))
    else:
        print_usage(report, console())


@group_app.command("list")
@with_options
def list_groups(connection: Connection, as_json: AsJson = False) -> None:
    """List the groups and what they may use; `kvcm group usage` shows what they use."""
    with exit_on_call_errors():
        messages = connection.admin().groups()
        groups = [read(InstanceGroup, each) for each in messages]
    if as_json:
        print_json({"groups": [plain(each) for each in messages]})
        return
    columns = ("group", "storages", "quota", "evict above", "policy", "global quota", "pin budget", "version")
    rows = (
        (
            each.name,
            ", ".join(each.storage_candidates),
            format_size(each.quota.capacity),
            _watermarks(each)[0],
            each.policy_of("").name,
            each.global_quota_group_name,
            format_size(each.pin_budget_bytes),
            str(each.version),
        )
        for each in groups
    )
    print_table(columns, rows, words=("storages", "policy", "global quota"))


@group_app.command("show")
@with_options
def show_group(connection: Connection, name: Name, as_json: AsJson = False) -> None:
    """Show how a group is configured."""
    with exit_on_call_errors():
        message = _found(client := connection.admin(), name)
        group, store = read(InstanceGroup, message), _find_store_of(client, name)
    if as_json:
        print_json({**plain(message), **({"block_store": store} if store else {})})
    else:
        print_fields(_fields(group, store))


def _find_store_of(client: AdminClient, name: str) -> str:
    """Return the store of a group's blocks; "" where it is not known: a manager of the release before has one store."""
    try:
        return _stores_of(client, name).store
    except KvcmError:
        return ""


def _fields(group: InstanceGroup, store: str = "") -> list[tuple[str, str]]:
    strategy = group.cache_config.reclaim_strategy
    policy = group.policy_of("")
    high, low = _watermarks(group)
    delay = f"{strategy.delay_before_delete_ms} ms after eviction"
    return [
        ("name", group.name),
        ("storages", ", ".join(group.storage_candidates)),
        ("prefers", group.cache_config.data_storage_strategy.name),
        ("quota", format_size(group.quota.capacity)),
        *((f"quota on {each.storage_type.kind}", format_size(each.capacity)) for each in group.quota.quota_config),
        *(
            (f"guaranteed on {each.storage_unique_name}", format_size(each.guaranteed_bytes))
            for each in group.storage_guarantees
        ),
        ("global quota", group.global_quota_group_name),
        ("pin budget", format_size(group.pin_budget_bytes)),
        *([("blocks are kept in", f"store {store}")] if store else []),
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
        *([("reports on", ", ".join(reports))] if (reports := group.event_report_storage_candidates) else []),
        ("user data", group.user_data),
        *([("extra info", group.extra_info)] if group.extra_info else []),
        ("version", str(group.version)),
    ]


def _watermarks(group: InstanceGroup) -> tuple[str, str]:
    trigger = group.cache_config.reclaim_strategy.trigger_strategy
    if not 0 < trigger.used_percentage <= 1:
        size = trigger.used_size
        return (format_size(size), "") if size else ("never", "never")
    hysteresis = DEFAULT_HYSTERESIS if trigger.hysteresis is None else trigger.hysteresis
    low = max(0.0, trigger.used_percentage - hysteresis)
    return f"{100 * trigger.used_percentage:g} %", f"{100 * low:g} %"


@group_app.command("create")
@with_options
def create_group(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group, not taken yet.")],
    options: GroupOptions,
    *,
    store: Annotated[str, typer.Option("--store", metavar="STORE", help=_STORE, autocompletion=block_store_names)] = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create a group; --storage and --quota have to be given, everything else has a default.

    Without more it evicts above 80 % (leaf_lru), and its global quota has its own name.
    """
    with exit_on_call_errors():
        if not options.storages or options.quota is None:
            raise InvalidArgumentError(
                "a group needs --storage, once at least, and --quota: --storage nfs_01 --quota 10GiB"
            )
        group = _new_group(name)
        options.write(group)
        if not dry_run:
            request = pb.CreateInstanceGroupRequest(instance_group=group)
            client = connection.admin()
            print_remark(client.call("CreateInstanceGroup", request, pb.CommonResponse))
            if store:
                _move_new(client, name, store)
    if as_json:
        print_json(plain(group))
    elif dry_run:
        print_fields(_fields(read(InstanceGroup, group), store))
        print_below("nothing was created: leave --dry-run out for that")


@group_app.command("update")
@with_options
def update_group(
    connection: Connection, name: Name, options: GroupOptions, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Change the given fields of a group, and no others; in force at once.

    Refused when the group was changed meanwhile: run it again.
    """
    with exit_on_call_errors():
        client = connection.admin()
        old = _found(client, name)
        new = pb.InstanceGroup()
        new.CopyFrom(old)
        options.write(new)
        found = changes(old, new)
        if found and not dry_run:
            new.version = old.version + 1
            request = pb.UpdateInstanceGroupRequest(instance_group=new, current_version=old.version)
            print_remark(client.call("UpdateInstanceGroup", request, pb.CommonResponse))
    print_changes(found, dry_run=dry_run, as_json=as_json)


@group_app.command("delete")
@with_options
def delete_group(connection: Connection, name: Name, yes: Yes = False) -> None:
    """Forget a group: its instances can still be read, and take no writes any more."""
    confirm(f"Forget group {name}?", yes=yes)
    with exit_on_call_errors():
        request = pb.RemoveInstanceGroupRequest(name=name)
        connection.admin().call("RemoveInstanceGroup", request, pb.CommonResponse)


def _move_new(client: AdminClient, name: str, store: str) -> None:
    try:
        _move(client, name, store)
    except KvcmError:
        typer.echo(f"kvcm: group {name!r} was created, and its blocks will be kept in the registry's store:", err=True)
        raise


@group_app.command("move")
@with_options
def move_group(
    connection: Connection,
    name: Name,
    store: Annotated[str, typer.Option("--to", metavar="STORE", help=_STORE, autocompletion=block_store_names)],
    wait: Annotated[
        bool, typer.Option("--wait", help="Show how far it is until it is done; Ctrl-C ends the show, not the move.")
    ] = False,
) -> None:
    """Keep the blocks of a group in a metadata store: those that lie in another one move there in the background, while
    engines read and write them."""
    with exit_on_call_errors():
        client = connection.admin()
        _move(client, name, store)
        if wait:
            _watch_move(client, name)


def _move(client: AdminClient, name: str, store: str) -> None:
    request = group_pb.MoveInstanceGroupRequest(name=name, store=store)
    client.call("MoveInstanceGroup", request, pb.CommonResponse)


def _watch_move(client: AdminClient, name: str) -> None:
    usage = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
    counts = {each.instance_id: each.key_count for group in usage.groups for each in group.instances}
    left, said = _stores_of(client, name), set[str]()
    counts = {each.instance_id: counts.get(each.instance_id, 0) for each in left.moves}
    with progress(f"moving {name}", max(sum(counts.values()), 1)) as show:
        while left.moves:
            show(_copied_blocks(left, counts))
            for each in left.moves:
                reason = each.reason.partition("; tried again")[0]
                if reason and reason not in said:
                    said.add(reason)
                    typer.echo(f"kvcm: {reason}", err=True)
            time.sleep(_POLL_SECONDS)
            left = _stores_of(client, name)


def _copied_blocks(left: GroupStoreStatus, counts: dict[str, int]) -> int:
    """Return how many blocks of a group were copied: all of instances that were moved, and what is known of others."""
    copied = dict(counts)
    for each in left.moves:
        if each.state is not BlockMoveState.BLOCK_MOVE_CLEARING and each.instance_id in copied:
            copied[each.instance_id] = min(copied[each.instance_id], max(0, each.copied_blocks))
    return sum(copied.values())


def _stores_of(client: AdminClient, name: str) -> GroupStoreStatus:
    answer = client.call("ListGroupStore", group_pb.ListGroupStoreRequest(), group_pb.ListGroupStoreResponse)
    for each in answer.groups:
        if each.name == name:
            return read(GroupStoreStatus, each)
    raise InvalidArgumentError(f"instance group {name!r} does not exist any more")


@group_app.command("stores")
@with_options
def list_group_stores(connection: Connection, as_json: AsJson = False) -> None:
    """List the metadata stores, which one the blocks of each group are kept in, and how far moves are."""
    with exit_on_call_errors():
        request = group_pb.ListGroupStoreRequest()
        answer = connection.admin().call("ListGroupStore", request, group_pb.ListGroupStoreResponse)
        stores = [read(BlockStoreStatus, each) for each in answer.stores]
        groups = [read(GroupStoreStatus, each) for each in answer.groups]
    if as_json:
        print_json(plain(answer))
    else:
        print_group_stores(stores, groups, console())


def _found(client: AdminClient, name: str) -> pb.InstanceGroup:
    request = pb.GetInstanceGroupRequest(name=name)
    return client.call("GetInstanceGroup", request, pb.GetInstanceGroupResponse).instance_group


# `kvcm quota`.

quota_app = noun("quota", "Limits over several instance groups, by their global_quota_group_name.")


@quota_app.command("set")
@with_options
def set_quota(
    connection: Connection,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The global_quota_group_name of the groups.", autocompletion=quota_names),
    ],
    capacity: Annotated[str, typer.Option("--capacity", metavar="SIZE", help="As in 10GiB, 500MB or plain bytes.")],
    mark: Annotated[
        float, typer.Option("--mark", metavar="RATIO", help="Evict above this share; above 1 is never, 0 is 0.9.")
    ] = 0.0,
) -> None:
    """Limit what all groups of one name use together; in force at once."""
    with exit_on_call_errors():
        quota = capacity_pb.GlobalQuota(name=name, capacity_bytes=parse_size(capacity), used_percentage=mark)
        request = capacity_pb.SetGlobalQuotaRequest(global_quota=quota)
        connection.admin().call("SetGlobalQuota", request, admin_pb.CommonResponse)


@quota_app.command("list")
@with_options
def list_quotas(connection: Connection, as_json: AsJson = False) -> None:
    """List the limits over groups."""
    with exit_on_call_errors():
        request = capacity_pb.ListGlobalQuotaRequest()
        answer = connection.admin().call("ListGlobalQuota", request, capacity_pb.ListGlobalQuotaResponse)
    quotas = [plain_fields(quota) for quota in answer.global_quotas]
    if as_json:
        print_json({"global_quotas": quotas})
        return
    rows = (
        (each["name"], format_size(each["capacity_bytes"]), _format_watermark(each["used_percentage"]))
        for each in quotas
    )
    print_table(("global quota", "capacity", "evict above"), rows)


@quota_app.command("remove")
@with_options
def remove_quota(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The limit.", autocompletion=quota_names)],
) -> None:
    """Forget a limit over groups; in force at once."""
    with exit_on_call_errors():
        request = capacity_pb.RemoveGlobalQuotaRequest(name=name)
        connection.admin().call("RemoveGlobalQuota", request, admin_pb.CommonResponse)


def _format_watermark(ratio: float) -> str:
    return "never" if ratio > 1 else f"{100 * (ratio or 0.9):g} %"
