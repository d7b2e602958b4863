"""The rules of alerts: the trouble, the reason and the remedy, as pure functions of the state of a manager."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageType
from kvcm.model.units import format_size
from kvcm.reclaim.deletion_executor import Backlog
from kvcm.service.usage_values import (
    NOT_LIMITED,
    BlockMove,
    DrainState,
    DrainStatus,
    GroupUsage,
    StorageStatus,
    StorageUsage,
    Usage,
    UsageReport,
)
from kvcm.storage.health import HealthState
from kvcm.store.store import StoreHealth

__all__ = [
    "FULL",
    "RECENT_SECONDS",
    "Alert",
    "AlertInputs",
    "Limit",
    "QuotaHolder",
    "Severity",
    "SubjectKind",
    "cluster_alerts",
    "count_text",
    "duration_text",
    "group_alerts",
    "join_clauses",
    "limits_of",
    "percent",
    "sentence",
    "storage_alerts",
    "storage_trouble",
]

# What alerts are, and what they are made from.

RECENT_SECONDS = 300.0
"""How long something that happened counts as a present trouble."""


class Severity(IntEnum):
    """How urgent an alert is; numbers are those of the wire."""

    ALERT_PAGE = 1
    ALERT_TICKET = 2
    ALERT_INFO = 3


class SubjectKind:
    """What an alert is about."""

    GROUP = "group"
    STORAGE = "storage"
    MANAGER = "manager"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is wrong; field names are those of the wire.

    Attributes:
        name: that of the rule for Prometheus, where there is one of the same meaning.
        severity: how urgent it is.
        subject_kind: one of `SubjectKind`.
        subject_name: "" for the cluster.
        summary: one sentence.
        reason: of it.
        advice: the remedy.
        since_ms: when it was first seen, unix time in ms.
    """

    name: str
    severity: Severity
    subject_kind: str
    subject_name: str
    summary: str
    reason: str
    advice: str
    since_ms: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of a firing alert."""
        return self.name, self.subject_kind, self.subject_name


@dataclass(frozen=True, slots=True)
class AlertInputs:
    """The state of a manager at one moment.

    Attributes:
        now: unix seconds.
        usage: of everything that the principal may see.
        groups: as configured.
        types: of the configured storages, by name.
        storages: how each is for this manager.
        backlogs: of pending deletions, by storage.
        deleting: bytes that wait for deletion, by group and storage.
        writing: bytes of open write sessions, by group.
        refused: writes rejected lately for lack of space, by group.
        mismatches: wrong checksums reported lately, by group and storage.
        drains: and removals.
        unverified: storages whose blocks no lookup answers until they are verified.
        node_id: of this manager.
        leader: node id of the leader, "" for none.
        leaders: managers that say that they lead.
        overdue_sessions: write sessions that did not expire in time.
        certificates: their expiry, unix seconds, by purpose.
        lag_seconds: by which the event loop is late all the time.
        store_trouble: why the metadata store does not answer, "" while it does.
        store_health: what else is wrong with it.
        block_stores: why further metadata stores are not as they should be, by name.
        failing_moves: of instances to another metadata store.
        dropped_accesses: reads that lately could not be written down.
        quiet_engines: addresses of engines that report their memory no more, by instance.
    """

    now: float
    usage: UsageReport
    groups: Mapping[str, InstanceGroup]
    types: Mapping[str, StorageType]
    storages: Mapping[str, StorageStatus]
    backlogs: Mapping[str, Backlog] = field(default_factory=dict)
    deleting: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    mismatches: Mapping[tuple[str, str], int] = field(default_factory=dict)
    drains: Sequence[DrainStatus] = ()
    unverified: Collection[str] = ()
    node_id: str = ""
    leader: str = ""
    leaders: Sequence[str] = ()
    overdue_sessions: int = 0
    certificates: Mapping[str, float] = field(default_factory=dict)
    lag_seconds: float = 0.0
    store_trouble: str = ""
    store_health: StoreHealth = field(default_factory=StoreHealth)
    block_stores: Mapping[str, str] = field(default_factory=dict)
    failing_moves: Sequence[BlockMove] = ()
    dropped_accesses: int = 0
    quiet_engines: Mapping[str, Sequence[str]] = field(default_factory=dict)


# Numbers as people read them, in sentences.

_LOSS_SECONDS = 86_400.0  # for which a loss of the store is shown
_MINUTE = 60
_HOUR = 3600
_DAY = 86_400


def percent(part: int, whole: int) -> str:
    """Return a part as per cent of the whole, never 100 where something is left."""
    if part < whole:
        return f"{min(99.9, 100 * part / whole):.3g} %"
    return f"{100 * part / whole:.0f} %" if whole > 0 else "100 %"


def count_text(number: int, noun: str) -> str:
    """Return a number and its noun, which takes an s for more than one."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration_text(seconds: float) -> str:
    """Return a time in its largest unit."""
    for length, name in ((_DAY, "day"), (_HOUR, "hour"), (_MINUTE, "minute")):
        if seconds >= 2 * length:
            return count_text(int(seconds // length), name)
    return f"{seconds:.0f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def join_clauses(parts: Sequence[str]) -> str:
    """Return clauses as one."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(clause: str) -> str:
    """Return a clause as a sentence."""
    return f"{clause[:1].upper()}{clause[1:]}."


# The limits that a group stands at, and which of its storages take its blocks.

_OWN_MARK = "trigger_strategy.used_percentage of the group"
"""The setting of a group from which on its blocks leave."""
FULL = 0.98
"""Ratio of a limit from which on it counts as reached: the rest may be less than one write needs."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that a group stands at.

    Attributes:
        what: names it.
        usage: how far it is used; in blocks for key limits.
        raised_by: what to change to raise it.
        counts_blocks: whether it is one of blocks.
        others: bytes of it that other groups use.
        mark: the setting from which on blocks leave because of it; "" for none.
    """

    what: str
    usage: Usage
    raised_by: str
    counts_blocks: bool = False
    others: int = 0
    mark: str = _OWN_MARK

    @property
    def ratio(self) -> float:
        """How far it is used."""
        return self.usage.used_bytes / self.usage.capacity_bytes if self.usage.capacity_bytes > 0 else 1.0

    @property
    def is_full(self) -> bool:
        """Whether it is reached."""
        return self.ratio >= FULL

    @property
    def text(self) -> str:
        """The limit with its numbers, as a clause."""
        used, capacity = self.usage.used_bytes, self.usage.capacity_bytes
        numbers = f"{format_size(used)} of {format_size(capacity)}"
        if self.counts_blocks:
            numbers = f"{used:,} of {count_text(capacity, 'block')}"
        return f"{self.what} is {percent(used, capacity)} used ({numbers})"


def limits_of(facts: AlertInputs, group: GroupUsage, configured: InstanceGroup) -> Sequence[Limit]:
    """Return the limits of a group, the one that it comes closest to first."""
    found = [Limit("its quota", group.total, "the group's quota (quota.capacity)")]
    found += _of_keys(group, configured)
    found += _of_global_quotas(facts, group)
    found += _of_storages(facts, group, configured)
    return sorted(found, key=lambda limit: -limit.ratio)


def _of_keys(group: GroupUsage, configured: InstanceGroup) -> Iterator[Limit]:
    trigger = configured.cache_config.reclaim_strategy.trigger_strategy.used_percentage
    for index in group.instances:
        if index.max_key_count > 0:
            mark = int(index.max_key_count * trigger) if 0 < trigger <= 1 else NOT_LIMITED
            usage = Usage(
                used_bytes=index.key_count,
                deleting_bytes=0,
                capacity_bytes=index.max_key_count,
                high_mark_bytes=mark,
                low_mark_bytes=mark,
            )
            what = f"the key limit of instance {index.instance_id}"
            raised_by = "meta_indexer_config.max_key_count of the group"
            yield Limit(what, usage, raised_by, counts_blocks=True)


def _of_global_quotas(facts: AlertInputs, group: GroupUsage) -> Iterator[Limit]:
    for quota in facts.usage.global_quotas:
        if group.name in quota.groups and quota.usage.capacity_bytes >= 0:
            others = max(0, quota.usage.used_bytes - group.total.used_bytes)
            what = f"the global quota {quota.name}"
            raised_by, mark = f"kvcm quota set {quota.name}", f"the mark of the global quota {quota.name}"
            yield Limit(what, quota.usage, raised_by, others=others, mark=mark)


def _of_storages(facts: AlertInputs, group: GroupUsage, configured: InstanceGroup) -> Iterator[Limit]:
    """Yield the limits of the group on its emptiest storage: while one has space, no other limits it."""
    usable = [name for name in configured.storage_candidates if not storage_trouble(facts.storages.get(name))]
    tightest = [max(_on_storage(facts, group, name), key=lambda limit: limit.ratio, default=None) for name in usable]
    limits = [limit for limit in tightest if limit is not None]
    if limits and len(limits) == len(tightest):
        yield min(limits, key=lambda limit: limit.ratio)


def _on_storage(facts: AlertInputs, group: GroupUsage, name: str) -> Iterator[Limit]:
    for storage in facts.usage.storages:
        if storage.storage_unique_name == name and storage.usage.capacity_bytes >= 0:
            own = next((each.used_bytes for each in group.storages if each.storage_unique_name == name), 0)
            others = max(0, storage.usage.used_bytes - own)
            raised_by, mark = f"capacity_bytes of storage {name}", f"used_percentage of storage {name}"
            yield Limit(f"storage {name}", storage.usage, raised_by, others=others, mark=mark)
    for each in group.types:
        if each.storage_type is facts.types.get(name) and each.usage.capacity_bytes >= 0:
            what = f"its quota for storages of type {each.storage_type.kind}"
            yield Limit(what, each.usage, "quota.quota_config of the group")
    what = f"the medium of storage {name}"
    medium = Limit(what, _medium(facts.storages.get(name)), what, mark="")
    if medium.usage.capacity_bytes > 0 and medium.is_full:  # others may have filled it
        yield medium


def _medium(status: StorageStatus | None) -> Usage:
    if status is None or status.medium_free_bytes < 0:
        return Usage(0, 0)
    return Usage(status.medium_bytes - status.medium_free_bytes, 0, status.medium_bytes)


def storage_trouble(status: StorageStatus | None) -> str:
    """Return why a storage takes no blocks, as the end of a clause that begins with its name; "" where it does."""
    if status is None:
        return "is not configured"
    if not status.is_enabled:
        return "is disabled"
    if status.health is HealthState.SH_DOWN:
        return f"is down ({status.reason})" if status.reason else "is down"
    return "is being drained" if status.is_draining else ""


# What keeps a full group full: pins, deletions that wait, writes, marks that are off, other groups.

_MIN_SHARE = 0.05  # of a limit; less does not explain that it is full


@dataclass(frozen=True, slots=True)
class QuotaHolder:
    """Something that keeps a group full.

    Attributes:
        bytes: that it holds; infinite where it holds all of them.
        text: a clause that says so.
        advice: what to do about it, as a clause.
    """

    bytes: float
    text: str
    advice: str


def _holders_of(
    facts: AlertInputs, group: GroupUsage, configured: InstanceGroup, limit: Limit
) -> Sequence[QuotaHolder]:
    """Return the reasons why a group stays at a limit, the strongest first; one at least."""
    found = [*_no_evicting_manager(facts), *_eviction_is_off(configured, limit)]
    held = [
        *_pinned(group),
        *_pending_deletions(facts, group, configured),
        *_writing(facts, group),
        *_other_groups(limit),
    ]
    least = _MIN_SHARE * group.total.used_bytes
    found += sorted((each for each in held if each.bytes >= least), key=lambda holder: -holder.bytes)
    return found or [_eviction_too_slow(limit)]


def _no_evicting_manager(facts: AlertInputs) -> Iterator[QuotaHolder]:
    if not facts.leader:
        advice = "find out why no manager leads: kvcm doctor, and the logs of the managers"
        yield QuotaHolder(math.inf, "no manager leads, so nothing is evicted and nothing deleted", advice)


def _eviction_is_off(configured: InstanceGroup, limit: Limit) -> Iterator[QuotaHolder]:
    if limit.usage.high_mark_bytes >= 0 or not limit.mark:
        return
    text = f"nothing is evicted because of it: {limit.mark} is off"
    if limit.mark == _OWN_MARK:
        mark = configured.cache_config.reclaim_strategy.trigger_strategy.used_percentage
        text = f"nothing is evicted for lack of space: the mark is {f'{mark:g}, which is off' if mark else 'not set'}"
        if ttl := configured.policy_of("").ttl_seconds:
            text += f", and blocks leave by age alone, after {duration_text(ttl)}"
    yield QuotaHolder(math.inf, text, f"set {limit.mark} to 0.8 or so")


def _pinned(group: GroupUsage) -> Iterator[QuotaHolder]:
    pinned = min(group.pinned_bytes, group.total.used_bytes)  # several pins may hold the same blocks
    if pinned:
        text = f"{format_size(pinned)} ({percent(pinned, group.total.used_bytes)} of it) are pinned and not evicted"
        yield QuotaHolder(
            pinned, text, "end pins that are not needed (kvcm pin list), or lower the pin budget (pin_budget_bytes)"
        )


def _pending_deletions(facts: AlertInputs, group: GroupUsage, configured: InstanceGroup) -> Iterator[QuotaHolder]:
    delay_ms = configured.cache_config.reclaim_strategy.delay_before_delete_ms
    patient = 0
    for name, size in sorted(facts.deleting.get(group.name, {}).items()):
        trouble, backlog = storage_trouble(facts.storages.get(name)), facts.backlogs.get(name)
        if trouble.startswith(("is down", "is not")):
            text = f"{format_size(size)} are evicted and wait for their deletion, since storage {name} {trouble}"
            yield QuotaHolder(size, text, f"bring storage {name} back; its deletions go on by themselves then")
        elif backlog is not None and backlog.failures and backlog.waiting:
            text = f"{format_size(size)} are evicted, and storage {name} fails to delete them"
            yield QuotaHolder(size, text, f"look why storage {name} does not delete: kvcm storage list, and the log")
        else:
            patient += size
    if patient:
        text = f"{format_size(patient)} are evicted and wait for their deletion"
        text += f", which comes {duration_text(delay_ms / 1000)} later (delay_before_delete_ms)" if delay_ms else ""
        shorter = "shorten that time (delay_before_delete_ms), or lower the mark"
        advice = shorter if delay_ms else "wait, or let eviction begin earlier"
        yield QuotaHolder(patient, f"{text}, and readers with leases keep what they read", advice)


def _writing(facts: AlertInputs, group: GroupUsage) -> Iterator[QuotaHolder]:
    size = facts.writing.get(group.name, 0)
    if size:
        text = f"{format_size(size)} are reserved for writes that are not finished"
        yield QuotaHolder(
            size, text, "look at the open write sessions: engines that died leave theirs until the deadline"
        )


def _other_groups(limit: Limit) -> Iterator[QuotaHolder]:
    if limit.others:
        text = f"other groups use {format_size(limit.others)} of it"
        yield QuotaHolder(
            limit.others, text, "guarantee the group its share (storage_guarantees), or make others smaller"
        )


def _eviction_too_slow(limit: Limit) -> QuotaHolder:
    mark = limit.usage.high_mark_bytes
    if mark < 0:
        return QuotaHolder(0, "other files take the space", "free space on it")
    shown = f"{mark:,} blocks" if limit.counts_blocks else format_size(mark)
    text = f"eviction begins at {shown} and does not free space as fast as blocks are written"
    return QuotaHolder(0, text, f"lower {limit.mark}, so that eviction begins earlier")


# Alerts of groups: full, nearly full, without a storage, above a mark that eviction does not reach.

_NEARLY = 0.9
_MAX_HOLDERS = 3


def group_alerts(facts: AlertInputs) -> Iterator[Alert]:
    """Yield the alerts of groups."""
    for group in facts.usage.groups:
        configured = facts.groups.get(group.name)
        if configured is None:
            continue
        without = _without_storage(facts, configured)
        if without is not None:
            yield without
        else:
            yield from _short_of_capacity(facts, group, configured)


def _without_storage(facts: AlertInputs, group: InstanceGroup) -> Alert | None:
    troubles = [(name, storage_trouble(facts.storages.get(name))) for name in group.storage_candidates]
    if any(not trouble for _, trouble in troubles):
        return None
    clauses = [f"storage {name} {trouble}" for name, trouble in troubles]
    return Alert(
        name="KvcmGroupWithoutStorage",
        severity=Severity.ALERT_PAGE,
        subject_kind=SubjectKind.GROUP,
        subject_name=group.name,
        summary=f"No storage takes blocks of group {group.name}.",
        reason=sentence(join_clauses(clauses)) if clauses else "The group names no storage.",
        advice=(
            f"Bring {'it' if len(troubles) == 1 else 'one of them'} back, or give the group another storage "
            "(storage_candidates)."
        ),
    )


def _short_of_capacity(facts: AlertInputs, group: GroupUsage, configured: InstanceGroup) -> Iterator[Alert]:
    limits, refused = limits_of(facts, group, configured), facts.refused.get(group.name, 0)
    worst = limits[0]
    if refused:
        severity = Severity.ALERT_PAGE if worst.is_full else Severity.ALERT_TICKET
        state = "is full" if worst.is_full else "is short of space"
        state += f" and refused {count_text(refused, 'write')} in the last 5 minutes"
        yield _group_alert(
            name="KvcmGroupFull",
            severity=severity,
            facts=facts,
            group=group,
            configured=configured,
            limits=limits,
            state=state,
        )
    elif worst.is_full:
        yield _group_alert(
            name="KvcmGroupFull",
            severity=Severity.ALERT_TICKET,
            facts=facts,
            group=group,
            configured=configured,
            limits=limits,
            state="is full",
        )
    elif worst.ratio > _NEARLY and (worst.usage.high_mark_bytes < 0 or worst.usage.is_above_mark):
        yield _group_alert(
            name="KvcmGroupNearlyFull",
            severity=Severity.ALERT_TICKET,
            facts=facts,
            group=group,
            configured=configured,
            limits=limits,
            state="is nearly full",
        )
    elif group.total.is_above_mark:
        yield _stuck(facts, group, configured)


def _group_alert(
    name: str,
    severity: Severity,
    facts: AlertInputs,
    group: GroupUsage,
    configured: InstanceGroup,
    limits: Sequence[Limit],
    state: str,
) -> Alert:
    worst = limits[0]
    holders = _holders_of(facts, group, configured, worst)[:_MAX_HOLDERS]
    reached = [limit.text for limit in limits if limit is worst or limit.is_full]
    return Alert(
        name=name,
        severity=severity,
        subject_kind=SubjectKind.GROUP,
        subject_name=group.name,
        summary=f"Group {group.name} {state}.",
        reason=f"{sentence(join_clauses(reached))} {_holders_text(holders)}",
        advice=f"{sentence(holders[0].advice)} Or raise the limit: {worst.raised_by}.",
    )


def _stuck(facts: AlertInputs, group: GroupUsage, configured: InstanceGroup) -> Alert:
    total = group.total
    left = format_size(total.used_bytes - total.deleting_bytes - total.high_mark_bytes)
    limit = limits_of(facts, group, configured)[0]
    holders = _holders_of(facts, group, configured, limit)
    return Alert(
        name="KvcmReclaimStuck",
        severity=Severity.ALERT_TICKET,
        subject_kind=SubjectKind.GROUP,
        subject_name=group.name,
        summary=f"Group {group.name} stays {left} above the mark at which eviction begins.",
        reason=(
            f"It uses {format_size(total.used_bytes)}, the mark is {format_size(total.high_mark_bytes)}. "
            f"{_holders_text(holders)}"
        ),
        advice=sentence(holders[0].advice),
    )


def _holders_text(holders: Sequence[QuotaHolder]) -> str:
    return " ".join(sentence(holder.text) for holder in holders)


# Alerts of storages: down, full, out of use, oversubscribed, deletions that fail, wrong bytes.

_NEARLY_FULL = 0.95
_MEDIUM_FULL = 0.98
_OVERSUBSCRIBED = 1.0


def storage_alerts(facts: AlertInputs) -> Iterator[Alert]:
    """Yield the alerts of storages."""
    for name, status in sorted(facts.storages.items()):
        yield from _of_health(facts, name, status)
        yield from _of_medium(name, status)
    for usage in facts.usage.storages:
        yield from _of_usage(facts, usage)
    for (group, name), count in sorted(facts.mismatches.items()):
        yield _storage_alert(
            name="KvcmChecksumMismatch",
            severity=Severity.ALERT_PAGE,
            storage=name,
            summary=f"Storage {name} returned wrong bytes to group {group} {_times(count)} in the last 5 minutes.",
            reason="Checksums of the bytes read differ from those of their writers.",
            advice="Disable the storage and look at its medium; the blocks concerned are removed already.",
        )
    for name in sorted(facts.unverified):
        yield _storage_alert(
            name="KvcmStorageUnverified",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"Storage {name} is unverified: its blocks are not read.",
            reason="It and the metadata store are not of the same time: one was restored, rolled back or failed over.",
            advice="Wait: the leader verifies its blocks, and forgets those whose bytes are others' by now.",
        )
    for drain in facts.drains:
        if drain.reason and drain.state is not DrainState.DRAIN_DONE:
            what = "removal" if drain.is_removal else "drain"
            yield _storage_alert(
                name="KvcmDrainWaits",
                severity=Severity.ALERT_INFO,
                storage=drain.storage_unique_name,
                summary=(
                    f"The {what} of storage {drain.storage_unique_name} waits, "
                    f"{format_size(drain.left_bytes)} are left."
                ),
                reason=sentence(drain.reason),
                advice="Nothing has to be done while what it waits for goes on by itself.",
            )


def _storage_alert(name: str, severity: Severity, storage: str, summary: str, reason: str, advice: str) -> Alert:
    return Alert(
        name=name,
        severity=severity,
        subject_kind=SubjectKind.STORAGE,
        subject_name=storage,
        summary=summary,
        reason=reason,
        advice=advice,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _of_health(facts: AlertInputs, name: str, status: StorageStatus) -> Iterator[Alert]:
    lasts = duration_text(max(0.0, facts.now - status.since_ms / 1000)) if status.since_ms else ""
    since = f" for {lasts}" if lasts else ""
    if not status.is_enabled:
        yield _storage_alert(
            name="KvcmStorageDisabled",
            severity=Severity.ALERT_INFO,
            storage=name,
            summary=f"Storage {name} is disabled.",
            reason="Somebody switched it off: its blocks are not read, and nothing is written to it.",
            advice=f"Enable it again when it is ready: kvcm storage enable {name}.",
        )
    elif status.health is HealthState.SH_DOWN:
        yield _storage_alert(
            name="KvcmStorageDown",
            severity=Severity.ALERT_PAGE,
            storage=name,
            summary=f"Storage {name} is down{since}: its blocks are not read.",
            reason=sentence(status.reason) if status.reason else "Its probes are not answered.",
            advice="Bring its medium back (mount, network, service); it is used again by itself after two good probes.",
        )
    elif status.is_full:
        yield _storage_alert(
            name="KvcmStorageFull",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"The medium of storage {name} is full{since}: its blocks are evicted until there is room.",
            reason=sentence(status.reason) if status.reason else "A write found no space on it a moment ago.",
            advice=(
                f"Free space on it, or set capacity_bytes of storage {name} below the size of its medium, so that "
                "blocks leave in time; `eviction_frees_nothing` in the leader's log says that other files fill it."
            ),
        )
    elif status.health is HealthState.SH_DEGRADED:
        yield _storage_alert(
            name="KvcmStorageDegraded",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"Storage {name} is degraded{since}.",
            reason=sentence(status.reason) if status.reason else "Some of its probes were slow or failed.",
            advice="Look at its medium before it goes down.",
        )


def _of_medium(name: str, status: StorageStatus) -> Iterator[Alert]:
    size, free = status.medium_bytes, status.medium_free_bytes
    if status.is_full:
        return  # KvcmStorageFull says so
    if size > 0 and 0 <= free < (1 - _MEDIUM_FULL) * size:
        yield _storage_alert(
            name="KvcmStorageNearlyFull",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"The medium of storage {name} has {format_size(free)} left.",
            reason=(
                f"It is {percent(size - free, size)} used ({format_size(size - free)} of {format_size(size)}), "
                "by all files on it."
            ),
            advice=f"Free space on it, or set capacity_bytes of storage {name} so that blocks leave in time.",
        )


def _of_usage(facts: AlertInputs, storage: StorageUsage) -> Iterator[Alert]:
    name, usage = storage.storage_unique_name, storage.usage
    if usage.capacity_bytes > 0 and usage.used_bytes > _NEARLY_FULL * usage.capacity_bytes:
        numbers = f"{format_size(usage.used_bytes)} of {format_size(usage.capacity_bytes)}"
        yield _storage_alert(
            name="KvcmStorageNearlyFull",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"Storage {name} is {percent(usage.used_bytes, usage.capacity_bytes)} full.",
            reason=f"It holds {numbers}, {format_size(usage.deleting_bytes)} of it wait for their deletion.",
            advice=f"Raise capacity_bytes of storage {name}, or lower the quotas of the groups that use it.",
        )
    if storage.oversubscription > _OVERSUBSCRIBED:
        yield _storage_alert(
            name="KvcmStorageOversubscribed",
            severity=Severity.ALERT_INFO,
            storage=name,
            summary=f"Storage {name} is oversubscribed {storage.oversubscription:.3g} times.",
            reason="The quotas of the groups that may use it exceed its capacity: not all of them can fill theirs.",
            advice="That is fine while they do not; else lower quotas, raise the capacity, or guarantee shares.",
        )
    backlog = facts.backlogs.get(name)
    if backlog is not None and backlog.failures and (backlog.waiting or backlog.late):
        yield _storage_alert(
            name="KvcmDeletionsFail",
            severity=Severity.ALERT_TICKET,
            storage=name,
            summary=f"Storage {name} does not delete what it is asked to.",
            reason=(
                f"{count_text(backlog.waiting, 'location')} wait, {backlog.failures:,} attempts failed, "
                f"{backlog.late:,} hang."
            ),
            advice="Look at its medium and at the log; deletions are tried again by themselves.",
        )


# Alerts of managers and their shared state: leadership, the store, sessions, certificates, quiet engines, the loop.

_MAX_LOOP_LAG_SECONDS = 0.1
_CERTIFICATE_SECONDS = 14 * 86_400
_URGENT_SECONDS = 2 * 86_400
_MAX_NAMED = 3  # instances, and engines of each


def cluster_alerts(facts: AlertInputs) -> Iterator[Alert]:
    """Yield the alerts of managers and the cluster."""
    yield from _of_leadership(facts)
    yield from _of_store(facts)
    yield from _of_sessions(facts)
    yield from _of_certificates(facts)
    yield from _of_engines(facts)
    if facts.lag_seconds > _MAX_LOOP_LAG_SECONDS:
        yield Alert(
            name="KvcmLoopLag",
            severity=Severity.ALERT_TICKET,
            subject_kind=SubjectKind.MANAGER,
            subject_name=facts.node_id,
            summary=(
                f"The event loop of manager {facts.node_id} is late by {duration_text(facts.lag_seconds)} all the time."
            ),
            reason="It is asked for more than it can do on one core, or its host is short of processor time.",
            advice="Add a manager on the same store, or give it a core of its own.",
        )


def _of_leadership(facts: AlertInputs) -> Iterator[Alert]:
    if not facts.leader:
        yield Alert(
            name="KvcmNoLeader",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary="No manager leads: nothing is evicted and nothing deleted.",
            reason=f"Manager {facts.node_id} finds no holder of the lease in the store.",
            advice=(
                "Look whether the store answers and takes writes, and at the managers' logs "
                "for `election_round_failed`."
            ),
        )
    if len(facts.leaders) > 1:
        yield Alert(
            name="KvcmSeveralLeaders",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"{len(facts.leaders)} managers say that they lead.",
            reason=f"They are {', '.join(sorted(facts.leaders))}.",
            advice="Check that their clocks run evenly, and that they use one store.",
        )


def _of_store(facts: AlertInputs) -> Iterator[Alert]:
    yield from _of_unsound_store(facts)
    yield from _of_block_stores(facts)
    if facts.store_trouble and not facts.store_health.closed:
        yield Alert(
            name="KvcmStoreAway",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"The metadata store does not answer manager {facts.node_id}.",
            reason=f"{facts.store_trouble}.",
            advice=(
                "Look at the Redis or Valkey server, or at the disk of the data directory. Reads go on from memory as "
                "far as they can; writes are refused until it is back."
            ),
        )
    if facts.dropped_accesses:
        yield Alert(
            name="KvcmAccessesDropped",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.MANAGER,
            subject_name=facts.node_id,
            summary=f"{count_text(facts.dropped_accesses, 'read')} could not be written down in the last 5 minutes.",
            reason=(
                "The metadata store takes them more slowly than engines read, so that eviction does not know of them."
            ),
            advice="Give the store more processor time or a faster network.",
        )


def _of_block_stores(facts: AlertInputs) -> Iterator[Alert]:
    if facts.block_stores:
        names = ", ".join(sorted(facts.block_stores))
        yield Alert(
            name="KvcmBlockStoreUnsound",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"Manager {facts.node_id} cannot use every block store as it is: {names}.",
            reason=" ".join(sentence(f"{name}: {why}") for name, why in sorted(facts.block_stores.items())),
            advice=(
                "Mend its servers: managers go on by themselves. Until then lookups of the groups that it keeps miss, "
                "and their writes are refused; `kvcm group stores` names them."
            ),
        )
    if facts.failing_moves:
        first = facts.failing_moves[0]
        yield Alert(
            name="KvcmBlockMoveFails",
            severity=Severity.ALERT_TICKET,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"{count_text(len(facts.failing_moves), 'instance')} cannot be moved to another metadata store.",
            reason=sentence(f"{first.instance_id}, from {first.source} to {first.target}: {first.reason}"),
            advice=(
                "Their blocks are used where they lie, and the leader tries again by itself: look at both stores, or "
                "keep the group where it is (`kvcm group move`)."
            ),
        )


def _of_unsound_store(facts: AlertInputs) -> Iterator[Alert]:
    store = facts.store_health
    if store.closed or store.evicts:
        yield Alert(
            name="KvcmStoreUnsound",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"The metadata store is not one that manager {facts.node_id} can use.",
            reason=sentence(store.closed or store.evicts),
            advice="Mend the server: managers go on by themselves within seconds, and need no restart.",
        )
    if store.last_loss and facts.now - store.lost_at <= _LOSS_SECONDS:
        yield Alert(
            name="KvcmStoreLostChanges",
            severity=Severity.ALERT_PAGE,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary="The metadata store lost changes that were acknowledged.",
            reason=sentence(store.last_loss),
            advice=(
                "Look why the server lost them. Compare the API keys with what should be there, run "
                "`kvcm index verify`, and scrub the storages: they may hold bytes without metadata."
            ),
        )


def _of_sessions(facts: AlertInputs) -> Iterator[Alert]:
    if facts.overdue_sessions:
        yield Alert(
            name="KvcmWriteSessionsOverdue",
            severity=Severity.ALERT_TICKET,
            subject_kind=SubjectKind.CLUSTER,
            subject_name="",
            summary=f"{count_text(facts.overdue_sessions, 'write session')} should have ended and did not.",
            reason="The leader ends them; it is not there, the store does not answer, or there are too many at a time.",
            advice="Look at the write sessions and at the log of the leader for `session_not_ended`.",
        )


def _of_certificates(facts: AlertInputs) -> Iterator[Alert]:
    for what, ends in sorted(facts.certificates.items()):
        left = ends - facts.now
        if ends <= 0 or left > _CERTIFICATE_SECONDS:
            continue
        is_urgent = left < _URGENT_SECONDS
        yield Alert(
            name="KvcmCertificateEnds",
            severity=Severity.ALERT_PAGE if is_urgent else Severity.ALERT_TICKET,
            subject_kind=SubjectKind.MANAGER,
            subject_name=facts.node_id,
            summary=(
                f"The certificate ({what}) of manager {facts.node_id} "
                + (f"ends in {duration_text(left)}." if left > 0 else f"ended {duration_text(-left)} ago.")
            ),
            reason="It was not replaced yet.",
            advice="Put another one in its place: the manager reloads it by itself.",
        )


def _of_engines(facts: AlertInputs) -> Iterator[Alert]:
    """Yield one alert for all instances: what an engine that crashed leaves behind is the same for each."""
    quiet = {instance: engines for instance, engines in sorted(facts.quiet_engines.items()) if engines}
    if not quiet:
        return
    count = sum(map(len, quiet.values()))
    clauses = [f"instance {name}: {_names_text(engines)}" for name, engines in [*quiet.items()][:_MAX_NAMED]]
    more = len(quiet) - len(clauses)
    listed = "; ".join(clauses) + (f"; and {count_text(more, 'more instance')}" if more else "")
    yield Alert(
        name="KvcmEngineQuiet",
        severity=Severity.ALERT_TICKET,
        subject_kind=SubjectKind.MANAGER,
        subject_name=facts.node_id,
        summary=f"{count_text(count, 'engine')} went quiet: manager {facts.node_id} gets no reports of their memory.",
        reason=f"{sentence(listed)} Scores of prompts do not count their blocks.",
        advice=(
            "Check that the engine and its `kvcm-subscriber` run, and that they reach this manager. An engine that is "
            "gone for good is forgotten by itself after ten timeouts (kvcm.residency.timeout_ms)."
        ),
    )


def _names_text(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return join_clauses([*names[:_MAX_NAMED], *([f"{more:,} more"] if more > 0 else [])])
