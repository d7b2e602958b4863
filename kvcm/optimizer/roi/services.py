"""Several services and one store: which of them the next GiB is worth most to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi.formulas import GIB, Floats
from kvcm.optimizer.roi.returns import Returns

__all__ = ["Rank", "Service", "check_names", "rank_services"]


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A workload with a cache of its own.

    Attributes:
        name: no two services have one.
        returns: what its capacities return.
    """

    name: str
    returns: Returns

    @property
    def stored_bytes(self) -> Floats:
        """Return [M] bytes of each capacity."""
        return self.returns.capacity_blocks.astype(np.float64) * self.returns.block_bytes


@dataclass(frozen=True, slots=True)
class Rank:
    """What a service would do with capacity.

    Attributes:
        name: of the service.
        per_gib_hour: money that it saves per hour and GiB that it gets, when it gets `next_bytes`; storage is not
            paid of it. 0 where no capacity saves more.
        next_bytes: of the step that saves most per GiB.
        best_bytes: of the capacity that is best for it alone.
        best_net_per_hour: money that this one returns.
    """

    name: str
    per_gib_hour: float
    next_bytes: float
    best_bytes: float
    best_net_per_hour: float


def rank_services(services: Sequence[Service]) -> tuple[Rank, ...]:
    """Return the services by what their next GiB saves, the most first.

    Raises:
        OptionError: two services have one name.
    """
    check_names(services)
    ranks = [_rank(service) for service in services]
    return tuple(sorted(ranks, key=lambda each: -each.per_gib_hour))


def check_names(services: Sequence[Service]) -> None:
    """Check that services have names of their own.

    Raises:
        OptionError: two have one name.
    """
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise OptionError(f"services: {min(twice)!r} comes twice; allowed: names of their own")


def _rank(service: Service) -> Rank:
    found, stored = service.returns, service.stored_bytes
    more, gained = stored[1:], found.saved_per_hour[1:] - found.saved_per_hour[0]
    per_byte = np.where(more > 0, gained / np.where(more > 0, more, 1.0), 0.0)
    step = int(per_byte.argmax()) if len(per_byte) else 0
    saves = len(per_byte) > 0 and per_byte[step] > 0
    return Rank(
        name=service.name,
        per_gib_hour=float(per_byte[step]) * GIB if saves else 0.0,
        next_bytes=float(more[step]) if saves else 0.0,
        best_bytes=float(stored[found.best]),
        best_net_per_hour=float(found.net_per_hour[found.best]),
    )
