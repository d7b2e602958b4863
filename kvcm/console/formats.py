"""Numbers, sizes and times as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from kvcm.model.storages import StorageType
from kvcm.model.units import format_size

__all__ = [
    "ACCOUNT_ROLES",
    "KEY_ROLES",
    "VERBS",
    "ago",
    "capitalised",
    "count",
    "duration",
    "listed",
    "moment",
    "percent",
    "rate",
    "shown_role",
    "size",
    "storage_kind",
    "words",
]

# Labels of roles and verbs.

KEY_ROLES: Final[Mapping[str, str]] = {
    "ROLE_ENGINE": "Engine: the calls of engines, in its groups",
    "ROLE_VIEWER": "Viewer: looks, and changes nothing",
    "ROLE_OPERATOR": "Operator: also switches and drains storages, removes and pins blocks",
    "ROLE_ADMIN": "Administrator: also changes storages, groups, accounts and keys",
}
"""Of keys, with a description."""
ACCOUNT_ROLES: Final[Mapping[str, str]] = {
    "ROLE_USER": KEY_ROLES["ROLE_VIEWER"],
    "ROLE_OPERATOR": KEY_ROLES["ROLE_OPERATOR"],
    "ROLE_ADMIN": KEY_ROLES["ROLE_ADMIN"],
}
"""Of accounts."""
VERBS: Final[Mapping[str, str]] = {
    "MATCH": "Match: read what is there",
    "WRITE": "Write blocks, and register instances",
    "REMOVE": "Remove blocks",
    "PIN": "Pin blocks",
    "REPORT": "Report corrupt blocks",
}
"""Verbs of engines, with a description."""


def shown_role(role: str) -> str:
    """Return a role in one word."""
    return {**KEY_ROLES, **ACCOUNT_ROLES}.get(role, role).partition(":")[0].lower()


NOTHING = "–"


def size(value: float | None) -> str:
    """Return bytes as `1.5 GiB`; a negative value stands for no limit."""
    if value is None:
        return NOTHING
    return "no limit" if value < 0 else format_size(round(value))


def count(value: float | None) -> str:
    """Return a number of things as `12,031`."""
    return NOTHING if value is None else f"{round(value):,}"


def percent(ratio: float | None) -> str:
    """Return a ratio as `98.2 %`; 100 % only if it is exactly 1."""
    if ratio is None:
        return NOTHING
    if 0.9995 <= ratio < 1:
        return "99.9 %"
    return f"{100 * ratio:.1f} %"


def rate(value: float | None) -> str:
    """Return something per second as `1,250/s`."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}/s" if value >= 10 or value == 0 else f"{value:.2g}/s"


def duration(seconds: float | None) -> str:
    """Return a time as `3.2 ms`, `12 s` or `2 h 5 min`."""
    if seconds is None:
        return NOTHING
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{minutes:.0f} min"
    if hours < 48:
        return f"{int(hours)} h {int(minutes) % 60} min"
    return f"{days:.0f} days"


def ago(at_ms: float | None, now_ms: float) -> str:
    """Return when something was or will be, as `5 min ago` or `in 12 s`."""
    if not at_ms:
        return NOTHING
    seconds = (now_ms - at_ms) / 1000
    if abs(seconds) < 1:
        return "now"
    shown = duration(max(1, round(abs(seconds))))
    return f"{shown} ago" if seconds > 0 else f"in {shown}"


def moment(at_ms: float | None) -> str:
    """Return a time of the calendar, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at_ms else NOTHING


def words(name: str) -> str:
    """Return the name of a value of an enum as words: `ROLE_VIEWER` is `role viewer`."""
    return name.replace("_", " ").lower()


def capitalised(clause: str) -> str:
    """Return a clause with a capital letter, for the beginning of a sentence."""
    return f"{clause[:1].upper()}{clause[1:]}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def storage_kind(storage_type: str) -> str:
    """Return the name of a storage type for people: `ST_NFS` is `file`."""
    return StorageType[storage_type].kind if storage_type in StorageType.__members__ else words(storage_type)
