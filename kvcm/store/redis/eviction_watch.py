"""Watches whether the servers drop keys by themselves, which a metadata store must not.

A policy like `allkeys-lru` drops any key when the memory is full: blocks, sessions, and the registry, which is one key.
Nothing can be promised then, so nothing new is stored (`StoreGate.full`) until the policy is another one. A policy of
keys that expire (`volatile-…`) drops the lease of the leader and how sessions ended; that is reported only.

How many keys each server dropped so far is kept in the store: what was dropped while no manager ran, or just before one
ended, is reported by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import Address
from kvcm.store.store import Table

__all__ = ["EvictionWatch"]

_SAFE: Final = "noeviction"
_ANY_KEY: Final = "allkeys"
_NAME: Final = "evicted"
_QUIET_SECONDS: Final = 5.0
_TROUBLED_SECONDS: Final = 1.0
_REMEDY: Final = "run `CONFIG SET maxmemory-policy noeviction` there, and put it into its configuration file"
_log = structlog.get_logger("kvcm.store")


class EvictionWatch:
    """The policies of the masters.

    Args:
        client: of the servers.
        table: keeps their counts.

    Attributes:
        trouble: their faults, "" for nothing.
        is_known: whether every master said what its policy is.
        listeners: called with the number of keys that they dropped since the last look.
    """

    def __init__(self, client: RedisClient, table: Table) -> None:
        self._client = client
        self._table = table
        self._counts: dict[str, int] | None = None  # by address, None before they were read
        self.trouble = ""
        self.is_known = True
        self.listeners: list[Callable[[int], None]] = []

    async def run(self) -> None:
        """Look every five seconds, and every second while something is wrong, for good."""
        while True:
            await asyncio.sleep(_TROUBLED_SECONDS if self.trouble else _QUIET_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Ask the masters; a server that does not answer is left to the next time."""
        try:
            found = await self._client.eviction()
        except StorageIOError as error:
            _log.warning("store_policy_not_read", reason=str(error))
            return
        self._judge({each.address: each.policy for each in found})
        with suppress(StorageIOError):  # a store that takes nothing keeps an older count, which reports more
            await self._count({str(each.address): each.evicted for each in found})

    def _judge(self, policies: Mapping[Address, str | None]) -> None:
        unknown = sorted(str(address) for address, policy in policies.items() if policy is None)
        if unknown and self.is_known:
            _log.warning("store_policy_unknown", servers=unknown, reason="neither INFO nor CONFIG GET is allowed there")
        self.is_known = not unknown
        unsafe = {address: policy for address, policy in policies.items() if policy not in {None, _SAFE}}
        shown = ", ".join(f"{address} has maxmemory-policy {policy}" for address, policy in sorted(unsafe.items()))
        trouble = f"{shown}: it drops metadata when its memory is full; {_REMEDY}" if shown else ""
        drops_any = any(policy is not None and policy.startswith(_ANY_KEY) for policy in unsafe.values())
        self._client.gate.full = f"nothing new is stored: {trouble}" if drops_any else ""
        if trouble != self.trouble:
            self.trouble = trouble
            if trouble:
                _log.error("store_evicts", reason=trouble)
            else:
                _log.info("store_evicts_no_more")

    async def _count(self, counts: Mapping[str, int]) -> None:
        document = await self._table.get(_NAME)
        before = self._counts if self._counts is not None else _decoded(document)
        # A server that was restarted counts from 0.
        known = {at: before.get(at, count) for at, count in counts.items()}
        dropped = sum(count - known[at] if count >= known[at] else count for at, count in counts.items())
        self._counts = {**before, **counts}
        if dropped:
            _log.error(
                "store_evicted", keys=dropped, reason="the servers dropped metadata: verify with `kvcm index verify`"
            )
            for listener in self.listeners:
                listener(dropped)
        if self._counts != _decoded(document):
            await self._table.replace(_NAME, document, msgspec.json.encode(self._counts))


def _decoded(document: bytes | None) -> dict[str, int]:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(document or b"{}", type=dict[str, int])
    return {}
