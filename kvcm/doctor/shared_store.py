"""The Redis or Valkey that managers share: version, what it does when it is full, what outlives its end, its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError, ResponseError

from kvcm.doctor.findings import Finding, fail, ok, warn
from kvcm.doctor.skew import check_skew
from kvcm.model.errors import StorageIOError
from kvcm.sizes import shown_size
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import Address, RedisSettings

__all__ = ["Seen", "check_shared_store", "findings_of"]

_CHECK = "shared store"
_LEAST_VERSION = (7, 0)
_NEAR_FULL = 0.9


class Seen(NamedTuple):
    """What a server says of itself.

    Attributes:
        info: its INFO.
        save: its setting of snapshots, None when it does not tell.
        ahead_seconds: how far its clock is ahead of ours.
    """

    info: Mapping[str, str]
    save: str | None
    ahead_seconds: float


def check_shared_store(settings: RedisSettings) -> list[Finding]:
    """Return how the servers are; asks each master."""
    try:
        return asyncio.run(_looked_at(settings))
    except (StorageIOError, RedisError, OSError, ValueError) as error:
        shown = ", ".join(map(str, settings.addresses))
        return [fail(_CHECK, f"{shown}: {error}", "start it, or correct kvcm.registry_storage.uri")]


async def _looked_at(settings: RedisSettings) -> list[Finding]:
    client = RedisClient.of(settings)
    try:
        found: list[Finding] = []
        for address in await client.masters():
            connection = await client.connect(address)
            try:
                async with asyncio.timeout(max(5.0, settings.timeout_seconds)):
                    found += findings_of(address, await _seen(connection))
            finally:
                await connection.disconnect(nowait=True)
        return found
    finally:
        await client.close()


async def _seen(connection: Connection) -> Seen:
    info = _info(await _asked(connection, "INFO"))
    before = time.time()
    seconds, microseconds = await _asked(connection, "TIME")
    ahead = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
    try:
        pair = await _asked(connection, "CONFIG", "GET", "save")
        save = pair[1].decode() if len(pair) == 2 else None
    except ResponseError:  # hosted servers keep their configuration to themselves
        save = None
    return Seen(info, save, ahead)


async def _asked(connection: Connection, *command: str) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _info(answer: bytes) -> dict[str, str]:
    lines = answer.decode(errors="replace").splitlines()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)


def findings_of(address: Address, seen: Seen) -> Iterator[Finding]:
    """Yield what a server's words mean."""
    info = seen.info
    yield _version(address, info)
    yield from _memory(address, info)
    yield _persistence(address, seen)
    if info.get("rdb_last_bgsave_status") == "err" or info.get("aof_last_write_status") == "err":
        yield fail(_CHECK, f"{address} failed to save", "look into its log: its disk may be full")
    yield check_skew(f"redis {address}", seen.ahead_seconds)


def _version(address: Address, info: Mapping[str, str]) -> Finding:
    shown = info.get("redis_version", "")
    try:
        version = tuple(int(part) for part in shown.split("."))
    except ValueError:
        version = ()
    kind = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {shown}"
    if version < _LEAST_VERSION:
        return fail(_CHECK, f"{address} is {kind or 'of no version'}", "use Redis 7.0 or later, or Valkey")
    return ok(_CHECK, f"{address} answers, {kind}")


def _memory(address: Address, info: Mapping[str, str]) -> Iterator[Finding]:
    most, used = int(info.get("maxmemory", "0")), int(info.get("used_memory", "0"))
    policy = info.get("maxmemory_policy", "")
    if policy and policy != "noeviction":
        yield fail(
            _CHECK,
            f"{address} has maxmemory-policy {policy}: when it is full it drops metadata, so that bytes leak",
            "run `redis-cli config set maxmemory-policy noeviction`, and put it into redis.conf",
        )
    elif policy:
        yield ok(_CHECK, f"{address} evicts nothing by itself")
    if most and used > _NEAR_FULL * most:
        found = f"{address} uses {shown_size(used)} of {shown_size(most)}"
        yield warn(_CHECK, found, "raise its maxmemory, or lower max_key_count of the groups")


def _persistence(address: Address, seen: Seen) -> Finding:
    if seen.info.get("aof_enabled") == "1":
        return ok(_CHECK, f"{address} keeps a log of every change")
    if seen.save is None:
        return warn(
            _CHECK,
            f"{address} has no append-only file, and does not tell whether it makes snapshots",
            "make sure that it does, or set appendonly yes",
        )
    if seen.save:
        return warn(
            _CHECK,
            f"{address} has snapshots only ({seen.save}): when it ends, changes since the last one are lost",
            "set appendonly yes",
        )
    return fail(_CHECK, f"{address} keeps nothing: its end loses all metadata", "set appendonly yes")
