"""The indexes that this manager has open: one per registered instance, and per instance that is being removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcm.cache.instance_cache import IndexInCustody, InstanceCache
from kvcm.cache.limits import MOST_KEYS
from kvcm.cache.pages import PAGE_KEYS
from kvcm.cache.usage import Ledger
from kvcm.index.answers import StorageView
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.index.search_cache import CacheBudget
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.instances import Instance, Placement
from kvcm.registry.registry import Registry
from kvcm.telemetry.metrics_values import Histogram

__all__ = ["OpenCaches"]

_BATCH_KEYS = 256


class OpenCaches:
    """Opens indexes when they are first asked for.

    Args:
        registry: instances and groups.
        storages: which storages can be read.
        new_backend: makes or finds the backend of an instance's index.
        usage: told of what the indexes use.
        budget: bytes of the search caches.
    """

    def __init__(
        self,
        registry: Registry,
        storages: StorageView,
        new_backend: Callable[[Placement], IndexBackend],
        usage: Ledger,
        budget: CacheBudget,
    ) -> None:
        self._registry = registry
        self._storages = storages
        self._new_backend = new_backend
        self._usage = usage
        self._budget = budget
        self.lock_waits = Histogram()  # of all indexes
        self._caches: dict[int, InstanceCache] = {}
        self._current: Sequence[InstanceCache] = ()
        self._custodies: Sequence[IndexInCustody] = ()
        self._current_generation = -1  # of the registry

    def of(self, instance_id: str) -> InstanceCache:
        """Return what is kept for an instance.

        Raises:
            UnknownInstanceError: it is not registered.
        """
        placement = self._registry.instances.placement(instance_id)
        cache = self._caches.get(placement.uid)
        return cache if cache is not None else self._open(self._registry.instances.get(instance_id), placement)

    def of_group(self, group_name: str) -> list[InstanceCache]:
        """Return what is open of a group."""
        return [cache for cache in self._caches.values() if cache.instance.instance_group_name == group_name]

    def key_counts(self, group_name: str) -> list[int]:
        """Return the blocks of each of these, as last heard."""
        return [cache.index.key_count for cache in self.of_group(group_name)]

    def by_uid(self, uid: int) -> InstanceCache | None:
        """Return what is kept for a registration, None when it is gone for good."""
        return self._caches.get(uid) or next((cache for cache in self.all() if cache.placement.uid == uid), None)

    def of_removal(self, instance: Instance, placement: Placement) -> InstanceCache:
        """Return what is kept for an instance that is being removed."""
        cache = self._caches.get(placement.uid)
        return cache if cache is not None else self._open(instance, placement)

    def all(self) -> Sequence[InstanceCache]:
        """Return everything, opening what is not open yet; what is neither registered nor being removed is closed."""
        generation = self._registry.generation
        if self._current_generation != generation:
            instances = self._registry.instances
            current = [self.of(instance.instance_id) for instance in instances.all()]
            current += [self.of_removal(removal.instance, removal.placement) for removal in instances.removals()]
            self._caches = {cache.placement.uid: cache for cache in current}
            self._current, self._current_generation = tuple(current), generation
            self._custodies = tuple(cache.custody for cache in current)
        return self._current

    def custodies(self) -> Sequence[IndexInCustody]:
        """Return the same as the background duties see it, which ask many times a second."""
        self.all()
        return self._custodies

    def invalidate(self, changed: Iterable[tuple[int, int]]) -> None:
        """Another manager changed blocks: (uid, key) each."""
        for uid, key in changed:
            cache = self._caches.get(uid)
            if cache is not None:
                cache.index.invalidate((key,))

    def invalidate_all(self) -> None:
        """Changes of other managers may have been missed."""
        for cache in self._caches.values():
            cache.index.invalidate_all()

    def _open(self, instance: Instance, placement: Placement) -> InstanceCache:
        cache = InstanceCache(instance, placement, self._new_index(instance, placement))
        self._caches[placement.uid] = cache
        self._current_generation = -1  # it may be one that is forgotten by now
        return cache

    def _new_index(self, instance: Instance, placement: Placement) -> MetaIndex:
        group = self._registry.groups.find(instance.instance_group_name)
        config = group.cache_config.meta_indexer_config if group is not None else MetaIndexerConfig()
        backend = self._new_backend(placement)
        listener = self._usage.listener(instance.instance_group_name, placement.uid)
        if not backend.is_shared and backend.key_count:
            listener()(backend.usage_bytes, backend.key_count)
        batch_key_size = config.batch_key_size or _BATCH_KEYS
        if backend.is_shared:  # small batches spare a slow store nothing, they only ask it more often
            batch_key_size = max(batch_key_size, PAGE_KEYS)
        return MetaIndex(
            backend,
            self._storages,
            shard_count=placement.shard_count,
            batch_key_size=batch_key_size,
            max_key_count=config.max_key_count or MOST_KEYS,
            on_usage=listener,
            budget=self._budget,
            lock_waits=self.lock_waits,
        )
