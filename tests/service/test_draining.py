"""The order in which a manager ends, as clients and load balancers see it (docs/operations.md, "Start and stop")."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import structlog
from probe_clients import ask, starting_manager, watched
from redis_servers import standalone
from test_transport_drivers import eventually, post
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.draining import tell_left_tasks


@contextlib.contextmanager
def slow_request(process: ManagerProcess) -> Iterator[socket.socket]:
    """A request in flight: all of it is sent but its last byte, `}`."""
    host, _, port = process.address.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
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
        socket.create_connection((host, int(port)), timeout=5).close()
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
        process.signal(signal.SIGINT)  # whichever comes second ends it at once
        assert process.wait() == -signal.SIGINT
        assert not process.events("stopped")


def test_while_it_serves_on_http_connections_are_closed_behind_their_answers(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.drain_delay_ms=3600000") as process:
        connection = http.client.HTTPConnection(process.address.http, timeout=10)
        assert "connection" not in post(connection, "/api/getClusterInfo", b"{}").headers
        process.signal(signal.SIGTERM)
        eventually(lambda: ask(process.address.http, "/readyz").status == 503)
        answer = post(connection, "/api/getClusterInfo", b"{}")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        connection.close()


def test_while_the_last_requests_finish_others_are_turned_away(tmp_path: Path) -> None:
    with manager(tmp_path) as process, slow_request(process) as in_flight, process.api("grpc") as over_grpc:
        connection = http.client.HTTPConnection(process.address.http, timeout=10)
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


async def test_a_task_that_is_left_at_the_end_is_told() -> None:
    async def forgotten() -> None:
        await asyncio.sleep(3600)

    with structlog.testing.capture_logs() as quiet:
        await tell_left_tasks()
    task = asyncio.create_task(forgotten())
    with structlog.testing.capture_logs() as told:
        await tell_left_tasks()
    task.cancel()
    assert quiet == []
    assert [(event["event"], event["count"]) for event in told] == [("tasks_left", 1)]
    assert "forgotten" in told[0]["tasks"][0]


def test_what_does_not_finish_in_time_is_cut_off(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.drain_timeout_ms=100") as process, slow_request(process):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert [event["in_flight"] for event in process.events("requests_cut_off")] == [1]


def test_with_a_delay_it_ends_by_itself(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.drain_delay_ms=200") as process:
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


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


def test_a_restarted_manager_goes_on_where_the_drained_one_stopped(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api("grpc") as api:
        site = Site(api)
        instance = site.instance("default")
        started = site.start(instance, [1, 2])
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    with manager(tmp_path) as process, process.api("grpc") as api:
        fields = {"instance_id": instance, "write_session_id": started.write_session_id}
        api.ok("FinishWriteCache", success_blocks={"offset": 2}, **fields)
        assert len(Site(api).match(instance, [1, 2])) == 2


def _until_it_fails(request: Callable[[], None], answered: list[int]) -> Exception:
    while True:
        try:
            request()
        except Exception as error:
            return error
        answered[0] += 1


def test_under_load_requests_fail_because_of_the_drain_alone(tmp_path: Path) -> None:
    endings: list[tuple[str, Exception]] = []
    with manager(tmp_path) as process, contextlib.ExitStack() as stack:
        counts: list[list[int]] = []
        clients: list[threading.Thread] = []
        for name in ("grpc", "http") * 3:
            site = Site(stack.enter_context(process.api(name)))
            instance, count = site.instance("default"), [0]
            keys = iter(range(1, 1 << 40))

            def write(site: Site = site, instance: str = instance, keys: Iterator[int] = keys) -> None:
                site.write(instance, [next(keys)])

            def run(name: str = name, count: list[int] = count, write: Callable[[], None] = write) -> None:
                endings.append((name, _until_it_fails(write, count)))

            counts.append(count)
            clients.append(threading.Thread(target=run))
        for client in clients:
            client.start()
        eventually(lambda: all(count[0] >= 20 for count in counts), 30)
        process.signal(signal.SIGTERM)
        for client in clients:
            client.join(30)
        assert process.wait() == 0
        assert "Traceback" not in process.log_text()
        assert process.events("tasks_left") == []
    assert len(endings) == 6
    assert [ending for ending in endings if not _is_draining(*ending)] == []


def _is_draining(transport: str, error: Exception) -> bool:
    if transport == "grpc":
        return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
    turned_away = isinstance(error, AssertionError) and "status=503" in str(error)
    return turned_away or isinstance(error, ConnectionRefusedError | ConnectionResetError)
