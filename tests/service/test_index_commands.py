"""`kvcm index` as operators run it, against stores that real managers filled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack, unpack
from typing import Any

import pytest
from command_runner import COMMANDS
from probe_clients import ask
from redis import Redis
from redis_servers import Standalone
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site
from typer.testing import CliRunner

from kvcm.model.clock import SystemClock
from kvcm.model.nodes import Endpoint, Vitals
from kvcm.registry.leadership import VitalsTable
from kvcm.registry.registry import ensure_schema
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri
from kvcm.store.rocks import CommitLog, Fsync

pytestmark = pytest.mark.e2e

KEYS = list(range(1, 41))


@pytest.fixture
def redis_uri(redis_standalone: Standalone) -> str:
    """An empty deployment on Redis."""
    return redis_standalone.uri(f"test-{secrets.token_hex(8)}")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The data directory of a manager that stored blocks and was stopped, and the id of the instance."""
    with manager(tmp_path_factory.mktemp("original")) as process:
        instance_id = _fill(process)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    return process.data_dir, instance_id


@pytest.fixture
def stored(tmp_path: Path, original: tuple[Path, str]) -> tuple[Path, str]:
    """A copy of the data directory for one test, where a manager in `m` has it, and the id of the instance."""
    data_dir, instance_id = original
    return Path(shutil.copytree(data_dir, tmp_path / "m" / "data")), instance_id


def _fill(process: ManagerProcess) -> str:
    with process.api() as api:
        site = Site(api)
        instance_id = site.instance()
        checksums = [{"location_specs": [{"name": "kv", "checksum": 2**64 - key}]} for key in KEYS]
        site.finish(instance_id, site.start(instance_id, KEYS), locations=checksums)
    return instance_id


def _found(process: ManagerProcess, instance_id: str) -> list[Any]:
    with process.api() as api:
        query = {"query_type": "QT_PREFIX_MATCH", "instance_id": instance_id, "block_keys": [*KEYS, 99]}
        return list(api.ok("GetCacheLocation", **query).locations)


