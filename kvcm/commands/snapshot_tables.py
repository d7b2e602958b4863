"""What a load of a configuration changes, as a table: a row per field that gets another value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from kvcm.terminal_table import TerminalTable

__all__ = ["Change", "print_changes", "shown_counts"]

_STYLES = {"add": "green", "change": "yellow", "remove": "red", "keep": "dim"}
_MOST_CHARACTERS = 60
_ABSENT = object()


class Change(NamedTuple):
    """One entry of a configuration that is loaded.

    Attributes:
        kind: storage, group, quota, instance or account.
        name: of the entry.
        action: add, change, remove or keep.
        old: its fields so far, None for none.
        new: its fields afterwards, None for none.
    """

    kind: str
    name: str
    action: str
    old: Any
    new: Any

    @classmethod
    def of(cls, message: Any) -> Change:
        """Read a ConfigChange."""
        old, new = (json.loads(text) if text else None for text in (message.old_value, message.new_value))
        return cls(message.kind, message.name, message.action, old, new)


def print_changes(changes: Sequence[Change], console: Console) -> None:
    """Print what is added, changed, removed, and what stays although it is not in the snapshot."""
    columns = ("action", "kind", "name", "field", "now", "then")
    table = TerminalTable(columns, words=columns)
    for change in changes:
        for field, old, new in _rows(change):
            cells = (change.action, change.kind, change.name, field, old, new)
            table.add_row(*cells, style=_STYLES.get(change.action, ""))
    console.print(table)


def shown_counts(changes: Iterable[Change]) -> str:
    """Return how many entries are added, changed, removed and kept."""
    counts = Counter(change.action for change in changes)
    return ", ".join(f"{counts[action]} to {action}" for action in _STYLES if counts[action]) or "no difference"


def _rows(change: Change) -> Iterator[tuple[str, str, str]]:
    if change.action != "change":
        yield "", "", "not in the snapshot, stays" if change.action == "keep" else ""
        return
    differences = list(_differences("", change.old, change.new))
    if not differences:
        yield "a secret", "", ""
    for field, old, new in differences:
        yield field, _shown(old), _shown(new)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            below = f"{path}.{name}" if path else name
            yield from _differences(below, old.get(name, _ABSENT), new.get(name, _ABSENT))
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    is_plain = isinstance(value, str) and value.isprintable()  # others might drive the terminal
    text = value if is_plain else json.dumps(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
