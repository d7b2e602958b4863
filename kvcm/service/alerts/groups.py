"""What is wrong with groups: full, nearly full, without a storage, above a mark that eviction does not reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcm.model.groups import InstanceGroup
from kvcm.service.alerts.group_holders import Holder, holders_of
from kvcm.service.alerts.group_limits import Limit, limits_of, storage_trouble
from kvcm.service.alerts.values import Alert, Facts, Severity, SubjectKind
from kvcm.service.alerts.wording import counted, joined, sentence
from kvcm.service.usage_values import GroupUsage
from kvcm.sizes import shown_size

__all__ = ["group_alerts"]

_NEARLY = 0.9
_MOST_HOLDERS = 3


def group_alerts(facts: Facts) -> Iterator[Alert]:
    """Yield what is wrong with groups."""
    for group in facts.usage.groups:
        configured = facts.groups.get(group.name)
        if configured is None:
            continue
        without = _without_storage(facts, configured)
        if without is not None:
            yield without
        else:
            yield from _short_of_room(facts, group, configured)


def _without_storage(facts: Facts, group: InstanceGroup) -> Alert | None:
    troubles = [(name, storage_trouble(facts.storages.get(name))) for name in group.storage_candidates]
    if any(not trouble for _, trouble in troubles):
        return None
    clauses = [f"storage {name} {trouble}" for name, trouble in troubles]
    return Alert(
        *("KvcmGroupWithoutStorage", Severity.ALERT_PAGE, SubjectKind.GROUP, group.name),
        f"No storage takes blocks of group {group.name}.",
        sentence(joined(clauses)) if clauses else "The group names no storage.",
        f"Bring {'it' if len(troubles) == 1 else 'one of them'} back, or give the group another storage "
        "(storage_candidates).",
    )


def _short_of_room(facts: Facts, group: GroupUsage, configured: InstanceGroup) -> Iterator[Alert]:
    limits, refused = limits_of(facts, group, configured), facts.refused.get(group.name, 0)
    worst = limits[0]
    if refused:
        severity = Severity.ALERT_PAGE if worst.is_full else Severity.ALERT_TICKET
        state = "is full" if worst.is_full else "is short of room"
        state += f" and refused {counted(refused, 'write')} in the last 5 minutes"
        yield _alert("KvcmGroupFull", severity, facts, group, configured, limits, state)
    elif worst.is_full:
        yield _alert("KvcmGroupFull", Severity.ALERT_TICKET, facts, group, configured, limits, "is full")
    elif worst.ratio > _NEARLY and (worst.usage.high_mark_bytes < 0 or worst.usage.is_above_mark):
        yield _alert("KvcmGroupNearlyFull", Severity.ALERT_TICKET, facts, group, configured, limits, "is nearly full")
    elif group.total.is_above_mark:
        yield _stuck(facts, group, configured)


def _alert(
    name: str,
    severity: Severity,
    facts: Facts,
    group: GroupUsage,
    configured: InstanceGroup,
    limits: Sequence[Limit],
    state: str,
) -> Alert:
    worst = limits[0]
    holders = holders_of(facts, group, configured, worst)[:_MOST_HOLDERS]
    reached = [limit.text for limit in limits if limit is worst or limit.is_full]
    return Alert(
        *(name, severity, SubjectKind.GROUP, group.name),
        f"Group {group.name} {state}.",
        f"{sentence(joined(reached))} {_told(holders)}",
        f"{sentence(holders[0].advice)} Or raise the limit: {worst.raised_by}.",
    )


def _stuck(facts: Facts, group: GroupUsage, configured: InstanceGroup) -> Alert:
    total = group.total
    left = shown_size(total.used_bytes - total.deleting_bytes - total.high_mark_bytes)
    limit = limits_of(facts, group, configured)[0]
    holders = holders_of(facts, group, configured, limit)
    return Alert(
        *("KvcmReclaimStuck", Severity.ALERT_TICKET, SubjectKind.GROUP, group.name),
        f"Group {group.name} stays {left} above the mark at which eviction begins.",
        f"It uses {shown_size(total.used_bytes)}, the mark is {shown_size(total.high_mark_bytes)}. {_told(holders)}",
        sentence(holders[0].advice),
    )


def _told(holders: Sequence[Holder]) -> str:
    return " ".join(sentence(holder.text) for holder in holders)
