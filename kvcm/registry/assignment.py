"""Which manager an instance prefers, so that all of its engines read through one search cache.

Every manager serves every call; the assignment is advice in answers. Each manager computes it by itself, from the
managers that serve and the instances that are registered, and all arrive at the same.

Weights are those of rendezvous hashing: each pair of an instance and a manager has one, and an instance prefers the
manager with the highest. A manager that comes or goes moves only its own share. But few instances fall unevenly: of 20
over 4 managers one would get 7 on average instead of 5, and up to 11. Pairs are therefore chosen in the order of their
weights, and a manager gets at most 1.1 times its share. A lower limit moves more instances when one is registered, a
higher one lets loads differ; both were measured, see `tests/property/test_assignment.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from kvcm.model.nodes import Endpoint

__all__ = ["Assignment", "assign", "rank"]

_MOST_SHARE = 1.1  # of instances that one manager gets, beside the mean
_MOST_PAIRS = 4096  # sorted within milliseconds on the event loop; more instances fall evenly by themselves


@lru_cache(maxsize=2 * _MOST_PAIRS)
def _weight(instance_id: str, node_id: str) -> int:
    # The separator occurs in no id: (ab, c) and (a, bc) differ.
    return xxh3_64_intdigest(f"{node_id}\0{instance_id}".encode())


def rank(instance_id: str, nodes: Iterable[str]) -> list[str]:
    """Return the nodes by the weight that they have for an instance, highest first."""
    return sorted(nodes, key=lambda node_id: (_weight(instance_id, node_id), node_id), reverse=True)


def assign(instances: Collection[str], nodes: Collection[str]) -> dict[str, str]:
    """Return a node for each instance. No node gets more than 1.1 times the mean, rounded up."""
    if not nodes:
        return {}
    if len(instances) * len(nodes) > _MOST_PAIRS:
        return {instance_id: rank(instance_id, nodes)[0] for instance_id in instances}
    most = math.ceil(_MOST_SHARE * len(instances) / len(nodes))
    pairs = sorted(((_weight(each, node_id), each, node_id) for each in instances for node_id in nodes), reverse=True)
    assigned: dict[str, str] = {}
    loads: Counter[str] = Counter()
    for _, instance_id, node_id in pairs:
        if instance_id not in assigned and loads[node_id] < most:
            assigned[instance_id] = node_id
            loads[node_id] += 1
    return assigned


class Assignment:
    """The assignment as this manager sees it: nothing before `set_managers`.

    Args:
        node_id: id of this manager.
        instances: registered ones by id, as they change.

    Attributes:
        node_id: id of this manager.
    """

    def __init__(self, node_id: str, instances: Mapping[str, object]) -> None:
        self.node_id = node_id
        self._instances = instances
        self._managers: dict[str, Endpoint] = {}
        self._assigned: dict[str, str] = {}

    def set_managers(self, managers: Iterable[Endpoint]) -> None:
        """Assign the instances that are registered now to the managers that serve now."""
        self._managers = {each.node_id: each for each in managers}
        self._reassign()

    def _reassign(self) -> None:
        self._assigned = assign(list(self._instances), self._managers) if self._are_few() else {}

    def managers_of(self, instance_id: str) -> Sequence[Endpoint]:
        """Return the managers that serve, beginning with the one that the instance is assigned to. None while this
        manager is the only one: clients keep an address of a load balancer, or of a forwarded port."""
        if self._managers.keys() <= {self.node_id}:
            return ()
        first = self._first(instance_id)
        ranked = rank(instance_id, self._managers)
        return [self._managers[each] for each in sorted(ranked, key=lambda node_id: node_id != first)]

    def other_manager(self, instance_id: str) -> Endpoint | None:
        """Return the manager that an instance is assigned to, None if it is this one or not known.

        Each lookup calls this.
        """
        first = self._first(instance_id)
        return None if first is None or first == self.node_id else self._managers[first]

    def counts(self) -> Mapping[str, int] | None:
        """Return how many instances each manager is assigned, by node id; None if they are too many to count."""
        if not self._are_few():
            return None
        self._follow_registry()
        return Counter(self._assigned.values())

    def _are_few(self) -> bool:
        return len(self._instances) * len(self._managers) <= _MOST_PAIRS

    def _first(self, instance_id: str) -> str | None:
        if not self._managers:
            return None
        self._follow_registry()
        return self._assigned.get(instance_id) or rank(instance_id, self._managers)[0]  # not registered, or one of many

    def _follow_registry(self) -> None:
        """Assign again if instances were registered or removed. As many of both are noticed by `set_managers`."""
        if len(self._assigned) != len(self._instances) and self._managers and self._are_few():
            self._reassign()
