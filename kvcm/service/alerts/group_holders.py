"""What keeps a full group full: pins, deletions that wait, writes, marks that are off, other groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcm.model.groups import InstanceGroup
from kvcm.service.alerts.group_limits import OWN_MARK, Limit, storage_trouble
from kvcm.service.alerts.values import Facts
from kvcm.service.alerts.wording import lasting, percent
from kvcm.service.usage_values import GroupUsage
from kvcm.sizes import shown_size

__all__ = ["Holder", "holders_of"]

_LEAST_PART = 0.05  # of a limit; what is less does not explain that it is full


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that keeps a group full.

    Attributes:
        bytes: that it holds; infinite where it holds all of them.
        text: a clause that says so.
        advice: what to do about it, as a clause.
    """

    bytes: float
    text: str
    advice: str


def holders_of(facts: Facts, group: GroupUsage, configured: InstanceGroup, limit: Limit) -> Sequence[Holder]:
    """Return what keeps a group at a limit, the most telling first; one at least."""
    found = [*_nobody_evicts(facts), *_eviction_is_off(configured, limit)]
    held = [*_pinned(group), *_waiting(facts, group, configured), *_writing(facts, group), *_others(limit)]
    least = _LEAST_PART * group.total.used_bytes
    found += sorted((each for each in held if each.bytes >= least), key=lambda holder: -holder.bytes)
    return found or [_too_slow(limit)]


def _nobody_evicts(facts: Facts) -> Iterator[Holder]:
    if not facts.leader:
        advice = "find out why no manager leads: kvcm doctor, and the logs of the managers"
        yield Holder(math.inf, "no manager leads, so nothing is evicted and nothing deleted", advice)


def _eviction_is_off(configured: InstanceGroup, limit: Limit) -> Iterator[Holder]:
    if limit.usage.high_mark_bytes >= 0 or not limit.mark:
        return
    text = f"nothing is evicted because of it: {limit.mark} is off"
    if limit.mark == OWN_MARK:
        mark = configured.cache_config.reclaim_strategy.trigger_strategy.used_percentage
        text = f"nothing is evicted for want of room: the mark is {f'{mark:g}, which is off' if mark else 'not set'}"
        if ttl := configured.policy_of("").ttl_seconds:
            text += f", and blocks leave by age alone, after {lasting(ttl)}"
    yield Holder(math.inf, text, f"set {limit.mark} to 0.8 or so")


def _pinned(group: GroupUsage) -> Iterator[Holder]:
    pinned = min(group.pinned_bytes, group.total.used_bytes)  # several pins may hold the same blocks
    if pinned:
        text = f"{shown_size(pinned)} ({percent(pinned, group.total.used_bytes)} of it) are pinned and not evicted"
        yield Holder(
            pinned, text, "end pins that are not needed (kvcm pin list), or lower the pin budget (pin_budget_bytes)"
        )


def _waiting(facts: Facts, group: GroupUsage, configured: InstanceGroup) -> Iterator[Holder]:
    delay_ms = configured.cache_config.reclaim_strategy.delay_before_delete_ms
    patient = 0
    for name, size in sorted(facts.deleting.get(group.name, {}).items()):
        trouble, backlog = storage_trouble(facts.storages.get(name)), facts.backlogs.get(name)
        if trouble.startswith(("is down", "is not")):
            text = f"{shown_size(size)} are evicted and wait for their deletion, since storage {name} {trouble}"
            yield Holder(size, text, f"bring storage {name} back; its deletions go on by themselves then")
        elif backlog is not None and backlog.failures and backlog.waiting:
            text = f"{shown_size(size)} are evicted, and storage {name} fails to delete them"
            yield Holder(size, text, f"look why storage {name} does not delete: kvcm storage list, and the log")
        else:
            patient += size
    if patient:
        text = f"{shown_size(patient)} are evicted and wait for their deletion"
        text += f", which comes {lasting(delay_ms / 1000)} later (delay_before_delete_ms)" if delay_ms else ""
        shorter = "shorten that time (delay_before_delete_ms), or lower the mark"
        advice = shorter if delay_ms else "wait, or let eviction begin earlier"
        yield Holder(patient, f"{text}, and readers with leases keep what they read", advice)


def _writing(facts: Facts, group: GroupUsage) -> Iterator[Holder]:
    size = facts.writing.get(group.name, 0)
    if size:
        text = f"{shown_size(size)} are reserved for writes that are not finished"
        yield Holder(size, text, "look at the open write sessions: engines that died leave theirs until the deadline")


def _others(limit: Limit) -> Iterator[Holder]:
    if limit.others:
        text = f"other groups use {shown_size(limit.others)} of it"
        yield Holder(limit.others, text, "guarantee the group its share (storage_guarantees), or make others smaller")


def _too_slow(limit: Limit) -> Holder:
    mark = limit.usage.high_mark_bytes
    if mark < 0:
        return Holder(0, "what lies beside the blocks takes the room", "make room on it")
    shown = f"{mark:,} blocks" if limit.counts_blocks else shown_size(mark)
    text = f"eviction begins at {shown} and does not make room as fast as blocks are written"
    return Holder(0, text, f"lower {limit.mark}, so that eviction begins earlier")
