"""Recounts of usage: what managers that died did not report any more is put right by the leader.

The counters that change with the records, shard by shard, are the truth. An account (`kvcm.cache.accounts`) is
recounted when two looks in a row find the very same difference from them, reports that were dropped, or a reservation
that nobody ended in time. Two different differences are no reason: reports of a busy account are always on their way,
and a recount meanwhile drops some of them. Nothing scans an index.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import structlog

from kvcm.cache.instance_cache import OpenCaches
from kvcm.cache.quotas import OVERALL, InstanceIndexes, SharedLedger, count_usage, group_account, storage_account
from kvcm.index.meta_index import MetaIndex
from kvcm.model.clock import Clock
from kvcm.registry.registry import Registry
from kvcm.store.redis.quota import Counters

__all__ = ["UsageRecount"]

_CHECK_SECONDS = 5.0
_log = structlog.get_logger("kvcm.cache")


class _Suspect(NamedTuple):
    """What may be wrong with an account.

    Attributes:
        differences: by how much each field differs.
        is_lasting: reports were dropped or a reservation is overdue, which does not pass by itself.
    """

    differences: Mapping[str, int]
    is_lasting: bool

    def confirms(self, earlier: _Suspect) -> bool:
        return (self.is_lasting and earlier.is_lasting) or bool(self.differences.items() & earlier.differences.items())


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
        self._suspects: dict[str, _Suspect] = {}
        self._next_check_at = 0.0

    async def check(self) -> None:
        """Compare accounts with the truth, those that differed the last time sooner than the others, and recount what
        differs in the same way for the second time.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        if now >= self._next_check_at:
            self._next_check_at = now + _CHECK_SECONDS
            checked: Collection[str] = self.accounts().keys()
        else:
            checked = self._suspects
        if not checked:
            return
        suspects, self._suspects = self._suspects, {}
        doubts = await self._suspect_accounts(checked, now, is_exact=False)
        again = suspects.keys() & doubts.keys()
        await self.recount(sorted(account for account in again if doubts[account].confirms(suspects[account])))
        self._suspects = {account: doubt for account, doubt in doubts.items() if account not in suspects}

    def accounts(self) -> dict[str, str]:
        """Return every account in which something may count, and what it is, for people."""
        groups = {*(group.name for group in self._registry.groups.all()), *self.census()}
        storages = [config.global_unique_name for config in self._registry.storages.all()]
        return {
            **{group_account(name): f"group {name!r}" for name in sorted(groups)},
            **{storage_account(name): f"storage {name!r}" for name in storages},
            OVERALL: "all groups",
        }

    async def different_accounts(self, accounts: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the accounts that are not as they should be at rest, and by how much each field differs.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        doubts = await self._suspect_accounts(accounts, self._clock.now())
        return {account: dict(doubt.differences) for account, doubt in doubts.items()}

    async def _suspect_accounts(
        self, accounts: Collection[str], now: float, *, is_exact: bool = True
    ) -> dict[str, _Suspect]:
        counters_of = await self._ledger.refresh(accounts)
        overdue = await self._ledger.overdue(
            [name for name, each in counters_of.items() if any(each.reserved.values())], now
        )
        truth = await count_usage(await self._current_census(), is_exact=is_exact)
        doubts = {
            account: _Suspect(
                _excess_by_field(counters, truth.get(account, {})), counters.dropped > 0 or account in overdue
            )
            for account, counters in counters_of.items()
        }
        return {account: doubt for account, doubt in doubts.items() if doubt.differences or doubt.is_lasting}

    async def recount(self, accounts: Collection[str]) -> bool:
        """Recount accounts; False when another manager does just now."""
        if not accounts:
            return True
        done = await self._ledger.recount(accounts, self._current_census, self._clock.now())
        for account, is_done in done.items():
            _log.info("usage_recounted", account=account, done=is_done)
        return all(done.values())

    async def _current_census(self) -> InstanceIndexes:
        """Return every index that anybody may have written to by now: it was registered before."""
        await self._registry.refresh()
        return self.census()

    def census(self) -> InstanceIndexes:
        """Return every index by group and uid."""
        found: defaultdict[str, dict[int, MetaIndex]] = defaultdict(dict)
        for cache in self._caches.all():
            found[cache.instance.instance_group_name][cache.placement.uid] = cache.index
        return found


def _excess_by_field(counters: Counters, truth: dict[str, int]) -> dict[str, int]:
    """Return by how much what an account says is used is above the truth, by field."""
    used = Counter(counters.used)
    used.subtract(truth)
    return {field: value for field, value in sorted(used.items()) if value}
