"""The shared store, as the doctor sees it: what a server says, and a real one."""

from __future__ import annotations

import pytest
from redis_servers import Standalone

from kvcm.doctor.findings import Finding, Level
from kvcm.doctor.shared_store import Seen, check_shared_store, findings_of
from kvcm.store.redis.uri import Address, parse_redis_uri

WHERE = Address("host", 6379)
GOOD = {"redis_version": "7.2.4", "maxmemory": "0", "maxmemory_policy": "noeviction", "aof_enabled": "1"}


def _bad(save: str | None = "", ahead: float = 0.0, **changes: str) -> list[Finding]:
    return [each for each in findings_of(WHERE, Seen({**GOOD, **changes}, save, ahead)) if each.level is not Level.OK]


def test_a_good_server_has_nothing_wrong() -> None:
    assert _bad() == []


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({"redis_version": "6.2.14"}, Level.FAIL, "is Redis 6.2.14"),
        ({"redis_version": ""}, Level.FAIL, "host:6379 is"),
        ({"maxmemory_policy": "allkeys-lru"}, Level.FAIL, "maxmemory-policy allkeys-lru"),
        ({"maxmemory": "1000", "used_memory": "950"}, Level.WARN, "uses 950 B of 1000 B"),
        ({"rdb_last_bgsave_status": "err"}, Level.FAIL, "failed to save"),
        ({"aof_enabled": "0"}, Level.FAIL, "keeps nothing"),
        ({"aof_enabled": "0", "save": "3600 1"}, Level.WARN, "snapshots only (3600 1)"),
        ({"aof_enabled": "0", "save": None}, Level.WARN, "does not tell whether it makes snapshots"),
        ({"ahead": 5.0}, Level.WARN, "5 s ahead of"),
    ],
)
def test_what_is_wrong_with_a_server(changes: dict[str, object], level: Level, found: str) -> None:
    (finding,) = _bad(**changes)  # type: ignore[arg-type] # of many types
    assert (finding.level, found in finding.found, bool(finding.advice)) == (level, True, True)


def test_a_valkey_is_good_enough() -> None:
    found = findings_of(WHERE, Seen({**GOOD, "valkey_version": "8.0.1"}, "", 0.0))
    assert next(iter(found)).found == "host:6379 answers, Valkey 8.0.1"


def test_a_real_server_is_asked(redis_standalone: Standalone) -> None:
    settings = parse_redis_uri(redis_standalone.uri("doctor"))
    found = {each.check: each.level for each in check_shared_store(settings)}
    assert found["clocks"] is Level.OK
    with redis_standalone.server.admin() as admin:
        before = admin.config_get("maxmemory-policy")["maxmemory-policy"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            texts = [each.found for each in check_shared_store(settings) if each.level is Level.FAIL]
        finally:
            admin.config_set("maxmemory-policy", before)
    assert any("maxmemory-policy allkeys-lru" in text for text in texts)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    (finding,) = check_shared_store(parse_redis_uri("redis://127.0.0.1:1/?cluster_name=c&timeout_ms=500"))
    assert (finding.level, "127.0.0.1:1" in finding.found) == (Level.FAIL, True)
