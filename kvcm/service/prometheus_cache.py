"""Counts what is asked of the cache: lookups by group, write sessions by how they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvcm.cache.match import Match, MatchMode, MatchQuery
from kvcm.cache.observer import WriteEnd
from kvcm.model.instances import Instance
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics_values import AGES, KEYS, BoundedNames, Histogram, Reading

__all__ = ["CacheMetrics"]

_SESSION_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class _Count:
    """Keys, and the tokens in them."""

    __slots__ = ("keys", "tokens")

    def __init__(self) -> None:
        self.keys = self.tokens = 0

    def add(self, keys: int, block_size: int) -> None:
        self.keys += keys
        self.tokens += keys * max(0, block_size)


class _Lookups:
    """What is counted of one group."""

    __slots__ = ("error", "filtered", "hit", "miss", "prefix", "revisits")

    def __init__(self) -> None:
        self.hit, self.miss, self.filtered, self.error = _Count(), _Count(), _Count(), _Count()
        self.prefix = Histogram(KEYS)
        self.revisits = Histogram(AGES)


class CacheMetrics:
    """A `CacheObserver` that counts; a microsecond or two per lookup.

    Args:
        groups: bounds the names of groups that become labels.
        on_miss: told of the instance and the key at which a prefix match ended.
    """

    def __init__(
        self, groups: BoundedNames, on_miss: Callable[[str, int], None] = lambda _instance_id, _key: None
    ) -> None:
        self._on_miss = on_miss
        self._names = groups
        self._groups: dict[str, _Lookups] = {}
        self._modes = [0] * (max(MatchMode) + 1)  # by number: an enum takes long to hash
        self._ends = dict.fromkeys(WriteEnd, 0)
        self._session_seconds = Histogram(_SESSION_SECONDS)
        self._masked_keys = 0

    def declare(self, group_name: str) -> None:
        """Make the series of a group exist before its first lookup."""
        self._of(group_name)

    def _of(self, group_name: str) -> _Lookups:
        lookups = self._groups.get(group_name)
        if lookups is None:
            name = self._names.of(group_name)
            lookups = self._groups.get(name)
            if lookups is None:
                lookups = self._groups[name] = _Lookups()
        return lookups

    def looked_up(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """Count a lookup."""
        lookups = self._of(instance.instance_group_name)
        asked, hit, filtered = len(query.keys), len(found.keys), _masked(query)
        self._modes[query.mode] += 1
        lookups.hit.add(hit, instance.block_size)
        lookups.miss.add(asked - filtered - hit, instance.block_size)
        if filtered:
            lookups.filtered.add(filtered, instance.block_size)
        if query.mode is MatchMode.PREFIX_MATCH or query.mode is MatchMode.PREFIX_MATCH_WITH_MAMBA:
            lookups.prefix.observe(hit)
            if filtered + hit < asked and query.mask.flags is None:
                self._on_miss(instance.instance_id, query.keys[filtered + hit])

    def lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        """Count a lookup that could not be answered."""
        lookups = self._of(instance.instance_group_name)
        self._modes[query.mode] += 1
        lookups.error.add(len(query.keys), instance.block_size)

    def revisited(self, instance: Instance, seconds: float) -> None:
        """Count a read of a block that was read before."""
        self._of(instance.instance_group_name).revisits.observe(seconds)

    def write_started(self, masked_keys: int) -> None:
        """Count keys that need not be written."""
        self._masked_keys += masked_keys

    def write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        """Count a session."""
        self._ends[end] += 1
        if seconds is not None:
            self._session_seconds.observe(seconds)

    def keys(self) -> Mapping[str, tuple[int, int]]:
        """Return the block keys of lookups by group: those handed out, and those that were not there."""
        return {name: (each.hit.keys, each.miss.keys) for name, each in self._groups.items()}

    def readings(self) -> Iterator[Reading]:
        """Yield what was counted."""
        for name, each in list(self._groups.items()):
            results = {"hit": each.hit, "miss": each.miss, "filtered": each.filtered, "error": each.error}
            for result, count in results.items():
                yield Reading(catalog.LOOKUP_KEYS, count.keys, (name, result))
                yield Reading(catalog.LOOKUP_TOKENS, count.tokens, (name, result))
            yield Reading(catalog.LOOKUP_PREFIX_BLOCKS, each.prefix.read(), (name,))
            yield Reading(catalog.REVISIT_INTERVAL, each.revisits.read(), (name,))
        for mode in MatchMode:
            yield Reading(catalog.LOOKUP_MODE, self._modes[mode], (mode.name.lower(),))
        for end, sessions in self._ends.items():
            yield Reading(catalog.WRITE_SESSIONS, sessions, (end.value,))
        yield Reading(catalog.WRITE_SESSION_SECONDS, self._session_seconds.read())
        yield Reading(catalog.WRITE_MASKED_KEYS, self._masked_keys)


def _masked(query: MatchQuery) -> int:
    mask, count = query.mask, len(query.keys)
    if mask.offset is not None:
        return min(mask.offset, count) if mask.offset >= 0 else count
    return sum(mask.flags[:count]) if mask.flags is not None else 0
