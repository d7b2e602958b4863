"""What the reclaimer tells of its work: every compare-and-set, and sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcm.index.meta_index import Change
from kvcm.model.instances import Instance
from kvcm.model.locations import Location
from kvcm.reclaim.marking import went
from kvcm.reclaim.needs import Need
from kvcm.telemetry.metrics_values import AGES, Histogram

__all__ = ["Evicted", "ReclaimStats"]


@dataclass(frozen=True, slots=True)
class Evicted:
    """What one compare-and-set marked in one instance, for one reason.

    Attributes:
        instance: the instance.
        need: what it was for.
        policy: that chose it.
        changes: of its index.
        delay_seconds: until the bytes may go.
    """

    instance: Instance
    need: Need
    policy: str
    changes: Sequence[Change]
    delay_seconds: float

    @property
    def locations(self) -> list[Location]:
        """What was marked."""
        return [location for change in self.changes for location in went(change.old, change.new)]


@dataclass(slots=True)
class ReclaimStats:
    """Counts since the manager started; keys are (group, policy, reason).

    Attributes:
        unmet: what the last look could not bring below its mark, by reason: all that is left is pinned or in use.
        ages: seconds since some of the evicted blocks were read.
        rounds: seconds that looks took.
    """

    evicted_keys: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    evicted_bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    submitted_blocks: int = 0
    submitted_locations: int = 0
    looks: int = 0
    unmet: Counter[str] = field(default_factory=Counter)
    ages: Histogram = field(default_factory=lambda: Histogram(AGES))
    rounds: Histogram = field(default_factory=Histogram)

    def note(self, evicted: Evicted) -> None:
        """Count what was marked."""
        label = (evicted.instance.instance_group_name, evicted.policy, evicted.need.reason.value)
        locations = evicted.locations
        self.evicted_keys[label] += len(evicted.changes)
        self.evicted_bytes[label] += sum(location.size_bytes for location in locations)
        self.submitted_blocks += len(evicted.changes)
        self.submitted_locations += len(locations)
