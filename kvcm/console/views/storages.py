"""Storages as pages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcm.registry.secrets import redacted_text

__all__ = ["KINDS", "Badge", "GroupShare", "StorageView", "kind_of", "shares_of", "storage_views"]

Document = Mapping[str, Any]
Badge = tuple[str, str]
"""Text and kind."""

KINDS: Final[Mapping[str, str]] = {
    "nfs": "Shared directory",
    "threefs": "3FS",
    "vcnsthreefs": "3FS behind VCNS",
    "mooncake": "Mooncake store",
    "tair_mem_pool": "Memory pool",
    "dummy": "Dummy, which keeps no bytes",
}
"""What people call the kinds of storages."""

_HEALTH: Final[Mapping[str, Badge]] = {
    "SH_UP": ("up", "good"),
    "SH_DEGRADED": ("degraded", "warn"),
    "SH_DOWN": ("down", "bad"),
    "SH_UNSPECIFIED": ("not probed yet", "plain"),
}
_NO_LIMIT: Final = {"used_bytes": 0, "deleting_bytes": 0, "capacity_bytes": -1, "high_mark_bytes": -1}
_URGENCY: Final = {"bad": 0, "warn": 1, "busy": 2}


@dataclass(frozen=True, slots=True)
class StorageView:
    """A storage.

    Attributes:
        name: unique.
        kind: what people call its kind.
        badges: how it is, the worst first.
        reason: what is wrong with it; "" while nothing is.
        status: as the resource tells it; None where that is not known.
        usage: what is used and allowed.
        deletions: locations that wait for their deletion.
        failures: attempts to delete that failed since the manager started.
        oversubscription: sum of quotas as a ratio of its capacity.
        drain: the task that empties it, None for none.
        settings: how it is reached: names and values.
        document: the resource.
    """

    name: str
    kind: str
    badges: Sequence[Badge]
    reason: str
    status: Document | None
    usage: Document
    deletions: int
    failures: int
    oversubscription: float | None
    drain: Document | None
    settings: Sequence[tuple[str, Any]]
    document: Document

    @property
    def is_enabled(self) -> bool:
        """Whether it was not disabled."""
        return bool(self.document["is_available"])

    @property
    def urgency(self) -> int:
        """Smaller means look here first."""
        return min(_URGENCY.get(kind, 9) for _, kind in self.badges)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """What a group has on a storage.

    Attributes:
        group: its name.
        used_bytes: in use.
        guaranteed_bytes: that no other group may take.
    """

    group: str
    used_bytes: int
    guaranteed_bytes: int


def storage_views(storages: Sequence[Document], usage: Document, tasks: Sequence[Document]) -> list[StorageView]:
    """Return storages, those first that somebody should look at.

    Args:
        storages: with their status.
        usage: of the deployment.
        tasks: that run.
    """
    usages = {each["storage_unique_name"]: each for each in usage["storages"]}
    drains = {task["storage"]: task for task in tasks if task["kind"] == "drain"}
    found = [_view(each, usages, drains.get(each["global_unique_name"])) for each in storages]
    return sorted(found, key=lambda view: (view.urgency, view.name))


def shares_of(storage: str, usage: Document) -> list[GroupShare]:
    """Return what groups have on a storage, the largest first."""
    found = [
        GroupShare(group["name"], share["used_bytes"], share["guaranteed_bytes"])
        for group in usage["groups"]
        for share in group["storages"]
        if share["storage_unique_name"] == storage
    ]
    return sorted(found, key=lambda share: (-share.used_bytes, share.group))


def kind_of(storage: Document) -> str:
    """Return the field that says how a storage is reached, as in `nfs`; "" for none that is known."""
    return next((kind for kind in KINDS if storage.get(kind) is not None), "")


def _view(storage: Document, usages: Mapping[str, Document], drain: Document | None) -> StorageView:
    name, status, kind = storage["global_unique_name"], storage.get("status"), kind_of(storage)
    usage = usages.get(name, {})
    health, reason = _health(status), status["reason"] if status else ""
    return StorageView(
        name=name,
        kind=KINDS.get(kind, kind),
        badges=[*([] if storage["is_available"] else [("disabled", "warn")]), *_drained(drain), health],
        reason=reason,
        status=status,
        usage=usage.get("usage", _NO_LIMIT),
        deletions=usage.get("deletion_backlog", 0),
        failures=usage.get("deletion_failures", 0),
        oversubscription=usage.get("oversubscription"),
        drain=drain,
        settings=[(field, _shown(value)) for field, value in (storage.get(kind) or {}).items() if value],
        document=storage,
    )


def _shown(value: Any) -> Any:
    """Return a setting without secrets: administrators may have them, but others look over their shoulders."""
    return redacted_text(value) if isinstance(value, str) else value


def _health(status: Document | None) -> Badge:
    return _HEALTH.get(status["health"] if status else "", ("not known", "plain"))


def _drained(drain: Document | None) -> list[Badge]:
    if drain is None:
        return []
    return [("drained", "good") if drain["state"] == "done" else ("draining", "busy")]
