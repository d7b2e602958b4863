"""How a manager starts, drains and ends, and the answers of probes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from ports import free_port
from probe_clients import ask, health, starting_manager, watched
from redis_servers import Standalone, standalone
from structlog.testing import capture_logs
from test_transport_drivers import ON_ADMIN_PORT, SERVICES, eventually, post
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site, group_spec

from kvcm import __version__
from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.index.meta_index import IndexHandle
from kvcm.reclaim.eviction_order import EvictionOrders
from kvcm.reclaim.needs import Limits
from kvcm.reclaim.reclaimer import Reclaimer
from kvcm.service import http_server
from kvcm.service.admission import ServingGate
from kvcm.service.http_server import HttpApp, HttpServer, Page, PageRequest
from kvcm.serving import ShutdownWatch, log_unfinished_tasks


def _refusal(directory: Path, *arguments: str, **environment: str) -> str:
    """The one line that a start which fails says, besides its log."""
    done = run_kvcm(directory, "serve", "--data-dir", str(directory / "data"), *arguments, **environment)
    assert done.returncode == 1, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvcm: ")
    return lines[0]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_exits_with_0(tmp_path: Path, option: str) -> None:
    done = run_kvcm(tmp_path, option)
    assert (done.returncode, "serve" in done.stdout, done.stderr) == (0, True, "")
    done = run_kvcm(tmp_path, "serve", option)
    assert (done.returncode, "--insecure" in done.stdout, done.stderr) == (0, True, "")


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_version_exits_with_0(tmp_path: Path, option: str) -> None:
    done = run_kvcm(tmp_path, option)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"kvcm {__version__}", "")


def test_an_unknown_option_or_command_is_an_error(tmp_path: Path) -> None:
    for arguments in (("serve", "--nope"), ("nope",)):
        assert run_kvcm(tmp_path, *arguments).returncode == 2


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken() -> Iterator[str]:
    """A port with a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("name", ["rpc_port", "http_port", "admin_rpc_port", "admin_http_port"])
def test_a_port_in_use_ends_the_start_with_1_and_one_clear_line(tmp_path: Path, taken: str, name: str) -> None:
    ports = {"rpc_port": "0", "http_port": "0", "admin_rpc_port": str(free_port()), "admin_http_port": "0", name: taken}
    line = _refusal(tmp_path, *(part for key, port in ports.items() for part in ("-e", f"kvcm.service.{key}={port}")))
    assert (f"127.0.0.1:{taken}" in line, "cannot be bound" in line) == (True, True)
    assert not (tmp_path / "data").exists(), "it ends before metadata is touched"


def test_a_bad_setting_of_any_source_is_one_line(tmp_path: Path) -> None:
    assert "kvcm.service.rpc_port" in _refusal(tmp_path, "-e", "kvcm.service.rpc_port=x")
    (tmp_path / "kvcm.conf").write_text("kvcm.service.http_port=-1\n")
    assert "kvcm.service.http_port" in _refusal(tmp_path, "-c", "kvcm.conf")
    assert "kvcm.service.host" in _refusal(tmp_path, **{"kvcm.service.host": "nowhere.example"})


def test_a_data_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    assert str(tmp_path / "data") in _refusal(tmp_path)


# ── Startup document ─────────────────────────────────────────────────────────────────────────────────────────────────


def _document(**changes: Any) -> dict[str, Any]:
    storage = {"type": "dummy", "global_unique_name": "s", "storage_spec": {"root_path": "r"}}
    cache = {"cache_prefer_strategy": 2, "meta_indexer_config": {"max_key_count": 64}}
    group = {**group_spec("g", "s"), "quota": {"capacity": 1000}, "cache_config": cache}
    return {"storage_config": storage, "instance_group": group, **changes}


def _document_file(directory: Path, document: object) -> str:
    path = directory / "startup.json"
    path.write_text(json.dumps(document))
    return f"kvcm.startup_config={path}"


def test_the_startup_document_gives_the_first_storage_and_group(tmp_path: Path) -> None:
    with manager(tmp_path, _document_file(tmp_path, _document())) as process, process.api() as api:
        (storage,) = api.ok("AdminService.ListStorage").storage
        assert (storage.global_unique_name, storage.dummy.root_path) == ("s", "r")
        (group,) = api.ok("GroupService.ListInstanceGroup").instance_groups
        assert (group.name, list(group.storage_candidates), group.quota.capacity) == ("g", ["s"], 1000)
        assert group.cache_config.meta_indexer_config.max_key_count == 64
        site = Site(api)
        assert len(site.write(site.instance("g"), [1])) == 1


