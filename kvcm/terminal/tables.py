"""Tables as `kubectl` and `docker` print them: columns beside each other, no box around them, and nothing cut.

A terminal of 80 columns has no space to spare for edges, and text that is cut or broken letter by letter can be neither
read nor copied. So a table that is too wide is narrowed in this order, and only as far as necessary:

1. titles fold between words;
2. texts fold between words;
3. words of more than `WHOLE_WORD` characters break;
4. the columns no longer stand beside each other: each row becomes a list of its fields.

Numbers never fold, for half of one is another one. Rich alone would break them, and names before long texts.

The second half are the tables of usage and storages, with a sentence below for each problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvcm.model.units import format_size
from kvcm.service.usage_values import (
    UNKNOWN,
    BlockStoreStatus,
    DrainStatus,
    GroupStoreStatus,
    GroupUsage,
    StorageStatus,
    StorageUsage,
    Usage,
    UsageReport,
)
from kvcm.storage.health import HealthState

__all__ = [
    "WHOLE_WORD",
    "ListedStorage",
    "TerminalTable",
    "format_time",
    "print_drains",
    "print_group_stores",
    "print_sentences",
    "print_storages",
    "print_usage",
    "problems",
]

WHOLE_WORD = 16
"""How many characters a word may have that no table breaks; the ids of keys and pins have as many."""
_GAP = 2
_NARROWEST = 2  # width of the widest character
_TITLE, _QUIET = "bold", "dim"
_RULE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_DASHES = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class TerminalTable:
    """Rows below titles. While there are rows, a column in which all are empty is left out.

    Args:
        columns: their titles.
        words: those that hold words, which stand on the left and fold; the first does, all others hold numbers.
        has_titles: whether titles are shown. Without, the first column has names of fields, the second their values.
    """

    def __init__(self, columns: Iterable[str], *, words: Iterable[str] = (), has_titles: bool = True) -> None:
        self._titles = list(columns)
        self._words = {*self._titles[:1], *words}
        self._has_titles = has_titles
        self._sections: list[list[_Row]] = [[]]

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row.

        Args:
            cells: one per column, without markup; missing ones are empty.
            style: of cells without one of their own.
        """
        texts = [Text(cell) if isinstance(cell, str) else cell.copy() for cell in cells]
        for text in texts:
            text.expand_tabs()
        self._sections[-1].append(_Row(texts, style))

    def add_section(self) -> None:
        """Set the rows that follow apart from those before."""
        if self._sections[-1]:
            self._sections.append([])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table or its lists of fields, no wider than the console."""
        shown = self._shown_columns()
        columns = [self._column(number) for number in shown]
        width = options.max_width - _GAP * (len(columns) - 1)
        widths = _fitting(columns, width)
        if self._has_titles and sum(widths) > width:
            yield from self._lists_of_fields()
        elif columns:
            table = self._drawn(columns, widths, _DASHES if options.ascii_only else _RULE)
            self._fill(table, shown)
            yield table

    def _rows(self) -> Iterator[_Row]:
        for section in self._sections:
            yield from section

    def _shown_columns(self) -> list[int]:
        numbers, rows = range(len(self._titles)), list(self._rows())
        return [number for number in numbers if not rows or any(row.cell(number).plain.strip() for row in rows)]

    def _column(self, number: int) -> _Column:
        title = self._titles[number]
        return _Column(
            Text(title if self._has_titles else ""),
            [row.cell(number) for row in self._rows()],
            title in self._words,
            WHOLE_WORD if self._has_titles else _NARROWEST,
        )

    def _drawn(self, columns: Sequence[_Column], widths: Sequence[int], box: Box) -> Table:
        table = Table(
            box=box, show_header=self._has_titles, header_style=_TITLE, border_style=_QUIET, show_edge=False,
            pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column, width in zip(columns, widths, strict=True):
            table.add_column(
                column.title, justify="left" if column.has_words else "right", width=width, overflow="fold"
            )
        return table

    def _fill(self, table: Table, shown: Sequence[int]) -> None:
        for section in self._sections:
            for row in section:
                table.add_row(*(row.cell(number) for number in shown), style=row.style)
            table.add_section()

    def _lists_of_fields(self) -> Iterator[RenderableType]:
        for number, row in enumerate(self._rows()):
            if number:
                yield Text()
            fields = TerminalTable(("field", "value"), words=("value",), has_titles=False)
            for column, title in enumerate(self._titles):
                if row.cell(column):
                    fields.add_row(Text(title, _QUIET), row.cell(column), style=row.style)
            yield fields


class _Row(NamedTuple):
    cells: Sequence[Text]
    style: str

    def cell(self, number: int) -> Text:
        return self.cells[number] if number < len(self.cells) else Text()


@dataclass(frozen=True, slots=True)
class _Column:
    """A column.

    Attributes:
        whole_word: words of at most so many characters never break.
    """

    title: Text
    cells: Sequence[Text]
    has_words: bool
    whole_word: int

    def full(self) -> int:
        """Return the width in which nothing folds."""
        return _width([self.title, *self.cells])

    def steps(self) -> tuple[int, int, int]:
        """Return the least width at each of the first three steps of narrowing."""
        below_folded_title = max(_width(self.cells), _longest_word([self.title]))
        if not self.has_words:
            return below_folded_title, below_folded_title, below_folded_title
        folded = _longest_word([self.title, *self.cells])
        return below_folded_title, folded, min(folded, self.whole_word)


def _fitting(columns: Sequence[_Column], available: int) -> list[int]:
    """Return widths that fit, or else the narrowest ones."""
    widths = [column.full() for column in columns]
    for narrowest in zip(*(column.steps() for column in columns), strict=True):
        _narrow(widths, narrowest, available)
    return widths


def _narrow(widths: list[int], narrowest: Sequence[int], available: int) -> None:
    """Narrow the widest column that may become narrower, the last of equal ones, until all fit."""
    while sum(widths) > available:
        spare = [(width, number) for number, width in enumerate(widths) if width > narrowest[number]]
        if not spare:
            return
        widths[max(spare)[1]] -= 1


def _width(texts: Iterable[Text]) -> int:
    return max((line.cell_len for text in texts for line in text.split(allow_blank=True)), default=0)


def _longest_word(texts: Iterable[Text]) -> int:
    return max((cell_len(word) for text in texts for word in text.plain.split()), default=0)


# Tables of `kvcm group usage` and `kvcm storage list`, with a sentence for each problem.

_LIMITS = ("used", "deleting", "limit", "evict above", "down to", "%")
_BAD, _WARN = "bold red", "yellow"
_HEALTH_STYLES = {HealthState.SH_UP: "", HealthState.SH_DEGRADED: _WARN, HealthState.SH_DOWN: _BAD}


class ListedStorage(NamedTuple):
    """A storage of `kvcm storage list`.

    Attributes:
        kind: its type, as operators write it.
        used_bytes: by all groups.
        capacity_bytes: limit of all groups together, 0 for no limit.
        status: health as the manager that answered sees it; None if unknown.
    """

    name: str
    kind: str
    used_bytes: int
    capacity_bytes: int
    status: StorageStatus | None


def print_storages(storages: Sequence[ListedStorage], console: Console) -> None:
    """Print storages and their health."""
    words = ("storage", "type", "state", "since")
    table = TerminalTable((*words, "used", "limit", "free", "of medium"), words=words)
    for storage in storages:
        limit = format_size(storage.capacity_bytes) if storage.capacity_bytes else Text("none", _QUIET)
        state, since, free, whole = _status(storage.status)
        used = format_size(storage.used_bytes)
        table.add_row(storage.name, storage.kind, state, since, used, limit, free, whole)
    console.print(table)
    troubled = (storage.status for storage in storages if storage.status is not None and storage.status.reason)
    print_sentences(map(_problem, troubled), console)


def _status(status: StorageStatus | None) -> tuple[str | Text, ...]:
    if status is None:
        return ("", "", "", "")
    since = format_time(status.since_ms) if status.since_ms else ""
    sizes = (format_size(size) if size >= 0 else "" for size in (status.medium_free_bytes, status.medium_bytes))
    return (_state(status), since, *sizes)


def _state(status: StorageStatus) -> Text:
    state = Text.assemble((status.health.label, _HEALTH_STYLES[status.health]))
    if not status.is_enabled:
        state.append(", disabled", _WARN)
    elif status.is_draining:
        state.append(", draining", _WARN)
    if status.is_full:
        state.append(", full", _WARN)
    return state


def _problem(status: StorageStatus) -> Text:
    sentence = f"storage {status.storage_unique_name} is {status.health.label}: {status.reason}"
    return Text(sentence, _HEALTH_STYLES[status.health])


def print_drains(drains: Sequence[DrainStatus], console: Console) -> None:
    """Print drains, and the reasons of those that are stuck."""
    words = ("storage", "task", "state", "since")
    table = TerminalTable((*words, "left"), words=words)
    for drain in drains:
        task = "forget, removed" if drain.is_removal else "drain"
        since, left = format_time(drain.started_ms), format_size(drain.left_bytes)
        table.add_row(drain.storage_unique_name, task, drain.state.label, since, left)
    console.print(table)
    stuck = (drain for drain in drains if drain.reason)
    print_sentences((Text(f"storage {drain.storage_unique_name}: {drain.reason}", _WARN) for drain in stuck), console)


def print_group_stores(
    stores: Sequence[BlockStoreStatus], groups: Sequence[GroupStoreStatus], console: Console
) -> None:
    """Print metadata stores, the groups whose blocks they keep, moves, and the reasons of what does not go on."""
    table = TerminalTable(("store", "usable", "instances"), words=("store", "usable"))
    for store in stores:
        table.add_row(store.name, "yes" if store.is_usable else "no", f"{store.instance_count:,}")
    console.print(table)
    table = TerminalTable(("group", "store", "instances", "there", "fixed elsewhere"), words=("group", "store"))
    for group in groups:
        counts = group.instance_count, group.placed_instance_count, group.fixed_instance_count
        table.add_row(group.name, group.store, *(f"{count:,}" for count in counts))
    console.print("", table, sep="\n")
    moves = [move for group in groups for move in group.moves]
    if moves:
        words = ("instance", "from", "to", "state")
        table = TerminalTable((*words, "copied blocks"), words=words)
        for move in moves:
            copied = "" if move.copied_blocks == UNKNOWN else f"{move.copied_blocks:,}"
            table.add_row(move.instance_id, move.source, move.target, move.state.label, copied)
        console.print("", table, sep="\n")
    print_sentences(_store_sentences(stores, groups), console)


def _store_sentences(stores: Sequence[BlockStoreStatus], groups: Sequence[GroupStoreStatus]) -> Iterator[Text]:
    for store in stores:
        if store.reason:
            yield Text(f"store {store.name}: {store.reason}", _WARN)
    for group in groups:
        if group.fixed_instance_count:
            text = f"group {group.name}: {group.fixed_instance_count} instances keep a value per block and stay where "
            yield Text(text + "they are: register them again", _WARN)
        reasons = dict.fromkeys(move.reason for move in group.moves if move.reason)
        yield from (Text(f"group {group.name}: {reason}", _WARN) for reason in reasons)


def print_sentences(sentences: Iterable[Text], console: Console) -> None:
    """Print sentences below a table."""
    for number, sentence in enumerate(sentences):
        if not number:
            console.print()  # without it the first would look like a row
        console.print(sentence)


def format_time(unix_ms: int) -> str:
    """Return a time as people write it, in UTC: `2026-11-21 08:00:00Z`."""
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def print_usage(report: UsageReport, console: Console) -> None:
    """Print usage and limits."""
    console.print(_groups(report))
    if any(group.instances for group in report.groups):
        console.print("", _instances(report), sep="\n")
    if report.storages:
        console.print("", _storages(report), sep="\n")
    if report.global_quotas:
        console.print("", _quotas(report), sep="\n")
    print_sentences(_sentences(report), console)


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
                name.append(f", {format_size(storage.guaranteed_bytes)} guaranteed", _QUIET)
            table.add_row("", name, format_size(storage.used_bytes))
        if group.pinned_bytes or group.pin_budget_bytes:
            share = _percent(group.pinned_bytes, group.pin_budget_bytes)
            pinned, budget = format_size(group.pinned_bytes), format_size(group.pin_budget_bytes)
            table.add_row("", "pinned", pinned, "", budget, "", "", share)
    return table


def _instances(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("instance", "group", "used", "blocks", "at most", "policy"), words=("group", "policy"))
    for group in report.groups:
        for instance in group.instances:
            most = f"{instance.max_key_count:,}" if instance.max_key_count >= 0 else ""
            used, blocks = format_size(instance.used_bytes), f"{instance.key_count:,}"
            table.add_row(instance.instance_id, group.name, used, blocks, most, instance.policy)
    return table


def _storages(report: UsageReport) -> TerminalTable:
    table = TerminalTable(("storage", *_LIMITS, "guaranteed", "quotas", "to delete", "failures"))
    for storage in report.storages:
        failures = f"{storage.deletion_failures:,}" if storage.deletion_failures else ""
        table.add_row(
            storage.storage_unique_name,
            *_limits(storage.usage),
            format_size(storage.guaranteed_bytes) if storage.guaranteed_bytes else "",
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
    yield format_size(usage.used_bytes)
    yield format_size(usage.deleting_bytes) if usage.deleting_bytes else ""
    for limit in (usage.capacity_bytes, usage.high_mark_bytes, usage.low_mark_bytes):
        yield format_size(limit) if limit >= 0 else Text("none", _QUIET)
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


def problems(report: UsageReport) -> Iterator[tuple[bool, str]]:
    """Yield a sentence for each limit that is reached or watermark that is exceeded, and whether it blocks writes."""
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
        yield Text(f"group {group.name} was refused space {times} since the manager started", _WARN)


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
