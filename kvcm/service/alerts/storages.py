"""What is wrong with storages: down, full, out of use, oversubscribed, deletions that fail, wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.service.alerts.values import Alert, Facts, Severity, SubjectKind
from kvcm.service.alerts.wording import counted, lasting, percent, sentence
from kvcm.service.usage_values import DrainState, StorageStatus, StorageUsage
from kvcm.sizes import shown_size
from kvcm.storage.health import HealthState

__all__ = ["storage_alerts"]

_NEARLY_FULL = 0.95
_MEDIUM_FULL = 0.98
_OVERSUBSCRIBED = 1.0


def storage_alerts(facts: Facts) -> Iterator[Alert]:
    """Yield what is wrong with storages."""
    for name, status in sorted(facts.storages.items()):
        yield from _of_health(facts, name, status)
        yield from _of_medium(name, status)
    for usage in facts.usage.storages:
        yield from _of_usage(facts, usage)
    for (group, name), count in sorted(facts.mismatches.items()):
        yield _alert(
            *("KvcmChecksumMismatch", Severity.ALERT_PAGE, name),
            f"Storage {name} returned wrong bytes to group {group} {_times(count)} in the last 5 minutes.",
            "Checksums of what was read differ from those that the writers told.",
            "Disable the storage and look at its medium; the blocks concerned are removed already.",
        )
    for drain in facts.drains:
        if drain.reason and drain.state is not DrainState.DRAIN_DONE:
            what = "removal" if drain.is_removal else "drain"
            yield _alert(
                *("KvcmDrainWaits", Severity.ALERT_INFO, drain.storage_unique_name),
                f"The {what} of storage {drain.storage_unique_name} waits, {shown_size(drain.left_bytes)} are left.",
                sentence(drain.reason),
                "Nothing has to be done while what it waits for goes on by itself.",
            )


def _alert(name: str, severity: Severity, storage: str, summary: str, reason: str, advice: str) -> Alert:
    return Alert(name, severity, SubjectKind.STORAGE, storage, summary, reason, advice)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _of_health(facts: Facts, name: str, status: StorageStatus) -> Iterator[Alert]:
    lasts = lasting(max(0.0, facts.now - status.since_ms / 1000)) if status.since_ms else ""
    since = f" for {lasts}" if lasts else ""
    if not status.is_enabled:
        yield _alert(
            *("KvcmStorageDisabled", Severity.ALERT_INFO, name),
            f"Storage {name} is disabled.",
            "Somebody switched it off: its blocks are not read, and nothing is written to it.",
            f"Enable it again when it is ready: kvcm storage enable {name}.",
        )
    elif status.health is HealthState.SH_DOWN:
        yield _alert(
            *("KvcmStorageDown", Severity.ALERT_PAGE, name),
            f"Storage {name} is down{since}: its blocks are not read.",
            sentence(status.reason) if status.reason else "Its probes are not answered.",
            "Bring its medium back (mount, network, service); it is used again by itself after two good probes.",
        )
    elif status.health is HealthState.SH_DEGRADED:
        yield _alert(
            *("KvcmStorageDegraded", Severity.ALERT_TICKET, name),
            f"Storage {name} is degraded{since}.",
            sentence(status.reason) if status.reason else "Some of its probes were slow or failed.",
            "Look at its medium before it goes down.",
        )


def _of_medium(name: str, status: StorageStatus) -> Iterator[Alert]:
    size, free = status.medium_bytes, status.medium_free_bytes
    if size > 0 and 0 <= free < (1 - _MEDIUM_FULL) * size:
        yield _alert(
            *("KvcmStorageNearlyFull", Severity.ALERT_TICKET, name),
            f"The medium of storage {name} has {shown_size(free)} left.",
            f"It is {percent(size - free, size)} used ({shown_size(size - free)} of {shown_size(size)}), "
            "by whatever lies on it.",
            f"Make room on it, or set capacity_bytes of storage {name} so that blocks leave in time.",
        )


def _of_usage(facts: Facts, storage: StorageUsage) -> Iterator[Alert]:
    name, usage = storage.storage_unique_name, storage.usage
    if usage.capacity_bytes > 0 and usage.used_bytes > _NEARLY_FULL * usage.capacity_bytes:
        numbers = f"{shown_size(usage.used_bytes)} of {shown_size(usage.capacity_bytes)}"
        yield _alert(
            *("KvcmStorageNearlyFull", Severity.ALERT_TICKET, name),
            f"Storage {name} is {percent(usage.used_bytes, usage.capacity_bytes)} full.",
            f"It holds {numbers}, {shown_size(usage.deleting_bytes)} of it wait for their deletion.",
            f"Raise capacity_bytes of storage {name}, or lower the quotas of the groups that use it.",
        )
    if storage.oversubscription > _OVERSUBSCRIBED:
        yield _alert(
            *("KvcmStorageOversubscribed", Severity.ALERT_INFO, name),
            f"Storage {name} is oversubscribed {storage.oversubscription:.3g} times.",
            "The quotas of the groups that may use it exceed its capacity: not all of them can fill theirs.",
            "That is fine while they do not; else lower quotas, raise the capacity, or guarantee shares.",
        )
    backlog = facts.backlogs.get(name)
    if backlog is not None and backlog.failures and (backlog.waiting or backlog.late):
        yield _alert(
            *("KvcmDeletionsFail", Severity.ALERT_TICKET, name),
            f"Storage {name} does not delete what it is asked to.",
            f"{counted(backlog.waiting, 'location')} wait, {backlog.failures:,} attempts failed, "
            f"{backlog.late:,} hang.",
            "Look at its medium and at the log; deletions are tried again by themselves.",
        )
