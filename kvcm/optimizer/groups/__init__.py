"""Replays a trace through instances that share quotas, whatever their requests ask and their blocks consist of."""

from __future__ import annotations

from kvcm.optimizer.groups.engine import replay_groups
from kvcm.optimizer.groups.later_writes import with_later_writes
from kvcm.optimizer.groups.layout import (
    GroupLayout,
    InstanceLayout,
    QuotaGroup,
    ReplayMode,
    SpecKind,
    SpecLayout,
    one_group,
)
from kvcm.optimizer.groups.results import GroupReplay, InstanceReplay
from kvcm.optimizer.groups.spacing import Spacing, worth_of_spacing

__all__ = [
    "GroupLayout",
    "GroupReplay",
    "InstanceLayout",
    "InstanceReplay",
    "QuotaGroup",
    "ReplayMode",
    "Spacing",
    "SpecKind",
    "SpecLayout",
    "one_group",
    "replay_groups",
    "with_later_writes",
    "worth_of_spacing",
]
