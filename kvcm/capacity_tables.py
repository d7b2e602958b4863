"""What `kvcm group usage` and `kvcm storage list` show a person: tables, and a sentence for whatever asks for something
to be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from kvcm.service.usage_values import DrainStatus, GroupUsage, StorageStatus, StorageUsage, Usage, UsageReport
from kvcm.sizes import shown_size
from kvcm.storage.health import HealthState
from kvcm.terminal_table import TerminalTable

__all__ = ["ListedStorage", "print_drains", "print_storages", "print_usage", "shown_time", "troubles"]

_LIMITS = ("used", "deleting", "limit", "evict above", "down to", "%")
_BAD, _WARN, _QUIET = "bold red", "yellow", "dim"
_HEALTH_STYLES = {HealthState.SH_UP: "", HealthState.SH_DEGRADED: _WARN, HealthState.SH_DOWN: _BAD}


class ListedStorage(NamedTuple):
    """A storage of `kvcm storage list`.

    Attributes:
        kind: its type, as operators write it.
        used_bytes: by all groups.
        capacity_bytes: what they may use together, 0 for no limit.
        status: how it is for the manager that was asked; None when that does not tell.
    """

    name: str
    kind: str
    used_bytes: int
    capacity_bytes: int
    status: StorageStatus | None


def print_storages(storages: Sequence[ListedStorage], console: Console) -> None:
    """Show storages and how they are."""
    words = ("storage", "type", "state", "since")
    table = TerminalTable((*words, "used", "limit", "free", "of medium"), words=words)
    for storage in storages:
        limit = shown_size(storage.capacity_bytes) if storage.capacity_bytes else Text("none", _QUIET)
        state, since, free, whole = _status(storage.status)
        used = shown_size(storage.used_bytes)
        table.add_row(storage.name, storage.kind, state, since, used, limit, free, whole)
    console.print(table)
    told = (storage.status for storage in storages if storage.status is not None and storage.status.reason)
    _print_below(map(_trouble, told), console)


def _status(status: StorageStatus | None) -> tuple[str | Text, ...]:
    if status is None:
        return ("", "", "", "")
    since = shown_time(status.since_ms) if status.since_ms else ""
    sizes = (shown_size(size) if size >= 0 else "" for size in (status.medium_free_bytes, status.medium_bytes))
    return (_state(status), since, *sizes)


def _state(status: StorageStatus) -> Text:
    state = Text.assemble((status.health.label, _HEALTH_STYLES[status.health]))
    if not status.is_enabled:
        state.append(", disabled", _WARN)
    elif status.is_draining:
        state.append(", draining", _WARN)
    return state


def _trouble(status: StorageStatus) -> Text:
    sentence = f"storage {status.storage_unique_name} is {status.health.label}: {status.reason}"
    return Text(sentence, _HEALTH_STYLES[status.health])


def print_drains(drains: Sequence[DrainStatus], console: Console) -> None:
    """Show drains, and why they do not go on."""
    words = ("storage", "task", "state", "since")
    table = TerminalTable((*words, "left"), words=words)
    for drain in drains:
        task = "forget, removed" if drain.is_removal else "drain"
        since, left = shown_time(drain.started_ms), shown_size(drain.left_bytes)
        table.add_row(drain.storage_unique_name, task, drain.state.label, since, left)
    console.print(table)
    stuck = (drain for drain in drains if drain.reason)
    _print_below((Text(f"storage {drain.storage_unique_name}: {drain.reason}", _WARN) for drain in stuck), console)


def _print_below(sentences: Iterable[Text], console: Console) -> None:
    for number, sentence in enumerate(sentences):
        if not number:
            console.print()  # without it the first would look like a row
        console.print(sentence)


def shown_time(unix_ms: int) -> str:
    """Return a time as people write it, in UTC: `2026-11-21 08:00:00Z`."""
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def print_usage(report: UsageReport, console: Console) -> None:
    """Show usage and limits."""
    console.print(_groups(report))
    if any(group.instances for group in report.groups):
        console.print("", _instances(report), sep="\n")
    if report.storages:
        console.print("", _storages(report), sep="\n")
    if report.global_quotas:
        console.print("", _quotas(report), sep="\n")
    _print_below(_sentences(report), console)


def _groups(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("group", "", *_LIMITS), words=("",))
    for group in report.groups:
        table.add_section()
        table.add_row(group.name, "total", *_limits(group.total))
        for kind in group.types:
            table.add_row("", f"type {kind.storage_type.kind}", *_limits(kind.usage))
        for storage in group.storages:
            name = Text(f"storage {storage.storage_unique_name}")
            if storage.guaranteed_bytes:
                name.append(f", {shown_size(storage.guaranteed_bytes)} guaranteed", _QUIET)
            table.add_row("", name, shown_size(storage.used_bytes))
        if group.pinned_bytes or group.pin_budget_bytes:
            share = _percent(group.pinned_bytes, group.pin_budget_bytes)
            pinned, budget = shown_size(group.pinned_bytes), shown_size(group.pin_budget_bytes)
            table.add_row("", "pinned", pinned, "", budget, "", "", share)
    return table


def _instances(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("instance", "group", "used", "blocks", "at most", "policy"), words=("group", "policy"))
    for group in report.groups:
        for instance in group.instances:
            most = f"{instance.max_key_count:,}" if instance.max_key_count >= 0 else ""
            used, blocks = shown_size(instance.used_bytes), f"{instance.key_count:,}"
            table.add_row(instance.instance_id, group.name, used, blocks, most, instance.policy)
    return table


def _storages(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("storage", *_LIMITS, "guaranteed", "quotas", "to delete", "failures"))
    for storage in report.storages:
        failures = f"{storage.deletion_failures:,}" if storage.deletion_failures else ""
        table.add_row(
            storage.storage_unique_name,
            *_limits(storage.usage),
            shown_size(storage.guaranteed_bytes) if storage.guaranteed_bytes else "",
            _oversubscription(storage),
            f"{storage.deletion_backlog:,}" if storage.deletion_backlog else "",
            Text(failures, _WARN),
        )
    return table


def _quotas(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("global quota", *_LIMITS, "groups"), words=("groups",))
    for quota in report.global_quotas:
        table.add_row(quota.name, *_limits(quota.usage), ", ".join(quota.groups))
    return table


def _limits(usage: Usage) -> Iterator[str | Text]:
    yield shown_size(usage.used_bytes)
    yield shown_size(usage.deleting_bytes) if usage.deleting_bytes else ""
    for limit in (usage.capacity_bytes, usage.high_mark_bytes, usage.low_mark_bytes):
        yield shown_size(limit) if limit >= 0 else Text("none", _QUIET)
    style = _BAD if usage.is_full else _WARN if usage.is_above_mark else ""
    yield Text(_percent(usage.used_bytes, usage.capacity_bytes), style)


def _percent(used_bytes: int, capacity_bytes: int) -> str:
    if capacity_bytes < 0:
        return ""
    if not capacity_bytes:
        return "over" if used_bytes else "0"
    return f"{100 * used_bytes / capacity_bytes:.1f}"


def _oversubscription(storage: StorageUsage) -> str | Text:
    ratio = storage.oversubscription
    return Text(f"× {ratio:.2f}", _WARN if ratio > 1 else "") if ratio else ""


def _sentences(report: UsageReport) -> Iterator[Text]:
    for group in report.groups:
        yield from _about_group(group)
    for storage in report.storages:
        yield from _about_storage(storage)
    for quota in report.global_quotas:
        if quota.usage.is_full:
            yield Text(f"global quota {quota.name} is full: no group of it can write", _BAD)


def troubles(report: UsageReport) -> Iterator[tuple[bool, str]]:
    """Yield every sentence about what is full or above a mark, and whether it keeps somebody from writing."""
    for sentence in _sentences(report):
        yield sentence.style == _BAD, sentence.plain


def _about_group(group: GroupUsage) -> Iterator[Text]:
    if not group.total.capacity_bytes and group.total.used_bytes:
        yield Text(f"group {group.name} may use nothing, but its instances do: it was removed, or its quota is 0", _BAD)
    elif group.total.is_full:
        yield Text(f"group {group.name} is full: writes are refused until something is evicted or removed", _BAD)
    elif group.total.high_mark_bytes < 0:
        yield Text(f"group {group.name} has no mark of its own: it fills up, and then writes are refused", _WARN)
    for kind in group.types:
        if kind.usage.is_full:
            yield Text(f"group {group.name} is full on type {kind.storage_type.kind}", _BAD)
    if group.refused_writes:
        times = "once" if group.refused_writes == 1 else f"{group.refused_writes:,} times"
        yield Text(f"group {group.name} was refused room {times} since the manager started", _WARN)


def _about_storage(storage: StorageUsage) -> Iterator[Text]:
    name, ratio = storage.storage_unique_name, storage.oversubscription
    if storage.usage.is_full:
        yield Text(f"storage {name} is full: writes go to the next candidate, or are refused", _BAD)
    if ratio > 1:
        yield Text(f"storage {name} is oversubscribed: its groups may use {ratio:.2f} times its capacity", _WARN)
    if storage.guaranteed_bytes > storage.usage.capacity_bytes >= 0:
        yield Text(f"storage {name} cannot keep its guarantees: they are more than its capacity", _BAD)
    if storage.deletion_failures and storage.deletion_backlog:
        yield Text(f"storage {name} fails to delete: {storage.deletion_backlog:,} locations wait", _WARN)
