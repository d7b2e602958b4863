"""What alerts are, and what they are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvcm.model.groups import InstanceGroup
from kvcm.model.storages import StorageType
from kvcm.reclaim.workers import Backlog
from kvcm.service.usage_values import DrainStatus, StorageStatus, UsageReport

__all__ = ["LATELY_SECONDS", "Alert", "Facts", "Severity", "SubjectKind"]

LATELY_SECONDS = 300.0
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
        summary: what is wrong.
        reason: why.
        advice: what to do.
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
        """What stays the same while it lasts."""
        return self.name, self.subject_kind, self.subject_name


@dataclass(frozen=True, slots=True)
class Facts:
    """What a manager knows at one moment.

    Attributes:
        now: unix seconds.
        usage: of everything that whoever asks may see.
        groups: as configured.
        types: of the configured storages, by name.
        storages: how each is for this manager.
        backlogs: what waits for deletion, by storage.
        deleting: bytes that wait for deletion, by group and storage.
        writing: bytes of open write sessions, by group.
        refused: writes refused lately for want of room, by group.
        mismatches: wrong checksums reported lately, by group and storage.
        drains: and removals.
        node_id: of this manager.
        leader: node id of the one that leads, "" for none.
        leaders: managers that say that they lead.
        overdue_sessions: write sessions that nobody ended in time.
        certificates: when they end, unix seconds, by what they are for.
        lag_seconds: by which the event loop is late all the time.
        store_trouble: why the metadata store does not answer, "" while it does.
        dropped_accesses: reads that lately could not be written down.
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
    node_id: str = ""
    leader: str = ""
    leaders: Sequence[str] = ()
    overdue_sessions: int = 0
    certificates: Mapping[str, float] = field(default_factory=dict)
    lag_seconds: float = 0.0
    store_trouble: str = ""
    dropped_accesses: int = 0
