"""A manager that is asked for more than it gives: what clients are told, and what is counted."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from probe_clients import ask, health
from test_transport_drivers import HttpDriver, eventually, post
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from connectors.client import AsyncManagerClient, ManagerClient
from connectors.exchanges import ClientSettings
from connectors.results import Outcome
from kvcm.protocol import meta_service_pb2 as meta

_MATCH = "/kv_cache_manager.proto.meta.MetaService/GetCacheLocation"
_RATE = "kvcm.limits.keys_per_second=1\nkvcm.limits.burst_keys=100\n"
_LANE = "kvcm.limits.long_request_keys=1000\nkvcm.limits.long_requests=1\nkvcm.limits.queued_long_requests=0\n"


class Limited:
    """A manager whose limits can be changed."""

    def __init__(self, process: ManagerProcess, file: Path) -> None:
        self.process = process
        self._file = file
        with process.api("grpc") as api:
            self.instance = Site(api).instance("default")

    def set(self, settings: str) -> None:
        self._file.write_text(settings)
        with self.process.api("grpc") as api:
            api.ok("ConfigService.ReloadConfig")

    def rejected(self, reason: str) -> int:
        """Return the count of the metric."""
        text = ask(self.process.address.admin_http, "/metrics").body.decode()
        found = re.search(rf'^kvcm_rpc_rejected_total\{{reason="{reason}"\}} ([0-9.]+)$', text, re.MULTILINE)
        assert found, text
        return round(float(found[1]))

    def query(self, **fields: object) -> meta.GetCacheLocationRequest:
        return meta.GetCacheLocationRequest(
            instance_id=self.instance,
            query_type=meta.QT_PREFIX_MATCH,
            **fields,  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    directory = tmp_path_factory.mktemp("limited")
    file = directory / "kvcm.conf"
    file.write_text("")
    with manager(directory, "-c", str(file)) as process:
        yield Limited(process, file)


def test_every_reason_has_a_series_from_the_start(server: ManagerProcess) -> None:
    text = ask(server.address.admin_http, "/metrics").body.decode()
    reasons = set(re.findall(r'^kvcm_rpc_rejected_total\{reason="([a-z]+)"\}', text, re.MULTILINE))
    assert reasons == {"draining", "rate", "overload", "deadline", "queue", "unauthenticated", "forbidden"}


def test_a_client_that_asks_for_too_many_keys_is_told_when_to_come_back(limited: Limited) -> None:
    before = limited.rejected("rate")
    limited.set(_RATE)
    try:
        with grpc.insecure_channel(limited.process.address.rpc) as channel:
            call = channel.unary_unary(_MATCH)
            keys = limited.query(block_keys=range(1000)).SerializeToString()
            call(keys, timeout=30)  # more than the burst: it leaves a debt of a quarter of an hour
            with pytest.raises(grpc.RpcError) as refused:
                call(keys, timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "more keys per second" in refused.value.details()
        pushback = dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]
        assert 900_000 < int(pushback) <= 1_000_000
        with limited.process.api("http") as api:
            assert isinstance(api.driver, HttpDriver)
            answer = post(api.driver.data, "/api/getClusterInfo", b"{}")
            assert (answer.status, answer.body) == (429, b"{}")
            assert 800 < int(answer.headers["retry-after"]) <= 1000
            api.ok("AdminService.CheckHealth")
        assert health(limited.process.address.rpc) == "SERVING"
        assert ask(limited.process.address.http, "/readyz").status == 200
        assert limited.rejected("rate") == before + 2
    finally:
        limited.set("")
    with limited.process.api("http") as api:
        api.ok("GetClusterInfo")


async def test_our_clients_do_not_ask_again_before_they_are_told_to(limited: Limited) -> None:
    limited.set(_RATE)
    try:
        before = limited.rejected("rate")
        with ManagerClient(limited.process.address.rpc, limited.instance, ClientSettings(30.0)) as client:
            assert client.match(range(1000)).outcome is Outcome.OK
            refused = client.match(range(1000))
            assert refused.outcome is Outcome.MISS_ON_ERROR
            assert "more keys per second" in refused.reason
        async with AsyncManagerClient(limited.process.address.rpc, limited.instance, ClientSettings(30.0)) as client_:
            assert (await client_.match(range(1000))).outcome is Outcome.MISS_ON_ERROR
        assert limited.rejected("rate") == before + 2
    finally:
        limited.set("")


def test_long_requests_that_find_no_place_are_turned_away_and_short_ones_served(limited: Limited) -> None:
    limited.set(_LANE)
    long = limited.query(token_ids=range(1 << 19)).SerializeToString()  # hashed in a thread: the loop goes on
    codes: Counter[grpc.StatusCode] = Counter()
    told: list[str] = []

    def ask_for_much() -> None:
        with grpc.insecure_channel(limited.process.address.rpc) as channel:
            call = channel.unary_unary(_MATCH)
            for _ in range(4):
                try:
                    call(long, timeout=60)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.RpcError as error:
                    codes[error.code()] += 1
                    told.append(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])

    asking = [threading.Thread(target=ask_for_much) for _ in range(4)]
    before = limited.rejected("queue")
    try:
        for thread in asking:
            thread.start()
        with limited.process.api("grpc") as api:
            while any(thread.is_alive() for thread in asking):
                api.ok(
                    "GetCacheLocation",
                    instance_id=limited.instance,
                    block_keys=range(10),
                    query_type="QT_PREFIX_MATCH",
                )
    finally:
        for thread in asking:
            thread.join()
        limited.set("")
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert sum(codes.values()) == 16
    assert limited.rejected("queue") - before == codes[grpc.StatusCode.UNAVAILABLE]
    assert all(int(pushback) >= 100 for pushback in told)


def test_a_loop_that_is_late_sheds_and_recovers(limited: Limited) -> None:
    """Requests of one moment wait for each other: those that wait longer than allowed are turned away."""
    limited.set("kvcm.limits.max_queue_ms=1\n")
    before = limited.rejected("overload") + limited.rejected("queue")
    statuses: Counter[int] = Counter()

    def ask_often() -> None:
        with limited.process.api("http") as api:
            assert isinstance(api.driver, HttpDriver)
            body = b'{"instance_id":"%s","query_type":2,"token_ids":[%s]}' % (
                limited.instance.encode(),
                b",".join(b"%d" % token for token in range(15_000)),
            )
            for _ in range(30):
                answer = post(api.driver.data, "/api/getCacheLocation", body)
                statuses[answer.status] += 1
                if answer.status == 503:
                    assert answer.headers["retry-after"] == "1"

    asking = [threading.Thread(target=ask_often) for _ in range(8)]
    try:
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    finally:
        limited.set("")
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[503]
    assert limited.rejected("overload") + limited.rejected("queue") - before == statuses[503]
    with limited.process.api("http") as api:
        assert eventually(lambda: api.ok("GetClusterInfo"))
