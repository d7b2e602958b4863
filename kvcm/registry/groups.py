"""The instance groups and global quotas of the configuration."""

from __future__ import annotations

from collections.abc import Callable

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.storages import StorageConfig
from kvcm.registry.document_cache import DocumentCache, Flush
from kvcm.registry.secrets import restored
from kvcm.registry.validation import check_global_quota, check_group, check_storages_of_group

__all__ = ["GroupRegistry", "QuotaRegistry"]


class GroupRegistry:
    """Instance groups by name.

    Args:
        cache: their documents.
        flush: returns when all changes are durable.
        store_kind: the deployment's metadata store, which groups may name.
        find_storage: returns a storage by its name, None when there is none.
    """

    def __init__(
        self,
        cache: DocumentCache[InstanceGroup],
        flush: Flush,
        store_kind: str,
        find_storage: Callable[[str], StorageConfig | None],
    ) -> None:
        self._cache = cache
        self.by_name = cache.values  # for callers on the path of every request
        self._flush = flush
        self._store_kind = store_kind
        self._find_storage = find_storage
        self.find: Callable[[str], InstanceGroup | None] = cache.get
        """Returns a group, None when there is none of that name."""

    async def create(self, group: InstanceGroup) -> None:
        """Add a group.

        Raises:
            InvalidArgumentError: a field is missing, malformed or out of range.
            DuplicateEntityError: the name is taken.
            StorageIOError: the store cannot be asked.
        """
        self._check(group)

        def decide(known: InstanceGroup | None) -> InstanceGroup:
            if known is not None:
                raise DuplicateEntityError(
                    f"instance group {group.name!r} exists; use UpdateInstanceGroup to change it"
                )
            return restored(group, None)

        await self._cache.change(group.name, decide)
        await self._flush()

    async def update(self, group: InstanceGroup, current_version: int) -> None:
        """Replace a group; in force at once.

        Args:
            group: the complete group, with a version above the stored one; secrets that it lacks stay.
            current_version: version that the caller's change is based on.

        Raises:
            InvalidArgumentError: a field is malformed, there is no such group, or a version does not fit.
            StorageIOError: the store cannot be asked.
        """
        self._check(group)

        def decide(known: InstanceGroup | None) -> InstanceGroup:
            _check_versions(_existing(group.name, known).version, group.version, current_version)
            return restored(group, known)

        await self._cache.change(group.name, decide)
        await self._flush()

    def _check(self, group: InstanceGroup) -> None:
        check_group(group, self._store_kind)
        check_storages_of_group(group, self._find_storage)

    async def remove(self, name: str) -> None:
        """Forget a group; its instances stay readable and refuse writes.

        Raises:
            InvalidArgumentError: there is no such group.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: InstanceGroup | None) -> None:
            _existing(name, known)

        await self._cache.change(name, decide)
        await self._flush()

    async def read(self, name: str) -> InstanceGroup:
        """Return a group as it is in the store now.

        Raises:
            InvalidArgumentError: there is no such group.
            StorageIOError: the store cannot be asked.
        """
        return _existing(name, await self._cache.read(name))

    def get(self, name: str) -> InstanceGroup:
        """Return a group.

        Raises:
            InvalidArgumentError: there is no such group.
        """
        return _existing(name, self._cache.get(name))

    def all(self) -> list[InstanceGroup]:
        """Return all groups, ordered by name."""
        return self._cache.all()


def _existing(name: str, known: InstanceGroup | None) -> InstanceGroup:
    if known is None:
        raise InvalidArgumentError(f"instance group {name!r} does not exist")
    return known


def _check_versions(stored: int, new: int, current: int) -> None:
    if current != stored:
        raise InvalidArgumentError(f"current_version is {current}, stored is {stored}: read the group again and retry")
    if new <= stored:
        raise InvalidArgumentError(f"instance_group.version is {new}, must be above {stored}")


class QuotaRegistry:
    """Global quotas by name. Groups may carry a name that has none: then there is no such limit.

    Args:
        cache: their documents.
        flush: returns when all changes are durable.
    """

    def __init__(self, cache: DocumentCache[GlobalQuota], flush: Flush) -> None:
        self._cache = cache
        self.by_name = cache.values  # for callers on the path of every request
        self._flush = flush
        self.find: Callable[[str], GlobalQuota | None] = cache.get
        """Returns a quota, None when there is none of that name."""

    async def set(self, quota: GlobalQuota) -> None:
        """Add a quota, or put it in the place of the one of that name; in force at once.

        Raises:
            InvalidArgumentError: a field is missing, malformed or out of range.
            StorageIOError: the store cannot be asked.
        """
        check_global_quota(quota)
        await self._cache.change(quota.name, lambda _known: quota)
        await self._flush()

    async def remove(self, name: str) -> None:
        """Forget a quota; its groups have their own limits only.

        Raises:
            InvalidArgumentError: there is no such quota.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: GlobalQuota | None) -> None:
            if known is None:
                raise InvalidArgumentError(f"global quota {name!r} does not exist")

        await self._cache.change(name, decide)
        await self._flush()

    def all(self) -> list[GlobalQuota]:
        """Return all quotas, ordered by name."""
        return self._cache.all()
