"""What a running manager tells of itself, as far as proposals go by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceOverride
from kvcm.optimizer.live.recording import Lookup, Recording

__all__ = ["GroupState", "Situation", "measured_hit_rate", "unrehearsed", "with_policy", "with_quota"]


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group as it is.

    Attributes:
        group: its settings, with their version.
        block_bytes: of each of its instances, by id.
        used_bytes: what it uses.
        global_quota: name of the quota that it shares with others, "" where none limits it.
    """

    group: InstanceGroup
    block_bytes: Mapping[str, int]
    used_bytes: int
    global_quota: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """A manager as it is: its groups, and what engines did of late."""

    groups: Sequence[GroupState]
    recording: Recording


def with_quota(group: InstanceGroup, quota_bytes: int) -> InstanceGroup:
    """Return the group with another quota in total."""
    return replace(group, quota=replace(group.quota, capacity=quota_bytes))


def with_policy(group: InstanceGroup, policy: EvictionPolicy, instance_id: str = "") -> InstanceGroup:
    """Return the group with another policy, or with one of an instance's own."""
    strategy = group.cache_config.reclaim_strategy
    if instance_id:
        others = tuple(each for each in strategy.instance_overrides if each.instance_id != instance_id)
        own = InstanceOverride(instance_id, policy, group.override_of(instance_id).weight)
        strategy = replace(strategy, instance_overrides=(*others, own))
    else:
        strategy = replace(strategy, policy=policy)
    return replace(group, cache_config=replace(group.cache_config, reclaim_strategy=strategy))


def measured_hit_rate(recording: Recording, instance_ids: Iterable[str]) -> float | None:
    """Return which part of the blocks asked for was found; None where nothing was asked for."""
    names = frozenset(instance_ids)
    numbers = {number for number, name in enumerate(recording.instance_names) if name in names}
    asked = found = 0
    for access in recording.accesses:
        if isinstance(access, Lookup) and access.instance in numbers:
            asked += len(access.blocks)
            found += access.found
    return found / asked if asked else None


def unrehearsed(state: GroupState) -> list[str]:
    """Return a sentence for each setting that a rehearsal passes over."""
    group, strategy = state.group, state.group.cache_config.reclaim_strategy
    told = {
        "quotas of storage types limit it, too; they are not rehearsed": bool(group.quota.quota_config),
        f"it shares the global quota {state.global_quota!r} with other groups; it is rehearsed alone": bool(
            state.global_quota
        ),
        "its prefix classes are not rehearsed": bool(strategy.prefix_classes),
        "its step limits are not rehearsed": bool(strategy.reclaim_step_size or strategy.reclaim_step_percentage),
        "its limit of blocks per instance is not rehearsed": bool(group.cache_config.meta_indexer_config.max_key_count),
        "its pins are not rehearsed": bool(group.pin_budget_bytes),
    }
    return [sentence for sentence, is_so in told.items() if is_so]
