"""How a group is configured from a command line: what is given is written into the message, everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcm.commands.completion import quota_names, storage_names
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import DEFAULT_HYSTERESIS
from kvcm.model.storages import StorageType
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.sizes import parse_size
from kvcm.spans import parse_span

__all__ = ["GroupOptions", "new_group"]

_DEFAULT_HIGH = 0.8
_DEFAULT_DELAY_MS = 1000
_POLICIES = ("leaf_lru", "lru", "lfu", "ttl", "fifo", "sieve", "s3fifo")
_SHARES = ("group_lru", "proportional", "fixed")
_TYPES = {each.kind: each for each in StorageType if each is not StorageType.ST_UNSPECIFIED}
_PREFERENCES = {
    name.removeprefix("CPS_").lower().replace("_", "-"): name
    for name, number in pb.CachePreferStrategy.items()
    if number
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Options of `kvcm group create` and `update`; what is None stays as it is."""

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
            help="What no other group may take on a storage, STORAGE=none for nothing; repeatable.",
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
            "--ttl", metavar="TIME", help="Age at which blocks leave although there is room, as in 12h; 0 is never."
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

    def write(self, group: pb.InstanceGroup) -> None:
        """Write what is given into a group.

        Raises:
            InvalidArgumentError: a value is none; the message names the option.
        """
        self._write_limits(group)
        self._write_eviction(group.cache_config.reclaim_strategy)
        if self.storages:
            group.storage_candidates[:] = self.storages
        if self.global_quota is not None:
            group.global_quota_group_name = self.global_quota
        if self.prefer is not None:
            name = _one_of("--prefer", self.prefer, _PREFERENCES)
            group.cache_config.MergeFrom(pb.CacheConfig(data_storage_strategy=_PREFERENCES[name]))
        if self.user_data is not None:
            group.user_data = self.user_data

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
            strategy.policy.name = _one_of("--policy", self.policy, _POLICIES)
        if self.ttl is not None:
            strategy.policy.ttl_seconds = parse_span(self.ttl)
        if self.share is not None:
            strategy.share = _one_of("--share", self.share, _SHARES)
        if self.delete_delay_ms is not None:
            strategy.delay_before_delete_ms = self.delete_delay_ms
        if self.high is not None or self.low is not None:
            _write_marks(strategy.trigger_strategy, self.high, self.low)


def new_group(name: str) -> pb.InstanceGroup:
    """Return a group with everything that has to be said of one, but its storages and its quota."""
    group = pb.InstanceGroup(name=name, global_quota_group_name=name, version=1)
    config = group.cache_config
    config.data_storage_strategy = pb.CPS_PREFER_3FS
    config.reclaim_strategy.storage_unique_name = "unused"  # required by the contract, without effect
    config.reclaim_strategy.trigger_strategy.used_percentage = _DEFAULT_HIGH
    config.reclaim_strategy.delay_before_delete_ms = _DEFAULT_DELAY_MS
    config.meta_indexer_config.meta_storage_backend_config.storage_type = "local"
    config.meta_indexer_config.meta_cache_policy_config.type = "lru"
    return group


def _one_of(option: str, value: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise InvalidArgumentError(f"{option} is {value!r}, must be one of {', '.join(allowed)}")
    return value


def _write_marks(strategy: pb.TriggerStrategy, high: float | None, low: float | None) -> None:
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
    _replace(quota.ClearField, "quota_config", lambda: quota.quota_config.extend([*kept, *added]))


def _write_guarantee(group: pb.InstanceGroup, text: str) -> None:
    name, size = _named_size("--guarantee", text)
    kept = [each for each in group.storage_guarantees if each.storage_unique_name != name]
    added = [] if size is None else [pb.StorageGuarantee(storage_unique_name=name, guaranteed_bytes=size)]
    _replace(group.ClearField, "storage_guarantees", lambda: group.storage_guarantees.extend([*kept, *added]))


def _replace(clear: Callable[..., None], field: str, extend: Callable[[], None]) -> None:
    clear(field)
    extend()


def _named_size(option: str, text: str) -> tuple[str, int | None]:
    name, separator, size = text.partition("=")
    if not (name and separator):
        raise InvalidArgumentError(f"{option} {text!r} must be a name and a size: NAME=10GiB")
    return name, None if size == "none" else parse_size(size)
