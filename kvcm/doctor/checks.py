"""All checks of settings (`check_settings`), and those of the Redis or Valkey that managers share.

The latter concern its version, its policy when it is full, its persistence, its clock and the rights of its user.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from redis.asyncio.connection import Connection
from redis.exceptions import RedisError, ResponseError

from kvcm.config import Settings
from kvcm.doctor.findings import Finding, Level, check_skew, fail, ok, warn
from kvcm.doctor.host import (
    block_store_settings,
    check_authorities,
    check_certificate,
    check_metadata_directory,
    check_ports,
    combinations,
    redis_settings,
)
from kvcm.doctor.manager import check_storage
from kvcm.index.backends.redis_runs import channel_of
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.units import format_size
from kvcm.registry.startup_document import parse_startup_document
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import Address, RedisSettings

__all__ = ["StoreFacts", "check_settings", "check_shared_store", "findings_of"]

_CHECK = "shared store"
_LEAST_VERSION = (7, 0)
_NEAR_FULL = 0.9


class StoreFacts(NamedTuple):
    """Facts of a server.

    Attributes:
        info: its INFO.
        save: its setting of snapshots, None if it is not readable.
        ahead_seconds: how far its clock is ahead of ours.
        channel: of the notices of managers to each other.
        refusal: why the user may not publish there, "" if it may.
    """

    info: Mapping[str, str]
    save: str | None
    ahead_seconds: float
    channel: str = ""
    refusal: str = ""


def check_shared_store(settings: RedisSettings) -> list[Finding]:
    """Return findings of each master."""
    try:
        return asyncio.run(_facts_of(settings))
    except (StorageIOError, RedisError, OSError, ValueError) as error:
        shown = ", ".join(map(str, settings.addresses))
        return [fail(_CHECK, f"{shown}: {error}", "start it, or correct kvcm.registry_storage.uri")]


async def _facts_of(settings: RedisSettings) -> list[Finding]:
    client = RedisClient.of(settings)
    try:
        found: list[Finding] = []
        for address in await client.masters():
            connection = await client.connect(address)
            try:
                async with asyncio.timeout(max(5.0, settings.timeout_seconds)):
                    found += findings_of(address, await _read_facts(connection, channel_of(client.prefix).decode()))
            finally:
                await connection.disconnect(nowait=True)
        return found
    finally:
        await client.close()


async def _read_facts(connection: Connection, channel: str) -> StoreFacts:
    info = _info(await _query(connection, "INFO"))
    before = time.time()
    seconds, microseconds = await _query(connection, "TIME")
    ahead = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
    try:
        pair = await _query(connection, "CONFIG", "GET", "save")
        save = pair[1].decode() if len(pair) == 2 else None
    except ResponseError:  # hosted servers do not allow CONFIG
        save = None
    return StoreFacts(info, save, ahead, channel, await _refusal(connection, channel))


async def _refusal(connection: Connection, channel: str) -> str:
    """Publish what managers take for no notice; return why that is not allowed."""
    try:
        await _query(connection, "PUBLISH", channel, "")
    except ResponseError as error:
        return str(error)
    return ""


async def _query(connection: Connection, *command: str) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _info(answer: bytes) -> dict[str, str]:
    lines = answer.decode(errors="replace").splitlines()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)


def findings_of(address: Address, facts: StoreFacts) -> Iterator[Finding]:
    """Yield the findings of a server's facts."""
    info = facts.info
    yield _version(address, info)
    yield from _memory(address, info)
    yield _persistence(address, facts)
    if info.get("rdb_last_bgsave_status") == "err" or info.get("aof_last_write_status") == "err":
        yield fail(_CHECK, f"{address} failed to save", "look into its log: its disk may be full")
    if facts.refusal:
        yield fail(
            _CHECK,
            f"{address} lets its user publish nothing on the channel {facts.channel} ({facts.refusal}): managers cache "
            "nothing, and cannot evict",
            f"run `redis-cli acl setuser USER '&{facts.channel}'`, and put it into its ACL file",
        )
    yield check_skew(f"redis {address}", facts.ahead_seconds)


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
        found = f"{address} uses {format_size(used)} of {format_size(most)}"
        yield warn(_CHECK, found, "raise its maxmemory, or lower max_key_count of the groups")


def _persistence(address: Address, facts: StoreFacts) -> Finding:
    if facts.info.get("aof_enabled") == "1":
        return ok(_CHECK, f"{address} keeps a log of every change")
    if facts.save is None:
        return warn(
            _CHECK,
            f"{address} has no append-only file, and its snapshots are unknown (CONFIG is not allowed)",
            "make sure that it makes snapshots, or set appendonly yes",
        )
    if facts.save:
        return warn(
            _CHECK,
            f"{address} has snapshots only ({facts.save}): when it ends, changes since the last one are lost",
            "set appendonly yes",
        )
    return fail(_CHECK, f"{address} keeps nothing: its end loses all metadata", "set appendonly yes")


# All checks that need no running manager.


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Yield the findings of settings and of the files, ports, stores and storages that they name."""
    yield from combinations(settings)
    yield from check_metadata_directory(settings)
    yield from check_ports(settings)
    yield from _certificates(settings.described())
    redis = redis_settings(settings)
    if redis is not None:
        yield from check_shared_store(redis)
    stores = block_store_settings(settings)
    for name, _ in settings.block_stores:
        if name not in stores:
            what = f"kvcm.store.block_stores gives {name} no uri that can be read, or one without a cluster_name"
            yield fail(f"block store {name}", what, "write it as kvcm.registry_storage.uri")
    for name, each in stores.items():
        for finding in check_shared_store(each):
            yield finding._replace(check=f"block store {name}") if finding.check == _CHECK else finding
    yield from _startup_storage(settings)


def _certificates(described: dict[str, str]) -> Iterator[Finding]:
    now = time.time()
    if cert_file := described.get("kvcm.tls.cert_file", ""):
        yield from check_certificate(cert_file, described.get("kvcm.tls.key_file", ""), now)
    if ca_file := described.get("kvcm.tls.client_ca_file", ""):
        yield from check_authorities(ca_file, now)


def _startup_storage(settings: Settings) -> Iterator[Finding]:
    if not settings.startup_config:
        return
    unknown: list[str] = []
    try:
        document = parse_startup_document(Path(settings.startup_config).read_text(encoding="utf-8"), unknown.append)
    except (OSError, UnicodeDecodeError, InvalidArgumentError) as error:
        found = f"kvcm.startup_config {settings.startup_config}: {error}"
        yield Finding(Level.FAIL, "settings", found, "correct it: `kvcm serve` refuses it too")
        return
    for text in unknown:
        yield Finding(Level.WARN, "settings", text, "correct the name, or leave it out")
    yield from check_storage(document.storage)
