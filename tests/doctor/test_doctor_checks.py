"""What the doctor finds in settings, files, ports, certificates, the store and a manager."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from uuid import uuid4

import pytest
from ports import free_port
from redis_servers import Standalone
from waiting import until

from kvcm.config import BlockStoreUri, Settings
from kvcm.doctor import host
from kvcm.doctor.checks import StoreFacts, check_settings, check_shared_store, findings_of
from kvcm.doctor.findings import Finding, Level, check_skew
from kvcm.doctor.host import combinations
from kvcm.doctor.manager import above_watermarks, check_reachable, check_storage, readiness, status_of
from kvcm.model.clock import SystemClock
from kvcm.model.storages import DummyStorageSpec, MooncakeStorageSpec, NfsStorageSpec, StorageConfig, ThreeFSStorageSpec
from kvcm.service.usage_values import GroupUsage, StorageStatus, Usage, UsageReport
from kvcm.storage.health import HealthState
from kvcm.store.redis.uri import Address, parse_redis_uri
from kvcm.store.rocks import CommitLog, Fsync

DAY = 86_400.0


class Pair(NamedTuple):
    """A certificate that vouches for itself, and its key."""

    cert: str
    key: str


def _made(directory: Path, name: str, *options: str) -> Pair:
    made = Pair(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
         "365", "-subj", f"/CN={name}", *options, "-keyout", made.key, "-out", made.cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One for a year and two names."""
    names = "subjectAltName=DNS:kvcm.example,IP:10.0.0.1"
    return _made(tmp_path_factory.mktemp("pair"), "good", "-addext", names)


def _findings(pair: Pair, now: float | None = None) -> list[Finding]:
    return list(host.check_certificate(pair.cert, pair.key, time.time() if now is None else now))


def test_a_good_certificate_reports_its_names_and_its_end(pair: Pair) -> None:
    (finding,) = _findings(pair)
    assert (finding.level, "kvcm.example, 10.0.0.1" in finding.found) == (Level.OK, True)
    assert "ends in 36" in finding.found
    assert "notAfter" in host.certificate_of(pair.cert, pair.key)


def test_one_that_has_really_ended_cannot_be_shaken_hands_with(tmp_path: Path) -> None:
    pair, request = _made(tmp_path, "ended"), tmp_path / "request"
    ask = ["openssl", "req", "-new", "-key", pair.key, "-subj", "/CN=ended", "-out", request]
    sign = ["openssl", "x509", "-req", "-in", request, "-signkey", pair.key, "-days", "-1", "-out", pair.cert]
    for command in (ask, sign):
        subprocess.run(command, check=True, capture_output=True)
    (finding,) = _findings(pair)
    assert (finding.level, "has expired" in finding.found) == (Level.FAIL, True)


def test_a_key_of_another_certificate_is_a_failure(pair: Pair, tmp_path: Path) -> None:
    other = _made(tmp_path, "other")
    (finding,) = _findings(Pair(pair.cert, other.key))
    assert (finding.level, "cannot be used together" in finding.found) == (Level.FAIL, True)


def test_a_certificate_without_names_is_reported(tmp_path: Path) -> None:
    assert [each.level for each in _findings(_made(tmp_path, "nameless"))] == [Level.OK, Level.WARN]


