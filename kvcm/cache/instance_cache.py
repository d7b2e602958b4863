"""The open cache of each instance: its index, and tables derived from its registration once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvcm.cache.quotas import MOST_KEYS, Ledger
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.meta_index import IndexHandle, MetaIndex
from kvcm.index.search_cache import CacheBudget, ChunkCache, StorageView, filter_specs
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import MetaIndexerConfig
from kvcm.model.instances import Instance, LocationSpecInfo, Placement, Registration
from kvcm.model.keys import unpack_keys
from kvcm.model.locations import SpecUri, decode_chunk, encode_chunk
from kvcm.model.storages import StorageType
from kvcm.registry.registry import Registry
from kvcm.telemetry.metrics import Histogram

__all__ = ["BATCH_KEYS", "InstanceCache", "OpenCaches", "batch_keys", "batches", "yield_to_others"]

# Large requests are worked on in pages, and give way to other requests after each.

BATCH_KEYS = 1024
"""Blocks that a shared store is asked for at a time, or that nothing but a lookup is done with."""
_MIN_BATCH_KEYS = 16
Item = TypeVar("Item")


def batch_keys(parts: int) -> int:
    """Return how many blocks of so many parts are worked on without a pause: some 10 ms of the event loop.

    A block costs about as much as one part of it. Powers of two, so that packed files of a page come out even.
    """
    most = max(_MIN_BATCH_KEYS, BATCH_KEYS // (1 + parts))
    return 1 << (most - 1).bit_length()


async def yield_to_others(count: int, page: int) -> None:
    """Let others in between two stages of a request of so many blocks, if these are much for pages of that size. To be
    called where nothing was looked at that has to stay as it is."""
    if 2 * count > page:
        await asyncio.sleep(0)


def batches(items: Sequence[Item], most: int = BATCH_KEYS) -> Iterator[Sequence[Item]]:
    """Yield the items in order, at most so many at a time; one page is the sequence itself."""
    if len(items) <= most:
        if items:
            yield items
        return
    for start in range(0, len(items), most):
        yield items[start : start + most]


_MOST_FILTERS = 16  # engines ask for their own rank's specs: a few distinct sets per instance
_MOST_SETS = 1024  # of specs that are stored together


@dataclass(frozen=True, slots=True)
class InstanceCache:
    """An instance, its index, and tables derived from its registration once.

    Attributes:
        instance: the registration.
        placement: where its blocks are kept in the store.
        index: records of its blocks, shared with nobody.
        handle: the index as background tasks get it.
        spec_names: of the instance, in the order of registration.
        placeholder: encoded answer for a miss in batch and window matches: every spec with an empty uri.
        specs_of_group: spec infos by spec group, in the order of registration.
        linear_specs: names of specs that hold linear-attention state.
        full_specs: names of the other specs.
        batch_keys: blocks that are worked on without a pause. A shared store suspends itself and takes few calls.
        present: remembers which specs a location holds.
        spec_filters: remember locations reduced to some specs, by the names of those; the latest few.
    """

    instance: Instance
    placement: Placement
    index: MetaIndex
    handle: IndexHandle = field(init=False)
    spec_names: tuple[str, ...] = field(init=False)
    placeholder: bytes = field(init=False)
    specs_of_group: dict[str, tuple[LocationSpecInfo, ...]] = field(init=False)
    linear_specs: frozenset[str] = field(init=False)
    full_specs: frozenset[str] = field(init=False)
    batch_keys: int = field(init=False)
    present: ChunkCache[frozenset[str]] = field(init=False)
    spec_filters: dict[frozenset[str], ChunkCache[bytes]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = self.instance.spec_names
        placeholder = encode_chunk(StorageType.ST_UNSPECIFIED, len(names), [SpecUri(name, "") for name in names])
        groups = {
            group.name: tuple(info for info in self.instance.location_spec_infos if info.name in group.spec_names)
            for group in self.instance.location_spec_groups
        }
        linear = self.instance.linear_spec_names
        object.__setattr__(self, "handle", IndexHandle(self.instance, self.placement.uid, self.index))
        object.__setattr__(self, "spec_names", names)
        object.__setattr__(self, "placeholder", placeholder)
        object.__setattr__(self, "specs_of_group", groups)
        object.__setattr__(self, "linear_specs", linear)
        object.__setattr__(self, "full_specs", frozenset(names) - linear)
        object.__setattr__(self, "batch_keys", BATCH_KEYS if self.index.is_shared else batch_keys(len(names)))
        object.__setattr__(self, "present", ChunkCache(_SpecNames()))

    def filter_of(self, spec_names: frozenset[str]) -> ChunkCache[bytes] | None:
        """Return what reduces locations to the named specs, None where those are all."""
        if spec_names >= frozenset(self.spec_names):
            return None
        memo = self.spec_filters.pop(spec_names, None) or ChunkCache(lambda chunk: filter_specs(chunk, spec_names))
        self.spec_filters[spec_names] = memo  # the latest in use stays longest
        if len(self.spec_filters) > _MOST_FILTERS:
            del self.spec_filters[next(iter(self.spec_filters))]
        return memo

    def specs_per_key(self, group_names: Sequence[str], count: int) -> list[tuple[LocationSpecInfo, ...]]:
        """Return which specs each of `count` blocks is to be stored with.

        Args:
            group_names: empty for all specs, or one spec group per block.
            count: number of blocks.

        Raises:
            InvalidArgumentError: the number of names differs from the number of blocks, or a group is unknown.
        """
        if not group_names:
            return [self.instance.location_spec_infos] * count
        if len(group_names) != count:
            raise InvalidArgumentError(
                f"location_spec_group_names has {len(group_names)} entries for {count} blocks, must have one per block"
            )
        unknown = sorted(set(group_names) - set(self.specs_of_group))
        if unknown:
            raise InvalidArgumentError(
                f"location_spec_group_names holds {unknown}, registered are {sorted(self.specs_of_group)}"
            )
        return [self.specs_of_group[name] for name in group_names]


class _SpecNames:
    """The specs that a location holds: one set for all locations that hold the same."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], frozenset[str]] = {}

    def __call__(self, chunk: bytes) -> frozenset[str]:
        names = frozenset(spec.name for spec in decode_chunk(chunk).specs)
        if len(self._known) > _MOST_SETS:
            self._known.clear()
        return self._known.setdefault(names, names)