def test_a_malformed_startup_document_ends_the_start_and_names_the_key(tmp_path: Path) -> None:
    document = _document_file(tmp_path, _document(instance_group={"name": 7}))
    assert "instance_group.name" in _refusal(tmp_path, "-e", document)
    document = _document_file(tmp_path, _document(instance_group={}))
    assert "InstanceGroup: {name" in _refusal(tmp_path, "-e", document)


# ── A start ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_come_from_file_option_and_environment_in_that_order(tmp_path: Path) -> None:
    (tmp_path / "kvcm.conf").write_text(
        "kvcm.leader_elector.node_id=file\nkvcm.cluster_id=file\nkvcm.limits.max_keys_per_request=9 # few\n"
        "kvcm.service.rpc_prot=1\nkvcm.limits.max_queue_ms=60000\n"
    )
    options = ("-c", str(tmp_path / "kvcm.conf"), "kvcm.leader_elector.node_id=option", "kvcm.cluster_id=option")
    with manager(tmp_path, *options, **{"kvcm.leader_elector.node_id": "environment"}) as process, process.api() as api:
        assert api.ok("GetClusterInfo").self_node_id == "environment"
        site = Site(api)
        instance = site.instance()
        (uris,) = site.write(instance, [1])
        assert "/option/" in uris["kv"]
        code, message = api.refused("StartWriteCache", instance_id=instance, block_keys=range(10))
        assert (code, "9" in message) == ("INVALID_ARGUMENT", True)
        (warning,) = [event["reason"] for event in process.events("settings") if event["level"] == "warning"]
        assert ("kvcm.service.rpc_prot" in warning, "kvcm.service.rpc_port" in warning) == (True, True)


def test_the_cluster_id_survives_a_restart_in_the_data_directory(tmp_path: Path) -> None:
    found: list[str] = []
    for _ in range(2):
        with manager(tmp_path) as process, process.api() as api:
            site = Site(api)
            (uris,) = site.write(site.instance("default"), [1])
            found.append(uris["kv"].removeprefix(f"file://nfs_01{process.data_dir}/nfs/").partition("/")[0])
    assert found[0] == found[1] != ""


@pytest.mark.parametrize("host", [(), ("kvcm.service.host=0.0.0.0",)])
def test_with_insecure_every_address_is_served_unless_one_is_named(tmp_path: Path, host: tuple[str, ...]) -> None:
    with manager(tmp_path, "--insecure", *host) as process:
        port = int(process.address.admin_rpc.rpartition(":")[2])
        with socket.create_connection(("127.0.0.2", port), timeout=30):
            pass


def test_a_daemon_prints_its_process_id_and_lets_go_of_the_output(tmp_path: Path) -> None:
    ports = ("rpc_port=0", "http_port=0", "admin_http_port=0", f"admin_rpc_port={free_port()}")
    options = [part for port in ports for part in ("-e", f"kvcm.service.{port}")]
    command = [sys.executable, "-m", "kvcm", "serve", "-d", "--data-dir", str(tmp_path / "data"), *options]
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        try:
            assert starter.wait(60) == 0
            eventually(lambda: '"serving"' in log.read_text(), 60)
            # `pid=$(kvcm serve -d)` waits for the end of the output, not only for the starter.
            os.set_blocking(starter.stdout.fileno(), False)
            rest = starter.stdout.read()
        finally:
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: '"stopped"' in log.read_text(), 60)
    assert rest == b"", "the daemon holds the output of its starter"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_an_idle_manager_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with manager(tmp_path) as process:
        process.signal(number)
        assert process.wait() == 0
        assert "Traceback" not in process.log_text()
        assert process.events("stopped")


