"""Who runs the background duties. A manager with a store of its own is alone, so the lease is never contended.

Leading concerns duties only: every manager serves every call unless `kvcm.service.require_leader` is set.
"""

from __future__ import annotations

from kvcm.model.clock import Clock
from kvcm.model.errors import NotLeaderError

__all__ = ["Leadership"]


class Leadership:
    """Lease of a single manager, moved on by `tick`.

    Args:
        node_id: id of this manager.
        clock: time source.
        lease_seconds: how long a lease lasts after each tick.
    """

    def __init__(self, node_id: str, clock: Clock, lease_seconds: float) -> None:
        self.node_id = node_id
        self.campaign_delay_ms = 0
        self.last_tick = 0.0
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._expires = 0.0
        self._stay_out_until = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether this manager holds the lease now."""
        return self._clock.now() < self._expires

    @property
    def expires(self) -> float | None:
        """Unix seconds when the lease ends unless renewed, None when it is not held."""
        return self._expires if self.is_leader else None

    @property
    def leader_node_id(self) -> str:
        """Id of the holder, "" when nobody holds the lease."""
        return self.node_id if self.is_leader else ""

    def tick(self) -> None:
        """Renew the lease, or take it when it is free and the campaign delay has passed."""
        now = self.last_tick = self._clock.now()
        if self.is_leader or now >= self._stay_out_until:
            self._expires = now + self._lease_seconds

    def demote(self) -> None:
        """Give the lease up; it is taken again at the first tick after the campaign delay.

        Raises:
            NotLeaderError: this manager does not hold it.
        """
        if not self.is_leader:
            raise NotLeaderError(f"node {self.node_id} is not the leader")
        self._expires = 0.0
        self._stay_out_until = self._clock.now() + self.campaign_delay_ms / 1000
