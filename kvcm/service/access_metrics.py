"""What became of credentials and permissions, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.service.access import OUTCOMES, Access, KeyedAccess
from kvcm.service.policies import ACTIONS
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_values import Reading

__all__ = ["AccessMetrics"]


class AccessMetrics:
    """Counters of one manager; all zero while nobody is asked who he is.

    Args:
        access: counts.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def readings(self) -> Iterator[Reading]:
        """Yield what was counted."""
        keyed = self._access if isinstance(self._access, KeyedAccess) else None
        for outcome in OUTCOMES:
            yield Reading(catalog.AUTH, keyed.outcomes[outcome] if keyed else 0, (outcome,))
        for action in ACTIONS:
            yield Reading(catalog.AUTHZ_DENIED, keyed.denied[action] if keyed else 0, (action,))