def test_a_file_that_is_no_certificate_is_a_failure(pair: Pair, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    assert _findings(Pair(str(text), str(text)))[0].level is Level.FAIL
    assert "is not a file" in _findings(Pair(str(tmp_path / "none"), pair.key))[0].found


def test_authorities_are_listed_with_their_ends(pair: Pair, tmp_path: Path) -> None:
    (finding,) = host.check_authorities(pair.cert, time.time())
    assert (finding.level, "authority good" in finding.found) == (Level.OK, True)
    text = tmp_path / "text"
    text.write_text("hello")
    (finding,) = host.check_authorities(str(text), time.time())
    assert finding.level is Level.FAIL
    (finding,) = host.check_authorities(str(tmp_path / "none"), time.time())
    assert finding.level is Level.FAIL


@pytest.mark.parametrize(("left", "level"), [(15 * DAY, Level.OK), (13 * DAY, Level.WARN), (-1.0, Level.FAIL)])
def test_expiry(left: float, level: Level) -> None:
    assert host.check_expiry("it", 1e9 + left, 1e9).level is level


GIB = 1 << 30


def _one(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_a_directory_that_can_be_written_is_fine(tmp_path: Path) -> None:
    finding = _one(host.check_directory("place", tmp_path, is_made=False))
    assert finding.level is not Level.FAIL
    assert str(tmp_path) in finding.found


def test_a_directory_that_is_not_there_is_made_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert _one(host.check_directory("place", path, is_made=True)).level is Level.OK
    missing = _one(host.check_directory("place", path, is_made=False))
    assert (missing.level, missing.found) == (Level.FAIL, f"{path} does not exist on this host")


def test_a_file_in_the_place_of_a_directory_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert _one(host.check_directory("place", path, is_made=True)).level is Level.FAIL


@pytest.mark.parametrize(
    ("free", "whole", "level"),
    [
        (500 * GIB, 1000 * GIB, Level.OK),
        (49 * GIB, 1000 * GIB, Level.WARN),
        (GIB // 2, 1000 * GIB, Level.FAIL),
        (GIB // 2, GIB, Level.OK),  # a small medium is full at a tenth
        (GIB // 20, GIB, Level.FAIL),
    ],
)
def test_space(free: int, whole: int, level: Level) -> None:
    assert host.free_space("place", "it", free, whole).level is level


def test_the_process_that_has_the_metadata_open_is_found_without_taking_it(tmp_path: Path) -> None:
    lock = tmp_path / "metadata" / "LOCK"
    assert host.lock_holder(lock) == 0
    log = CommitLog(lock.parent, Fsync("never"), SystemClock())
    ask = f"from pathlib import Path; from kvcm.doctor.host import lock_holder; print(lock_holder(Path({str(lock)!r})))"
    try:  # a lock of the process itself is not in its own way
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    finally:
        asyncio.run(log.close())
    assert int(asked.stdout) == os.getpid()
    assert host.lock_holder(lock) == 0
    assert [each.level for each in host.check_metadata_directory(Settings(data_dir=str(tmp_path)))] != [Level.FAIL]
    assert list(host.check_metadata_directory(Settings())) == []


def _settings(**ports: int) -> Settings:
    unused = {"rpc_port": 0, "http_port": 0, "admin_rpc_port": 0, "admin_http_port": 0}
    return Settings(**{**unused, **ports})


def test_a_free_port_is_free_and_one_of_a_stranger_is_not() -> None:
    port = free_port()
    assert (
        _one(host.check_ports(_settings(http_port=port))).found == f"kvcm.service.http_port {port} is free on 127.0.0.1"
    )
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as stranger:
        thread = Thread(target=stranger.serve_forever, args=(0.01,))
        thread.start()
        try:
            for ports in ({"http_port": stranger.server_port}, {"rpc_port": stranger.server_port}):
                finding = _one(host.check_ports(_settings(**ports)))
                assert (finding.level, "does not answer as a manager" in finding.found) == (Level.FAIL, True)
        finally:
            stranger.shutdown()
            thread.join()


def test_one_port_for_two_things_is_a_failure_save_for_grpc() -> None:
    port = free_port()
    both = list(host.check_ports(_settings(http_port=port, admin_http_port=port)))
    assert [each.level for each in both] == [Level.OK, Level.FAIL]
    assert len(list(host.check_ports(_settings(rpc_port=port, admin_rpc_port=port)))) == 1


def test_an_address_of_another_host_cannot_be_taken() -> None:
    settings = Settings(
        host="192.0.2.1", insecure=True, http_port=1024, rpc_port=0, admin_rpc_port=0, admin_http_port=0
    )
    finding = _one(host.check_ports(settings))
    assert (finding.level, "EADDRNOTAVAIL" in finding.found) == (Level.FAIL, True)


def test_a_listening_process_can_be_reached() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert check_reachable("s", "master", address).level is Level.OK
    assert check_reachable("s", "master", address).level is Level.FAIL
    assert check_reachable("s", "master", "nonsense:port").level is Level.FAIL
    assert "was not tried" in check_reachable("s", "master", "host").found


@pytest.mark.parametrize(
    ("ahead", "level", "found"),
    [
        (0.4, Level.OK, "agrees"),
        (-1.0, Level.OK, "agrees"),
        (90.0, Level.WARN, "1.5 m ahead of"),
        (-7200.0, Level.WARN, "2 h behind"),
    ],
)
def test_clocks(ahead: float, level: Level, found: str) -> None:
    finding = check_skew("theirs", ahead)
    assert (finding.level, found in finding.found) == (level, True)


SAFE = {"data_dir": "/var/lib/kvcm"}


def _levels(settings: Settings) -> dict[Level, list[str]]:
    found = list(host.combinations(settings))
    return {level: [each.found for each in found if each.level is level] for level in Level}


def test_a_data_directory_on_loopback_is_nothing_to_speak_of() -> None:
    assert list(host.combinations(Settings(**SAFE))) == []


@pytest.mark.parametrize(
    ("changes", "level", "found"),
    [
        ({"data_dir": ""}, Level.WARN, "metadata is kept in memory only"),
        ({"registry_storage_uri": "memory://"}, Level.WARN, "metadata is kept in memory only"),
        ({"data_dir": "/tmp/kvcm"}, Level.WARN, "does not outlive a reboot"),
        ({"fsync": "never"}, Level.WARN, "kvcm.store.fsync is never"),
        ({"enable_debug_service": True}, Level.WARN, "lets callers make requests fail"),
        ({"host": "10.0.0.1", "insecure": True}, Level.FAIL, "every client that reaches 10.0.0.1 may do everything"),
        ({"registry_storage_uri": "redis://10.0.0.9/?cluster_name=c"}, Level.WARN, "has no password for 10.0.0.9:6379"),
        ({"registry_storage_uri": "redis://10.0.0.9/?cluster_name=c"}, Level.WARN, "in the clear"),
    ],
)
def test_dangerous_settings_are_reported(changes: dict[str, object], level: Level, found: str) -> None:
    texts = _levels(Settings(**{**SAFE, **changes}))[level]  # type: ignore[arg-type] # of many types
    assert any(found in text for text in texts), texts


def test_a_store_on_this_host_or_with_password_and_encryption_is_fine() -> None:
    for uri in ("redis://127.0.0.1/?cluster_name=c", "rediss://u:p@10.0.0.9/?cluster_name=c"):
        assert list(host.combinations(Settings(registry_storage_uri=uri))) == []


def test_a_store_that_is_none_is_no_store() -> None:
    assert host.redis_settings(Settings(registry_storage_uri="redis://host/")) is None
    assert host.redis_settings(Settings()) is None


def test_settings_are_read_as_serve_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text("kvcm.service.http_port=7000\nkvcm.logger.loglevel=4\nkvcm.service.io_thread_num=3\n")
    settings, found = host.read_settings(file, ["kvcm.service.http_port=7001"], {})
    assert settings is not None
    assert settings.http_port == 7001
    assert [each.level for each in found] == [Level.OK, Level.WARN, Level.WARN]
    assert "did you mean 'kvcm.logger.log_level'?" in found[1].found
    assert "kvcm.service.io_thread_num is set and has no effect" in found[2].found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kvcm.store.fsnyc=always", "unknown setting 'kvcm.store.fsnyc', did you mean 'kvcm.store.fsync'?"),
        ("kvcm.service.http_port=many", "kvcm.service.http_port is 'many', must be a whole number"),
        ("what is this", "is not key=value"),
        ("kvcm.service.host=10.0.0.1", "authentication is disabled"),
    ],
)
def test_settings_that_serve_refuses_are_a_failure(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "kvcm.conf"
    file.write_text(text)
    settings, (finding,) = host.read_settings(file, [], {})
    assert (settings, finding.level) == (None, Level.FAIL)
    assert found in finding.found


def test_a_file_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    settings, (finding,) = host.read_settings(tmp_path / "nowhere", [], {})
    assert (settings, finding.level, "cannot be read" in finding.found) == (None, Level.FAIL, True)


WHERE = Address("host", 6379)
GOOD = {"redis_version": "7.2.4", "maxmemory": "0", "maxmemory_policy": "noeviction", "aof_enabled": "1"}


def _bad(save: str | None = "", ahead: float = 0.0, **changes: str) -> list[Finding]:
    return [
        each for each in findings_of(WHERE, StoreFacts({**GOOD, **changes}, save, ahead)) if each.level is not Level.OK
    ]


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
        ({"aof_enabled": "0", "save": None}, Level.WARN, "its snapshots are unknown"),
        ({"ahead": 5.0}, Level.WARN, "5 s ahead of"),
    ],
)
def test_faults_of_a_server(changes: dict[str, object], level: Level, found: str) -> None:
    (finding,) = _bad(**changes)  # type: ignore[arg-type] # of many types
    assert (finding.level, found in finding.found, bool(finding.advice)) == (level, True, True)


def test_a_valkey_is_good_enough() -> None:
    found = findings_of(WHERE, StoreFacts({**GOOD, "valkey_version": "8.0.1"}, "", 0.0))
    assert next(iter(found)).found == "host:6379 answers, Valkey 8.0.1"


def test_a_real_server_is_asked(redis_standalone: Standalone) -> None:
    settings = parse_redis_uri(redis_standalone.uri("doctor"))
    until(lambda: {each.check: each.level for each in check_shared_store(settings)}["clocks"] is Level.OK)
    with redis_standalone.server.admin() as admin:
        before = admin.config_get("maxmemory-policy")["maxmemory-policy"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            texts = [each.found for each in check_shared_store(settings) if each.level is Level.FAIL]
        finally:
            admin.config_set("maxmemory-policy", before)
    assert any("maxmemory-policy allkeys-lru" in text for text in texts)


def test_block_stores_are_asked_too(redis_standalone: Standalone) -> None:
    stores = (
        BlockStoreUri("b", redis_standalone.uri("b")),
        BlockStoreUri("c", "redis://127.0.0.1:1/?cluster_name=c&timeout_ms=500"),
        BlockStoreUri("bad", "redis://x/"),
    )
    settings = Settings(registry_storage_uri=redis_standalone.uri("doctor"), block_stores=stores)
    found = list(check_settings(settings))
    assert any(each.check == "block store b" and "answers, Redis" in each.found for each in found)
    (away,) = (each for each in found if each.check == "block store c")
    assert (away.level, "127.0.0.1:1" in away.found) == (Level.FAIL, True)
    (bad,) = (each for each in found if each.check == "block store bad")
    assert (bad.level, "cluster_name" in bad.found) == (Level.FAIL, True)
    remote = Settings(block_stores=(BlockStoreUri("d", "redis://store.example/?cluster_name=d"),))
    texts = [each.found for each in combinations(remote)]
    assert (
        "kvcm.store.block_stores has no password for store.example:6379: every client can change all metadata" in texts
    )


def test_a_user_that_may_not_publish_is_reported(redis_standalone: Standalone) -> None:
    name = f"limited-{uuid4().hex}"
    uri = redis_standalone.uri("prod").replace("redis://", f"redis://{name}:secret@")
    with redis_standalone.server.admin() as admin:
        admin.execute_command("ACL", "SETUSER", name, "on", ">secret", "~*", "+@all", "resetchannels")
        (refused,) = [each for each in check_shared_store(parse_redis_uri(uri)) if "publish" in each.found]
        assert refused.level is Level.FAIL
        assert "channel prod:k" in refused.found
        assert refused.advice == "run `redis-cli acl setuser USER '&prod:k'`, and put it into its ACL file"
        admin.execute_command("ACL", "SETUSER", name, "&prod:*")
        assert not [each for each in check_shared_store(parse_redis_uri(uri)) if "publish" in each.found]
        admin.execute_command("ACL", "DELUSER", name)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    (finding,) = check_shared_store(parse_redis_uri("redis://127.0.0.1:1/?cluster_name=c&timeout_ms=500"))
    assert (finding.level, "127.0.0.1:1" in finding.found) == (Level.FAIL, True)


NOT_READY = "[+]started ok\n[-]metadata-store failed: no answer within 1 s\nreadyz check failed\n"


def test_readiness_is_reported_with_its_reasons() -> None:
    (ready,) = readiness("u", 200, "ok")
    assert ready.level is Level.OK
    (reason,) = readiness("u", 503, NOT_READY)
    assert (reason.level, reason.found) == (Level.FAIL, "u is not ready: metadata-store failed: no answer within 1 s")
    (silent,) = readiness("u", 503, "not ready")
    assert (silent.level, "does not say why" in silent.found) == (Level.FAIL, True)
    (stranger,) = readiness("u", 404, "")
    assert (stranger.level, "is it the admin port" in stranger.advice) == (Level.FAIL, True)


@pytest.mark.parametrize(
    ("status", "level"),
    [
        (StorageStatus("s", True, HealthState.SH_UP), Level.OK),
        (StorageStatus("s", True, HealthState.SH_UP, is_draining=True), Level.WARN),
        (StorageStatus("s", False, HealthState.SH_UP), Level.WARN),
        (StorageStatus("s", True, HealthState.SH_DEGRADED, "slow"), Level.WARN),
        (StorageStatus("s", True, HealthState.SH_DOWN, "gone"), Level.FAIL),
    ],
)
def test_the_health_of_a_storage(status: StorageStatus, level: Level) -> None:
    assert status_of(status).level is level


def _group(used: int, deleting: int = 0) -> UsageReport:
    usage = Usage(used, deleting, 100, 80, 70)
    return UsageReport((GroupUsage("g", usage, (), (), (), 0, 0, 0),), (), ())


def test_a_group_above_its_mark_is_reported_unless_it_is_full_which_is_reported_elsewhere() -> None:
    assert [each.level for each in above_watermarks(_group(81))] == [Level.WARN]
    assert above_watermarks(_group(81, deleting=1)) == []
    assert above_watermarks(_group(100)) == []


def test_roots_are_looked_at_from_this_host(tmp_path: Path) -> None:
    nfs = StorageConfig("s", NfsStorageSpec(f"{tmp_path}/"))
    assert [each.level for each in check_storage(nfs)] != [Level.FAIL]
    mount = StorageConfig("s", ThreeFSStorageSpec("c", str(tmp_path), "none"))
    assert [each.level for each in check_storage(mount)] == [Level.FAIL]
    assert list(check_storage(StorageConfig("s", DummyStorageSpec()))) == []


def test_an_unreachable_mooncake_master_is_a_failure() -> None:
    spec = MooncakeStorageSpec("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:1")
    found = list(check_storage(StorageConfig("s", spec)))
    assert found
    assert {each.level for each in found} <= {Level.FAIL}
    assert any("127.0.0.1:1 cannot be reached" in each.found for each in found)
