"""Recounts of usage: what managers that died did not report any more is put right by whoever leads.

The counters that change with the records, shard by shard, are the truth; an account (`kvcm.cache.accounts`) that
differs from them in two looks in a row, or holds reservations that nobody ends, is recounted. Nothing scans an index.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

import structlog

from kvcm.cache.accounts import OVERALL, Census, counted, group_account, storage_account
from kvcm.cache.open_caches import OpenCaches
from kvcm.cache.shared_usage import SharedLedger
from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.registry.registry import Registry
from kvcm.store.redis.quota import Counters

__all__ = ["UsageRecount", "differences"]

_LOOK_SECONDS = 5.0

_log = structlog.get_logger("kvcm.cache")


class UsageRecount:
    """Looks after the shared counters of all accounts.

    Args:
        registry: groups and storages.
        caches: the indexes.
        ledger: the counters.
        clock: time source.
    """

    def __init__(self, registry: Registry, caches: OpenCaches, ledger: SharedLedger, clock: Clock) -> None:
        self._registry = registry
        self._caches = caches
        self._ledger = ledger
        self._clock = clock
        self._suspects: frozenset[str] = frozenset()
        self._look_at = 0.0

    async def look(self) -> None:
        """Compare accounts with the truth, those that differed the last time sooner than the others, and recount what
        differs for the second time.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            looked_at: Collection[str] = self.accounts().keys()
        else:
            looked_at = self._suspects
        if not looked_at:
            return
        suspects, self._suspects = self._suspects, frozenset()
        different = frozenset(await self.different(looked_at))
        await self.recount(sorted(different & suspects))
        self._suspects = different - suspects

    def accounts(self) -> dict[str, str]:
        """Return every account in which something may count, and what it is, for people."""
        groups = {*(group.name for group in self._registry.groups.all()), *self.census()}
        storages = [config.global_unique_name for config in self._registry.storages.all()]
        return {
            **{group_account(name): f"group {name!r}" for name in sorted(groups)},
            **{storage_account(name): f"storage {name!r}" for name in storages},
            OVERALL: "all groups",
        }

    async def different(self, accounts: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the accounts that are not as they should be at rest, and by how much each field differs.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        heard = await self._ledger.refresh(accounts)
        truth = await counted(self.census())
        return {
            account: differences(counters, truth.get(account, {}))
            for account, counters in heard.items()
            if counters.dropped or any(counters.reserved.values()) or differences(counters, truth.get(account, {}))
        }

    async def recount(self, accounts: Collection[str]) -> bool:
        """Recount accounts; False when another manager does just now."""
        if not accounts:
            return True
        done = await self._ledger.recount(accounts, self.census(), self._clock.now())
        for account, is_done in done.items():
            _log.info("usage_recounted", account=account, done=is_done)
        return all(done.values())

    def census(self) -> Census:
        """Return every index by group and uid."""
        found: defaultdict[str, dict[int, MetaIndex]] = defaultdict(dict)
        for cache in self._caches.all():
            found[cache.instance.instance_group_name][cache.placement.uid] = cache.index
        return found


def differences(counters: Counters, truth: dict[str, int]) -> dict[str, int]:
    """Return by how much what an account says is used is above the truth, by field."""
    used = Counter(counters.used)
    used.subtract(truth)
    return {field: value for field, value in sorted(used.items()) if value}