# The open caches: one per registered instance, and per instance that is being removed.

_BATCH_KEYS = 256


class OpenCaches:
    """Opens indexes when they are first asked for.

    Args:
        registry: instances and groups.
        storages: which storages can be read.
        new_backend: makes or finds the backend of an instance's index.
        usage: receives the usage of the indexes.
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
        self._by_id = registry.instances.by_id
        self._storages = storages
        self._new_backend = new_backend
        self._usage = usage
        self._budget = budget
        self.lock_waits = Histogram()  # of all indexes
        self._caches: dict[int, InstanceCache] = {}
        self._current: Sequence[InstanceCache] = ()
        self._handles: Sequence[IndexHandle] = ()
        self._current_generation = -1  # of the registry

    def resolve(self, instance_id: str) -> InstanceCache:
        """Return the cache of an instance.

        Raises:
            UnknownInstanceError: it is not registered.
        """
        registration = self._by_id.get(instance_id)
        if registration is None:
            self._registry.instances.get(instance_id)  # raises
            raise AssertionError(f"instance {instance_id!r} is registered, but not listed")
        cache = self._caches.get(registration.placement.uid)
        is_known = cache is not None and cache.placement is registration.placement  # a move changes the placement alone
        if cache is None or not is_known or cache.instance is not registration.instance:
            return self._reopen(cache, registration)
        return cache

    def of_group(self, group_name: str) -> list[InstanceCache]:
        """Return the open caches of a group."""
        return [cache for cache in self._caches.values() if cache.instance.instance_group_name == group_name]

    def key_counts(self, group_name: str) -> list[int]:
        """Return the blocks of each of these, as last read."""
        caches = self._caches.values()
        return [cache.index.key_count for cache in caches if cache.instance.instance_group_name == group_name]

    def by_uid(self, uid: int) -> InstanceCache | None:
        """Return the cache of a registration, None when it is gone for good."""
        self.all()
        return self._caches.get(uid)

    def find_removed(self, instance: Instance, placement: Placement) -> InstanceCache:
        """Return the cache of an instance that is being removed."""
        cache = self._caches.get(placement.uid)
        return cache if cache is not None and cache.placement == placement else self._open(instance, placement)

    def all(self) -> Sequence[InstanceCache]:
        """Return everything, opening what is not open yet; what is neither registered nor being removed is closed."""
        generation = self._registry.generation
        if self._current_generation != generation:
            instances = self._registry.instances
            current = [self.resolve(instance.instance_id) for instance in instances.all()]
            current += [self.find_removed(removal.instance, removal.placement) for removal in instances.removals()]
            self._caches = {cache.placement.uid: cache for cache in current}
            self._current, self._current_generation = tuple(current), generation
            self._handles = tuple(cache.handle for cache in current)
        return self._current

    def handles(self) -> Sequence[IndexHandle]:
        """Return the index of each, for background tasks, which ask many times a second."""
        self.all()
        return self._handles

    def invalidate(self, changed: Mapping[int, Sequence[bytes]]) -> None:
        """Managers changed blocks, given by uid as their keys are stored. Of an instance without answers there is
        nothing to forget."""
        for uid, members in changed.items():
            cache = self._caches.get(uid)
            if cache is not None and cache.index.has_answers:
                cache.index.invalidate(unpack_keys(members))

    def invalidate_all(self, store: str | None = None) -> None:
        """Changes of other managers may have been missed, in one store or in all."""
        for cache in self._caches.values():
            if store in {None, cache.placement.store}:
                cache.index.invalidate_all()

    def _reopen(self, cache: InstanceCache | None, registration: Registration) -> InstanceCache:
        """Return the cache of a registration that is not open, or was read again.

        A release that counted uids may give one twice when its store goes back in time: then knowledge of the
        other instance is forgotten. So it is when its blocks moved to another store.
        """
        if cache is None or (cache.instance, cache.placement) != (registration.instance, registration.placement):
            return self._open(registration.instance, registration.placement)
        reread = InstanceCache(registration.instance, registration.placement, cache.index)
        self._caches[reread.placement.uid] = reread
        self._current_generation = -1
        return reread

    def _open(self, instance: Instance, placement: Placement) -> InstanceCache:
        cache = InstanceCache(instance, placement, self._new_index(instance, placement))
        before = self._caches.get(placement.uid)
        if before is not None and before.placement != placement:
            before.index.leave()
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
            batch_key_size = max(batch_key_size, BATCH_KEYS)
        return MetaIndex(
            backend,
            self._storages,
            shard_count=placement.shard_count,
            batch_key_size=batch_key_size,
            max_key_count=config.max_key_count or MOST_KEYS,
            on_usage=listener,
            budget=self._budget,
            lock_waits=self.lock_waits,
            store=placement.store,
        )