def test_a_port_is_free_for_the_next_manager_at_once(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")}
    settings = [f"kvcm.service.{name}={port}" for name, port in ports.items()]
    for directory in ("first", "second"):
        with manager(tmp_path / directory, *settings) as process, process.api("http") as api:
            assert [int(address.rpartition(":")[2]) for address in process.address] == [*ports.values()]
            assert api.ok("GetClusterInfo").self_node_id
            process.signal(signal.SIGTERM)
            assert process.wait() == 0


@contextlib.contextmanager
def slow_request(process: ManagerProcess) -> Iterator[socket.socket]:
    """A request in flight: all of it is sent but its last byte, `}`."""
    host, _, port = process.address.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /api/getClusterInfo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert b"100 Continue" in connection.recv(1000)
        connection.sendall(b"{")
        yield connection


def finish(connection: socket.socket) -> tuple[int, str | None]:
    """Send the last byte and return the status of the answer, and what it says of the connection."""
    connection.sendall(b"}")
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status, response.headers["connection"]


def refuses_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_before_it_stops_it_says_so_gives_up_the_lead_and_serves_on(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.drain_delay_ms=3600000") as process:
        address = process.address
        with watched(address.rpc) as data, watched(address.admin_rpc) as admin, process.api("http") as api:
            assert api.ok("AdminService.GetManagerClusterInfo").leader_node_id
            process.signal(signal.SIGTERM)
            eventually(lambda: data.seen == admin.seen == ["SERVING", "NOT_SERVING"])
            assert ask(address.http, "/readyz").status == 503
            assert b"[-]staying failed" in ask(address.admin_http, "/readyz?verbose").body
            assert [ask(address.http, path).status for path in ("/livez", "/startupz")] == [200, 200]
            eventually(lambda: not api.ok("AdminService.GetManagerClusterInfo").leader_node_id)
            site = Site(api)
            assert len(site.write(site.instance(), [1])) == 1
            assert data.ended == admin.ended == []
        process.signal(signal.SIGINT)  # the second signal ends it at once
        assert process.wait() == -signal.SIGINT
        assert not process.events("stopped")


def test_while_the_last_requests_finish_others_are_turned_away(tmp_path: Path) -> None:
    patient = "kvcm.service.drain_timeout_ms=60000"
    with manager(tmp_path, patient) as process, slow_request(process) as in_flight, process.api("grpc") as over_grpc:
        connection = http.client.HTTPConnection(process.address.http, timeout=30)
        post(connection, "/api/getClusterInfo", b"{}")
        over_grpc.ok("GetClusterInfo")
        with watched(process.address.rpc) as watch:
            process.signal(signal.SIGTERM)
            eventually(lambda: all(map(refuses_connections, process.address)))
            answer = post(connection, "/api/getClusterInfo", b"{}")
            assert (answer.status, answer.body) == (503, b"{}")
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["connection"] == "close"
            assert "stopping" in answer.headers["x-kvcm-error"]
            with pytest.raises(grpc.RpcError) as refused:
                over_grpc.ok("GetClusterInfo")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert finish(in_flight) == (200, "close")  # or its client would send the next request into nothing
            assert process.wait() == 0
            eventually(lambda: watch.ended)
        assert (watch.seen, watch.ended) == (["SERVING", "NOT_SERVING"], [grpc.StatusCode.UNAVAILABLE])
        assert process.events("stopped")
        assert not process.events("requests_cut_off")
        assert process.events("tasks_left") == []


async def test_a_task_that_is_left_at_the_end_is_reported() -> None:
    async def forgotten() -> None:
        await asyncio.sleep(3600)

    with structlog.testing.capture_logs() as quiet:
        await log_unfinished_tasks()
    task = asyncio.create_task(forgotten())
    with structlog.testing.capture_logs() as reported:
        await log_unfinished_tasks()
    task.cancel()
    assert quiet == []
    assert [(event["event"], event["count"]) for event in reported] == [("tasks_left", 1)]
    assert "forgotten" in reported[0]["tasks"][0]


async def test_an_event_loop_that_stood_still_is_not_quiet() -> None:
    waiting = asyncio.create_task(ServingGate().wait_until_quiet())
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop has not seen what came meanwhile
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    await waiting


def test_a_request_that_does_not_finish_in_time_is_cut_off(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.drain_timeout_ms=100") as process, slow_request(process):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert [event["in_flight"] for event in process.events("requests_cut_off")] == [1]


def test_a_manager_that_is_still_starting_ends_at_once_with_0(tmp_path: Path) -> None:
    with standalone(tmp_path / "redis") as redis:
        redis.server.pause()
        uri = redis.uri("starting", timeout_ms=600_000, connect_timeout_ms=600_000)
        with starting_manager(tmp_path, f"kvcm.registry_storage.uri={uri}") as process:
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert process.events("stopped")
            assert not process.events("serving")
            assert "Traceback" not in process.log_text()
        redis.server.resume()


def _write_until_it_fails(site: Site, written: list[int], endings: list[Exception]) -> None:
    """Write one block after another; note how many were written, and why no more."""
    instance = site.instance("default")
    for key in itertools.count(1):
        try:
            site.write(instance, [key])
        except Exception as error:
            endings.append(error)
            return
        written[0] = key


def test_under_load_requests_fail_because_of_the_drain_alone(tmp_path: Path) -> None:
    transports = ("grpc", "http") * 3
    written: list[list[int]] = [[0] for _ in transports]
    endings: list[list[Exception]] = [[] for _ in transports]
    with manager(tmp_path) as process, contextlib.ExitStack() as stack:
        sites = [Site(stack.enter_context(process.api(name))) for name in transports]
        clients = [
            threading.Thread(target=_write_until_it_fails, args=each)
            for each in zip(sites, written, endings, strict=True)
        ]
        for client in clients:
            client.start()
        eventually(lambda: all(count[0] >= 20 for count in written), 60)
        process.signal(signal.SIGTERM)
        for client in clients:
            client.join()
        assert process.wait() == 0
        assert "Traceback" not in process.log_text()
        assert process.events("tasks_left") == []
    assert all(_is_draining(name, *errors) for name, errors in zip(transports, endings, strict=True)), endings


def _is_draining(transport: str, error: Exception) -> bool:
    if transport == "grpc":
        return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
    turned_away = isinstance(error, AssertionError) and "status=503" in str(error)
    return turned_away or isinstance(error, ConnectionRefusedError | ConnectionResetError)


async def _stands_here(event: asyncio.Event) -> None:
    await event.wait()


async def _for_ever(event: asyncio.Event) -> None:
    await _stands_here(event)


async def test_tasks_and_where_they_stand_are_reported_until_the_end() -> None:
    event = asyncio.Event()
    with capture_logs() as logs:
        with ShutdownWatch(after_seconds=0.0) as end:
            task = asyncio.create_task(_for_ever(event))
            await asyncio.sleep(0)
            assert logs == []  # nothing has to end yet
            end.begin()
            for _ in range(10):  # turns of the loop
                await asyncio.sleep(0)
        reported = len(logs)
        assert reported > 1
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(logs) == reported
    event.set()
    await task
    assert {log["event"] for log in logs} == {"ending_is_slow"}
    assert any("_for_ever > _stands_here > Event.wait" in place for place in logs[0]["tasks"])


REQUEST = b"GET /page HTTP/1.1\r\nhost: x\r\n\r\n"


async def _page(_request: PageRequest) -> Page:
    return Page(200, b"here")


async def _started() -> HttpServer:
    server = HttpServer("127.0.0.1", 0)
    await server.start(HttpApp(ServingGate(), 1000, {"/page": _page}))
    return server


async def _answer(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(connection, 1000)


async def test_a_connection_that_the_system_has_accepted_already_is_answered() -> None:
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as waiting:
        waiting.sendall(REQUEST)
        server.stop_accepting()  # the loop has had no turn to accept it
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=30)
        assert (await _answer(waiting)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_a_connection_whose_request_is_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_POLLS", 6000)
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as late:
        stop = asyncio.create_task(server.stop())
        await asyncio.wait([stop], timeout=0.3)  # without the wait it ends within that
        assert not stop.done()
        late.sendall(REQUEST)
        assert (await _answer(late)).startswith(b"HTTP/1.1 200")
        await stop


async def test_a_client_that_never_sends_a_request_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_POLLS", 2)
    server = await _started()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
        await server.stop()
        assert await _answer(silent) == b""


PROBES = ["/livez", "/readyz", "/startupz"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Standalone]:
    """A server that tests may stop."""
    with standalone(tmp_path / "redis") as made:
        yield made
        made.server.resume()


@pytest.mark.parametrize("path", PROBES)
def test_a_serving_manager_is_well_on_both_ports(server: ManagerProcess, path: str) -> None:
    for address in (server.address.http, server.address.admin_http):
        answer = ask(address, path)
        assert (answer.status, answer.body) == (200, b"ok")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("path", PROBES)
def test_reasons_are_reported_on_the_admin_port_alone(server: ManagerProcess, path: str) -> None:
    assert ask(server.address.http, f"{path}?verbose").body == b"ok"
    reported = ask(server.address.admin_http, f"{path}?verbose").body.decode().splitlines()
    assert reported[-1] == f"{path[1:]} check passed"
    assert [line for line in reported[:-1] if not line.startswith("[+]")] == []
    assert len(reported) > 1


def test_probes_are_pages_and_nothing_else(server: ManagerProcess) -> None:
    assert ask(server.address.http, "/readyz", "POST").status == 404
    assert ask(server.address.http, "/readyz/").status == 404


def test_grpc_reports_the_health_of_each_service_where_it_is_served(server: ManagerProcess) -> None:
    for name, service in SERVICES.items():
        here, there = server.address.rpc, server.address.admin_rpc
        assert health(there if name in ON_ADMIN_PORT else here, service.full_name) == "SERVING"
        with watched(here if name in ON_ADMIN_PORT else there, service.full_name) as elsewhere:
            assert elsewhere.seen == ["SERVICE_UNKNOWN"]
    assert [health(address) for address in (server.address.rpc, server.address.admin_rpc)] == ["SERVING"] * 2


def test_while_the_store_is_slow_a_starting_manager_lives_and_refuses_calls(tmp_path: Path, redis: Standalone) -> None:
    redis.server.pause()
    uri = redis.uri("slow", timeout_ms=600_000, connect_timeout_ms=600_000)
    with starting_manager(tmp_path, f"kvcm.registry_storage.uri={uri}") as process:
        address = process.address
        for port in (address.http, address.admin_http):
            assert [ask(port, path).status for path in PROBES] == [200, 503, 503]
            assert ask(port, "/readyz").body == b"not ready"
        assert b"[-]started failed: loading metadata" in ask(address.admin_http, "/startupz?verbose").body
        for port, path in ((address.http, "/api/getClusterInfo"), (address.admin_http, "/api/checkHealth")):
            refused = ask(port, path, "POST")
            assert (refused.status, refused.body) == (503, b"{}")
            assert int(refused.headers["retry-after"]) >= 1
            assert "starting" in refused.headers["x-kvcm-error"]
        with watched(address.rpc) as watch, process.api("grpc") as api:
            assert watch.seen == ["NOT_SERVING"]
            with pytest.raises(Exception, match="starting"):
                api.ok("GetClusterInfo")
            assert not process.events("serving")
            redis.server.resume()
            eventually(lambda: process.events("serving"), 60)
            eventually(lambda: watch.seen == ["NOT_SERVING", "SERVING"])
            assert api.ok("GetClusterInfo").self_node_id
        assert [ask(address.http, path).status for path in PROBES] == [200, 200, 200]


def test_a_manager_whose_store_is_gone_is_not_ready_until_it_is_back(tmp_path: Path, redis: Standalone) -> None:
    uri = redis.uri("gone")
    with manager(tmp_path, f"kvcm.registry_storage.uri={uri}") as process, watched(process.address.rpc) as watch:
        eventually(lambda: ask(process.address.http, "/readyz").status == 200)
        redis.server.pause()
        eventually(lambda: ask(process.address.http, "/readyz").status == 503)
        assert b"[-]metadata-store failed: " in ask(process.address.admin_http, "/readyz?verbose").body
        assert ask(process.address.http, "/livez").status == 200
        assert ask(process.address.http, "/startupz").status == 200
        redis.server.resume()
        eventually(lambda: ask(process.address.http, "/readyz").status == 200)
        eventually(lambda: watch.seen[:3] == ["SERVING", "NOT_SERVING", "SERVING"])


_BLOCKS = 500


async def _ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    try:
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_livez_answers_while_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        site.write(site.instance("default"), list(range(1, _BLOCKS + 1)))
        process.process.terminate()
        assert process.wait() == 0
    http_port, enough = free_port(), threading.Event()
    begin, update, answers = Reclaimer.begin, EvictionOrders.update, list[bytes]()

    def held(orders: EvictionOrders, handles: Iterable[IndexHandle], limits: Limits) -> None:
        assert enough.wait(60)
        update(orders, handles, limits)

    async def watched(reclaimer: Reclaimer) -> None:
        beginning = asyncio.create_task(begin(reclaimer))
        while not beginning.done():
            answers.append(await _ask(http_port))
            if len(answers) == 2:
                enough.set()
        await beginning

    monkeypatch.setattr(Reclaimer, "begin", watched)
    monkeypatch.setattr(EvictionOrders, "update", held)
    settings = Settings(
        rpc_port=0, http_port=http_port, admin_rpc_port=0, admin_http_port=0, data_dir=str(tmp_path / "data")
    )
    async with Manager(settings).running():
        pass
    assert len(answers) >= 2
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}
