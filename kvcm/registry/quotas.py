"""The limits that groups of one `global_quota_group_name` have together."""

from __future__ import annotations

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import GlobalQuota
from kvcm.registry.shelf import Flush, Shelf
from kvcm.registry.validation import check_global_quota

__all__ = ["QuotaRegistry"]


class QuotaRegistry:
    """Global quotas by name. Groups may carry a name that has none: then there is no such limit.

    Args:
        shelf: where they are kept.
        flush: returns when what was changed is durable.
    """

    def __init__(self, shelf: Shelf[GlobalQuota], flush: Flush) -> None:
        self._shelf = shelf
        self._flush = flush

    async def set(self, quota: GlobalQuota) -> None:
        """Add a quota, or put it in the place of the one of that name; in force at once.

        Raises:
            InvalidArgumentError: a field is missing, malformed or out of range.
            StorageIOError: the store cannot be asked.
        """
        check_global_quota(quota)
        await self._shelf.change(quota.name, lambda _known: quota)
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

        await self._shelf.change(name, decide)
        await self._flush()

    def find(self, name: str) -> GlobalQuota | None:
        """Return a quota, None when there is none of that name."""
        return self._shelf.get(name)

    def all(self) -> list[GlobalQuota]:
        """Return all quotas, ordered by name."""
        return self._shelf.all()