def _index(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvcm(directory, "index", *arguments)


def _verified(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = _index(directory, "verify", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


def _data(directory: Path) -> tuple[str, str]:
    return "--data-dir", str(directory)


def _on(uri: str) -> tuple[str, str]:
    return "-e", f"kvcm.registry_storage.uri={uri}"


# ── Export and import ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deployment_moves_from_a_directory_to_redis(tmp_path: Path, stored: tuple[Path, str], redis_uri: str) -> None:
    data_dir, instance_id = stored
    with manager(tmp_path / "m") as first:
        before = _found(first, instance_id)
        first.signal(signal.SIGTERM)
        first.wait()
    assert len(before) == len(KEYS)
    file = tmp_path / "backup"
    done = _index(tmp_path, "export", str(file), *_data(data_dir))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "m"]
    done = _index(tmp_path, "import", str(file), "--dry-run", *_data(tmp_path / "copy"))
    assert (done.returncode, (tmp_path / "copy").exists()) == (0, False), done.stderr
    assert f"would add instance: {instance_id}" in done.stdout
    done = _index(tmp_path, "import", str(file), *_on(redis_uri))
    assert done.returncode == 0, done.stderr
    assert instance_id in done.stdout
    with manager(tmp_path / "n", f"kvcm.registry_storage.uri={redis_uri}") as second:
        assert _found(second, instance_id) == before
        # While a manager works on it, too.
        assert _verified(tmp_path, *_on(redis_uri))[0] == 0


def test_an_export_goes_through_a_pipe(tmp_path: Path, stored: tuple[Path, str]) -> None:
    data_dir, instance_id = stored
    command = [sys.executable, "-m", "kvcm", "index"]
    with subprocess.Popen([*command, "export", "-", *_data(data_dir)], stdout=subprocess.PIPE) as source:
        done = subprocess.run(
            [*command, "import", "-", *_data(tmp_path / "copy")],
            stdin=source.stdout, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, source.returncode) == (0, 0), done.stderr
    assert "a pipe cannot be checked as a whole first" in done.stderr
    assert instance_id in done.stdout
    code, report = _verified(tmp_path, *_data(tmp_path / "copy"))
    assert (code, report["looked_at"]["records"], report["looked_at"]["instances"]) == (0, len(KEYS), 1)


def test_an_export_does_not_replace_a_file_unasked(tmp_path: Path, stored: tuple[Path, str]) -> None:
    file = tmp_path / "backup"
    file.write_text("precious")
    done = _index(tmp_path, "export", str(file), *_data(stored[0]))
    assert (done.returncode, file.read_text()) == (1, "precious")
    assert done.stderr == f"kvcm: {file} exists: choose another name, or give --force to replace it\n"
    assert _index(tmp_path, "export", str(file), "--force", *_data(stored[0])).returncode == 0
    assert file.read_bytes().startswith(b"KVCMIDX")


def test_an_export_that_fails_leaves_no_file(tmp_path: Path, stored: tuple[Path, str]) -> None:
    done = _index(tmp_path, "export", str(tmp_path / "backup"), "--group", "nope", *_data(stored[0]))
    assert (done.returncode, done.stderr) == (1, "kvcm: instance group 'nope' does not exist\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_damaged_file_is_rejected_before_anything_is_written(tmp_path: Path, stored: tuple[Path, str]) -> None:
    file, copy = tmp_path / "backup", tmp_path / "copy"
    _index(tmp_path, "export", str(file), *_data(stored[0]))
    content = file.read_bytes()
    flipped = content[:-200] + bytes((content[-200] ^ 1,)) + content[-199:]
    for damaged, reason in ((content[:-30], "was cut off"), (flipped, "checksum")):
        file.write_bytes(damaged)
        done = _index(tmp_path, "import", str(file), *_data(copy))
        assert (done.returncode, reason in done.stderr, copy.exists()) == (1, True, False), done.stderr


def test_a_file_left_of_an_export_goes_and_a_link_is_not_followed(tmp_path: Path, stored: tuple[Path, str]) -> None:
    temporary, other = tmp_path / "backup.tmp", tmp_path / "other"
    temporary.write_text("half an export")
    done = _index(tmp_path, "export", str(tmp_path / "backup"), *_data(stored[0]))
    assert (done.returncode, temporary.exists()) == (0, False), done.stderr
    other.write_text("precious")
    temporary.symlink_to(other)
    done = _index(tmp_path, "export", str(tmp_path / "second"), *_data(stored[0]))
    assert done.returncode == 0
    done = _index(tmp_path, "export", "--force", str(tmp_path / "backup"), *_data(stored[0]))
    assert (done.returncode, other.read_text(), temporary.is_symlink()) == (1, "precious", True)
    assert done.stderr == f"kvcm: {temporary}: File exists\n"


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_directory_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with manager(tmp_path / "m") as process:
        for arguments, code in ((("export", "-"), 1), (("verify",), 2)):
            done = _index(tmp_path, *arguments, *_data(process.data_dir))
            assert done.returncode == code
            assert "is in use by another process: stop it" in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(("export", "-"), 1), (("verify",), 2), (("import", "x"), 1)])
def test_metadata_in_memory_is_refused(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    (tmp_path / "x").write_bytes(b"")
    done = _index(tmp_path, *arguments)
    assert done.returncode == code
    assert done.stderr.startswith("kvcm: the metadata is kept in the manager's memory only: give --data-dir")


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for arguments, code in ((("export", "-"), 1), (("verify",), 2)):
        done = _index(tmp_path, *arguments, *_data(tmp_path / "nothing"))
        assert (done.returncode, "does not exist" in done.stderr) == (code, True)
    assert list(tmp_path.iterdir()) == []


def test_a_redis_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = _index(tmp_path, "verify", *_on("redis://127.0.0.1:1/?cluster_name=x&timeout_ms=500"))
    assert done.returncode == 2
    assert done.stderr.startswith("kvcm: redis 127.0.0.1:1")


# ── Verification ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _log(data_dir: Path) -> Iterator[CommitLog]:
    log = CommitLog(data_dir / "metadata", Fsync.NEVER, SystemClock())
    yield log
    log.close_at_once()


def test_block_rows_that_cannot_be_read_are_dropped_on_demand_only(tmp_path: Path, stored: tuple[Path, str]) -> None:
    data_dir = stored[0]
    with _log(data_dir) as log:
        (uid,) = unpack(">I", next(log.read(b"b"))[0][1:5])
        log.append([(b"b" + pack(">Iq", registration, 5), b"\x01\xc1") for registration in (uid, 77)])
    for options in ((), ("--repair",)):
        done = _index(tmp_path, "verify", *options, *_data(data_dir))
        assert done.returncode == 1
        assert f"row: block 5 of registration {uid}: a stored block record" in done.stdout
        assert "[--repair with --drop-unreadable drops the row]" in done.stdout
    code, report = _verified(tmp_path, "--repair", "--drop-unreadable", *_data(data_dir))
    assert (code, report["clean"], report["mended"], len(report["findings"])) == (0, False, True, 2)
    code, report = _verified(tmp_path, *_data(data_dir))
    assert (code, report["clean"], report["looked_at"]["records"]) == (0, True, len(KEYS) - 1)


def test_document_rows_that_cannot_be_read_are_dropped_on_demand_only(tmp_path: Path, stored: tuple[Path, str]) -> None:
    data_dir = stored[0]
    with _log(data_dir) as log:
        log.append([(b"t\x08sessions0123456789", b"short"), (b"t", b""), (b"t\x08registrygroup/\xff", bytes(9))])
    done = _index(tmp_path, "export", "-", *_data(data_dir))
    assert (done.returncode, "run `kvcm index verify --repair --drop-unreadable`" in done.stderr) == (1, True)
    for options in ((), ("--repair",)):
        code, report = _verified(tmp_path, *options, *_data(data_dir))
        assert (code, report["clean"], report["mended"]) == (1, False, False)
        assert [each["where"] for each in report["findings"]] == [
            "document row 74",
            "document 'group/\\\\xff' of table 'registry'",
            "document '012345…' of table 'sessions'",
        ]
    code, report = _verified(tmp_path, "--repair", "--drop-unreadable", *_data(data_dir))
    assert (code, report["mended"], len(report["findings"])) == (0, True, 3)
    code, report = _verified(tmp_path, *_data(data_dir))
    assert (code, report["clean"], report["looked_at"]["records"]) == (0, True, len(KEYS))


def test_rows_of_an_instance_that_is_gone_are_found_and_dropped(tmp_path: Path, stored: tuple[Path, str]) -> None:
    data_dir = stored[0]
    with _log(data_dir) as log:
        _, value = next(log.read(b"b"))
        log.append([(b"b" + pack(">Iq", 77, 5), value)])
    code, report = _verified(tmp_path, *_data(data_dir))
    assert (code, [each["where"] for each in report["findings"]]) == (1, ["registration 77"])
    assert _verified(tmp_path, "--repair", *_data(data_dir))[0] == 0
    assert _verified(tmp_path, *_data(data_dir))[1]["clean"]


# ── Repair of a damaged data directory ───────────────────────────────────────────────────────────────────────────────


_BLOCK_ROW = re.compile(rb"b.{4}\0{7}[\x01-\x28]", re.DOTALL)
"""The row of one of the blocks, whatever the uid of the instance."""


def _flip_log(metadata: Path) -> None:
    """Damage a record in the middle of the log."""
    path = max(metadata.glob("*.log"), key=lambda path: int(path.stem))
    data = bytearray(path.read_bytes())
    row = _BLOCK_ROW.search(data)
    assert row is not None
    data[row.start() + 20] ^= 1
    path.write_bytes(data)


def _flip_table(metadata: Path) -> None:
    """Damage the first block of the only table, which holds the rows of blocks."""
    [path] = metadata.glob("*.sst")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def _remove_manifest(metadata: Path) -> None:
    for path in metadata.glob("MANIFEST-*"):
        path.unlink()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The data directory of a manager that stored blocks and was killed, and the id of the instance."""
    with manager(tmp_path_factory.mktemp("killed")) as process:
        instance_id = _fill(process)
    return process.data_dir, instance_id


@pytest.mark.parametrize(("harm", "lost"), [(_flip_log, True), (_remove_manifest, False)])
def test_a_damaged_directory_is_refused_and_repaired(
    tmp_path: Path, killed: tuple[Path, str], harm: Callable[[Path], None], *, lost: bool
) -> None:
    data_dir, instance_id = Path(shutil.copytree(killed[0], tmp_path / "m" / "data")), killed[1]
    harm(data_dir / "metadata")
    for command in (("serve",), ("index", "export", "-"), ("index", "import", str(killed[0]))):
        refused = run_kvcm(tmp_path, *command, *_data(data_dir))
        assert refused.returncode
    refused = run_kvcm(tmp_path, "serve", *_data(data_dir))
    assert "is damaged" in refused.stderr
    assert "`kvcm index repair`" in refused.stderr
    assert "blocks are gone" in refused.stderr
    assert _verified(tmp_path, *_data(data_dir))[0] == 1
    done = _index(tmp_path, "repair", "--json", *_data(data_dir))
    report = json.loads(done.stdout)
    assert (done.returncode, report["was_damaged"]) == (int(lost), True), done.stderr
    assert (report["lost_changes"] > 0) is lost
    assert report["blocks"] + report["lost_blocks"] == len(KEYS)
    assert _verified(tmp_path, "--repair", *_data(data_dir))[0] == 0
    assert _index(tmp_path, "repair", *_data(data_dir)).stdout == "nothing is damaged\n"
    with manager(tmp_path / "m") as process:
        assert len(_found(process, instance_id)) == len(KEYS) - report["lost_blocks"]
        metrics = ask(process.address.admin_http, "/metrics").body.decode()
    assert f'kvcm_store_lost_items{{what="changes"}} {report["lost_changes"]}' in metrics


def test_a_verification_repairs_damaged_files_too(tmp_path: Path, stored: tuple[Path, str]) -> None:
    data_dir = stored[0]
    _flip_table(data_dir / "metadata")
    code, report = _verified(tmp_path, "--repair", *_data(data_dir))
    assert (code, report["mended"], {each["check"] for each in report["findings"]}) == (1, False, {"store"})
    code, report = _verified(tmp_path, "--repair", "--drop-unreadable", *_data(data_dir))
    assert (code, report["mended"]) == (0, True)
    assert any(f"{len(KEYS)} blocks are gone" in each["what"] for each in report["findings"])
    assert _verified(tmp_path, *_data(data_dir))[1]["clean"]
    with manager(tmp_path / "m") as process:
        assert _found(process, stored[1]) == []


def test_a_store_of_schema_1_is_finalized_while_a_manager_serves(
    tmp_path: Path, redis_uri: str, redis_standalone: Standalone
) -> None:
    """What was registered before keeps a value per block; what is registered by a manager that starts afterwards keeps
    many blocks to one. Both are served side by side."""
    prefix = parse_redis_uri(redis_uri).cluster_name

    def values(client: Redis, kind: str) -> int:
        return len(client.keys(f"{prefix}:{kind}{{*"))

    asyncio.run(_begin_with_schema_1(redis_uri))
    with redis_standalone.server.admin() as client:
        with manager(tmp_path / "m", f"kvcm.registry_storage.uri={redis_uri}") as process:
            old = _fill(process)
            assert (values(client, "b"), values(client, "k")) == (len(KEYS), 0)
            for said in ("has schema 2 now, and had 1", "has schema 2 already"):
                done = _index(tmp_path, "finalize", *_on(redis_uri))
                assert (done.returncode, said in done.stdout) == (0, True), done.stderr
            assert len(_found(process, old)) == len(KEYS)
        with manager(tmp_path / "n", f"kvcm.registry_storage.uri={redis_uri}") as process:
            new = _fill(process)
            assert (values(client, "b"), values(client, "k")) == (len(KEYS), 1)
            assert len(_found(process, old)) == len(_found(process, new)) == len(KEYS)
            assert _verified(tmp_path, *_on(redis_uri))[1]["clean"]


async def _begin_with_schema_1(uri: str) -> None:
    client = RedisClient.of(parse_redis_uri(uri))
    try:
        await ensure_schema(RedisStore(client).table("registry"), RedisStore(client).flush)
    finally:
        await client.close()


def test_a_store_on_which_a_manager_of_another_release_runs_is_not_finalized(tmp_path: Path, redis_uri: str) -> None:
    asyncio.run(_begin_with_schema_1(redis_uri))
    asyncio.run(_report_another_release(redis_uri))
    done = _index(tmp_path, "finalize", *_on(redis_uri))
    assert (done.returncode, "m9 (0.0.1); replace them first" in done.stderr) == (1, True), done.stderr


async def _report_another_release(uri: str) -> None:
    client = RedisClient.of(parse_redis_uri(uri))
    endpoint, clock = Endpoint("m9", "h", 1, 2, 3, 4), SystemClock()
    vitals = Vitals(endpoint, "0.0.1", 1.0, clock.now(), "serving", False, {}, {}, (), (0,))
    try:
        await VitalsTable(clock, RedisStore(client).table("vitals")).publish(vitals)
    finally:
        await client.close()


def test_redis_is_not_repaired(tmp_path: Path, redis_uri: str) -> None:
    done = _index(tmp_path, "repair", *_on(redis_uri))
    assert (done.returncode, "redis-check-aof" in done.stderr) == (2, True)


def _usage_key(client: Redis, uri: str) -> bytes:
    return bytes(min(client.keys(f"{parse_redis_uri(uri).cluster_name}:u*")))


def test_redis_is_mended_while_a_manager_serves(tmp_path: Path, redis_uri: str, redis_standalone: Standalone) -> None:
    with manager(tmp_path / "m", f"kvcm.registry_storage.uri={redis_uri}") as process:
        instance_id = _fill(process)
        with redis_standalone.server.admin() as client:
            usage = _usage_key(client, redis_uri)
            client.hincrby(usage, "6/x", 111)
            client.zadd(usage.replace(b":u{", b":p{"), {b"12345678": 9e9})
        code, report = _verified(tmp_path, *_on(redis_uri))
        assert code == 1
        assert {"block", "usage"} <= {each["check"] for each in report["findings"]}
        assert _verified(tmp_path, "--repair", *_on(redis_uri))[0] == 0
        assert _verified(tmp_path, *_on(redis_uri))[1]["clean"]
        assert len(_found(process, instance_id)) == len(KEYS)


def test_sums_that_never_stand_still_are_neither_clean_nor_wrong(
    tmp_path: Path, redis_uri: str, redis_standalone: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "m", f"kvcm.registry_storage.uri={redis_uri}") as process:
        _fill(process)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    with redis_standalone.server.admin() as client:
        usage = _usage_key(client, redis_uri)
        client.hincrby(usage, "6/x", 1)

        async def disturb() -> None:
            client.hincrby(usage, "6/x", 1)

        monkeypatch.setattr("kvcm.commands.index_tools._pause", disturb)
        monkeypatch.setattr("kvcm.telemetry.logs.configure_logs", id)  # logs of this process stay as they are
        done = CliRunner().invoke(COMMANDS, ["index", "verify", "--json", *_on(redis_uri)])
    code, report = done.exit_code, json.loads(done.stdout)
    assert (code, report["clean"], report["findings"]) == (2, False, [])
    assert any(each.startswith("usage of instance") for each in report["unsettled"])
