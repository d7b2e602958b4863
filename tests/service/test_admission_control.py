"""Rates, queues, deadlines and sizes: when a request is rejected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st
from probe_clients import ask, health
from test_transport_drivers import SERVICES, Api, eventually, post
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site
from thoroughness import examples

from kvcm.config import Settings
from kvcm.connectors.client import AsyncManagerClient, ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Outcome
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as residency
from kvcm.service import admission, request_limits
from kvcm.service.calls import Arrival, Call, Caller, Plane, Reply
from kvcm.service.json_codec import MalformedBody
from kvcm.service.rejections import RateLimitedError, RejectedError


async def _nothing(_request: Any) -> Reply:
    return Reply(meta.CommonResponse())


def _call(request_type: type[Any], plane: Plane = Plane.DATA) -> Call:
    return Call("s", request_type.__name__.removesuffix("Request"), plane, request_type, meta.CommonResponse, _nothing)


MATCH, FINISH = _call(meta.GetCacheLocationRequest), _call(meta.FinishWriteCacheRequest)
LOAD = _call(admin.LoadConfigSnapshotRequest)
CHECK, ADMIN_META = (_call(kind, Plane.ADMIN) for kind in (admin.CheckHealthRequest, admin.GetCacheMetaRequest))
NOW = 500.0


class Clock:
    """A clock that stands still; fractions hold 64ths of a second exactly."""

    def __init__(self, now: Any = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return float(self.now)


async def _refused(entering: Awaitable[Any]) -> RejectedError:
    with pytest.raises(RejectedError) as refused:
        await entering
    assert refused.value.reason in admission.REASONS
    return refused.value


class Rig:
    """An admission with a clock and a wait that stand still."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.delay = Clock(), admission.LoopDelay()
        self.admission = admission.GuardedAdmission(
            admission.AdmissionSettings(**{"most_keys": 1000} | settings), self.delay, self.clock
        )

    async def enter(self, keys: int, peer: str = "a") -> Any:
        request = meta.GetCacheLocationRequest(block_keys=range(keys))
        return await self.admission.enter(MATCH, request, Arrival("grpc", peer))

    def reason(self, arrival: Arrival, call: Call = MATCH) -> str:
        refusal = self.admission.rejection(call, arrival)
        return refusal.reason if refusal is not None else ""


def test_a_request_past_its_deadline_is_not_read() -> None:
    rig = Rig()
    assert [rig.reason(Arrival("grpc", "a", NOW + late)) for late in (-0.1, 0.0, 0.1)] == ["deadline", "deadline", ""]


def test_a_request_that_has_waited_too_long_is_not_read() -> None:
    rig = Rig(most_wait_seconds=2.0)
    assert [rig.reason(Arrival("http", received_at=NOW - waited)) for waited in (1.9, 2.0, 2.1)] == ["", "", "overload"]
    assert Rig(most_wait_seconds=0.0).reason(Arrival("http", received_at=NOW - 1000)) == ""


def test_while_all_wait_too_long_few_are_served_but_some() -> None:
    rig = Rig(most_wait_seconds=2.0)
    rig.delay.seconds = 3.0
    reasons = [rig.reason(Arrival("grpc", "a")) for _ in range(80)]
    assert (reasons.count(""), reasons.count("overload")) == (10, 70)
    rig.delay.seconds = 1.0
    assert rig.reason(Arrival("grpc", "a")) == ""


async def test_operators_are_served_whatever_happens() -> None:
    rig = Rig(most_wait_seconds=0.1, keys_per_second=1, burst_keys=1, long_keys=1, long_slots=1, long_places=0)
    rig.delay.seconds = 3.0
    late = Arrival("http", "a", NOW - 1, received_at=NOW - 60)
    assert [rig.reason(late, call) for call in (CHECK, ADMIN_META)] == ["", ""]
    for _ in range(5):
        request = admin.GetCacheMetaRequest(block_keys=range(900))
        assert await rig.admission.enter(ADMIN_META, request, late) is None


async def test_a_client_gets_its_rate_of_keys_and_others_theirs() -> None:
    rig = Rig(keys_per_second=100, burst_keys=200)
    await rig.enter(200)
    refused = await _refused(rig.enter(50))
    assert (refused.reason, refused.http_status, refused.retry_after_seconds) == ("rate", 429, 0.5)
    assert isinstance(refused, RateLimitedError)
    await rig.enter(200, peer="b")
    rig.clock.now += 0.5
    await rig.enter(50)


async def test_more_keys_than_any_request_may_have_are_not_charged_for() -> None:
    rig = Rig(keys_per_second=100, burst_keys=1000)
    await rig.enter(500_000)
    rig.clock.now += 10
    await rig.enter(1000)


async def test_long_requests_wait_for_each_other_and_short_ones_do_not() -> None:
    rig = Rig(long_keys=100, long_slots=1, long_places=1)
    first = await rig.enter(100)
    second = asyncio.create_task(rig.enter(100))
    await asyncio.sleep(0)
    assert (await _refused(rig.enter(100))).reason == "queue"
    assert await rig.enter(99) is None
    await asyncio.sleep(0)
    assert not second.done()
    rig.admission.leave(first)
    assert await second == NOW


async def test_a_long_request_that_is_refused_is_not_charged_for() -> None:
    rig = Rig(keys_per_second=100, burst_keys=300, long_keys=100, long_slots=1, long_places=0)
    await rig.enter(100)
    assert (await _refused(rig.enter(100))).reason == "queue"
    for _ in range(3):
        await rig.enter(50)


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (meta.RegisterInstanceRequest(), 1),
        (meta.GetCacheLocationRequest(block_keys=range(7)), 7),
        (meta.StartWriteCacheRequest(token_ids=range(160)), 10),
        (meta.FinishWriteCacheRequest(success_blocks={"offset": 9}), 9),
        (meta.FinishWriteCacheRequest(success_blocks={"bool_masks": {"values": [True] * 5}}), 5),
        (meta.FinishWriteCacheRequest(success_blocks={"offset": -9}), 1),
        (pins.ReportMissingRequest(parts=[{}] * 3), 3),
        (residency.ScoreRequest(event_hashes=range(65_536)), 65_536),
        (meta.StartWriteCacheRequest(block_keys=range(7), event_hashes=range(7)), 7),
    ],
)
def test_the_cost_of_a_request(request_: Any, count: int) -> None:
    assert admission.key_count(_call(type(request_)), request_) == count


_NUMBERS = {
    *(FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT64),
    *(FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
}


def test_every_list_with_a_number_for_each_key_of_a_prompt_is_counted() -> None:
    counted = Counter()
    for kind in (GetMessageClass(method.input_type) for each in SERVICES.values() for method in each.methods):
        for field_ in kind.DESCRIPTOR.fields:
            if field_.is_repeated and field_.type in _NUMBERS and field_.name != "token_ids":
                count = admission.key_count(_call(kind), kind(**{field_.name: range(1000)}))
                assert count == 1000, f"{kind.DESCRIPTOR.name}.{field_.name}"
                counted[field_.name] += 1
    assert counted.keys() == {"block_keys", "block_cache_keys", "block_hashes", "event_hashes"}


def _lane(slots: int = 1, places: int = 2, most_wait: float = 0.0) -> tuple[admission.RequestQueue, Clock]:
    clock = Clock()
    return admission.RequestQueue(clock, slots, places, most_wait), clock


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _paced(lane: admission.RequestQueue, clock: Clock, seconds: float) -> None:
    """Have the lane measure a pace."""
    began = await lane.enter(None)
    clock.now += seconds
    lane.leave(began)


async def test_a_request_that_would_wait_too_long_at_this_pace_is_refused_at_once() -> None:
    lane, clock = _lane(slots=2, places=100, most_wait=2.0)
    await _paced(lane, clock, 1.0)
    running = [await lane.enter(None) for _ in range(2)]
    waiting = [asyncio.create_task(lane.enter(None)) for _ in range(4)]
    await _settled()
    assert lane.waiting == 4
    refused = await _refused(lane.enter(None))
    assert (refused.reason, refused.http_status, refused.retry_after_seconds) == (admission.QUEUE, 503, 2.5)
    for began in running * 2:
        lane.leave(began)
        await _settled()
    await asyncio.gather(*waiting)


async def test_a_deadline_that_the_pace_cannot_meet_is_refused_at_once() -> None:
    lane, clock = _lane(places=100)
    await _paced(lane, clock, 1.0)
    began = await lane.enter(None)
    refused = await _refused(lane.enter(clock.now + 2.0))  # a second to wait, and one to be answered
    assert (refused.reason, lane.waiting) == (admission.DEADLINE, 0)
    waiting = asyncio.create_task(lane.enter(clock.now + 60.0))
    await _settled()
    assert lane.waiting == 1
    lane.leave(began)
    await waiting


async def test_a_slot_that_is_free_is_taken_whatever_the_pace() -> None:
    lane, clock = _lane(most_wait=0.001)
    await _paced(lane, clock, 50.0)
    assert await lane.enter(clock.now + 0.001) == clock.now


@pytest.mark.parametrize(
    ("most_wait", "left", "reason"), [(0.01, None, admission.QUEUE), (0.0, 0.01, admission.DEADLINE)]
)
async def test_whose_turn_comes_too_late_is_refused_then(most_wait: float, left: float | None, reason: str) -> None:
    lane, clock = _lane(most_wait=most_wait)
    await lane.enter(None)
    refused = await _refused(lane.enter(None if left is None else clock.now + left))
    assert (refused.reason, lane.running, lane.waiting) == (reason, 1, 0)


async def test_the_pace_follows_what_happens() -> None:
    lane, clock = _lane()
    await _paced(lane, clock, 10.0)
    for _ in range(40):
        await _paced(lane, clock, 1.0)
    await lane.enter(None)
    assert 1.0 <= lane.wait_seconds() < 1.1


async def test_more_slots_let_more_in_at_once() -> None:
    lane, _ = _lane(slots=1, places=5)
    await lane.enter(None)
    waiting = [asyncio.create_task(lane.enter(None)) for _ in range(3)]
    await _settled()
    lane.set(3, 5, 0.0)
    await _settled()
    assert (lane.running, lane.waiting) == (3, 1)
    lane.leave(NOW)
    await asyncio.gather(*waiting)


ACTIONS = st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 9)), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@example(  # a turn that comes in the moment of a cancellation
    slots=1, places=2, actions=[("come", 1), ("come", 1), ("come", 1), ("leave", 0), ("cancel", 0)]
)
@given(slots=st.integers(1, 3), places=st.integers(0, 4), actions=ACTIONS)
def test_no_slot_is_lost_or_given_twice(slots: int, places: int, actions: list[tuple[str, int]]) -> None:
    asyncio.run(_live(slots, places, actions))


async def _live(slots: int, places: int, actions: list[tuple[str, int]]) -> None:
    lane, _ = _lane(slots, places)
    tasks: list[asyncio.Task[float]] = []
    inside: list[asyncio.Task[float]] = []
    for action, number in actions:
        if action == "come":
            tasks.append(asyncio.create_task(lane.enter(None)))
        elif action == "leave" and inside:
            lane.leave(inside.pop(number % len(inside)).result())
        elif action == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        if number % 3:
            await _settled()
        _take(tasks, inside)
        _check(lane, slots, places, inside, tasks)
    await _settled()
    _take(tasks, inside)
    while inside:
        lane.leave(inside.pop().result())
        await _settled()
        _take(tasks, inside)
        _check(lane, slots, places, inside, tasks)
    assert (lane.running, lane.waiting, tasks) == (0, 0, [])


def _take(tasks: list[asyncio.Task[Any]], inside: list[asyncio.Task[Any]]) -> None:
    """Note the tasks that came in, in their order, and forget those that were rejected or cancelled."""
    for task in [task for task in tasks if task.done()]:
        with contextlib.suppress(RejectedError, asyncio.CancelledError):
            task.result()
            inside.append(task)
            assert tasks[0] is task
        tasks.remove(task)


def _check(lane: admission.RequestQueue, slots: int, places: int, inside: list[Any], tasks: list[Any]) -> None:
    assert len(inside) <= lane.running <= slots
    assert lane.waiting <= places
    assert lane.running - len(inside) + lane.waiting <= len(tasks)
    if lane.waiting:
        assert lane.running == slots


@dataclass
class Model:
    """One principal: everything that it was given, ever. Exact, without a bucket."""

    rate: int
    burst: int
    taken: list[tuple[Fraction, int]] = field(default_factory=list)

    def holds(self, now: Fraction) -> Fraction:
        """Return the tokens: replayed from the beginning."""
        tokens, at = Fraction(self.burst), Fraction(0)
        for then, amount in self.taken:
            tokens = min(Fraction(self.burst), tokens + (then - at) * self.rate) - amount
            at = then
        return min(Fraction(self.burst), tokens + (now - at) * self.rate)

    def take(self, now: Fraction, amount: int) -> Fraction:
        """Return the seconds to wait, 0 when it is taken."""
        missing = min(amount, self.burst) - self.holds(now)
        if missing > 0:
            return missing / self.rate
        self.taken.append((now, amount))
        return Fraction(0)


def _buckets(rate: float = 10, burst: float = 100, most: int = 4) -> tuple[admission.TokenBuckets, Clock]:
    time = Clock(Fraction(0))
    buckets = admission.TokenBuckets(time, most)
    buckets.set(rate, burst)
    return buckets, time


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=40
)  # client, 64ths of a second since the last step, how many


@settings(max_examples=examples(300), deadline=None)
@given(rate=st.sampled_from([1, 2, 8, 64]), burst=st.integers(1, 20), steps=STEPS)
def test_buckets_do_what_a_plain_model_does(rate: int, burst: int, steps: list[tuple[str, int, int]]) -> None:
    buckets, time = _buckets(rate, burst)
    models = {name: Model(rate, burst) for name in "ab"}
    for client, pause, amount in steps:
        time.now += Fraction(pause, 64)
        expected = models[client].take(time.now, amount)
        assert abs(buckets.acquire(client, amount) - expected) < 1e-9


def test_a_bucket_is_off_without_a_rate_and_starts_full_when_it_is_switched_on() -> None:
    buckets, _ = _buckets()
    buckets.acquire("a", 100)
    buckets.set(0, 100)
    assert (buckets.is_on, len(buckets)) == (False, 0)
    buckets.set(10, 50)
    assert (buckets.is_on, buckets.acquire("a", 50)) == (True, 0)


def test_a_debt_stays_when_the_limits_change() -> None:
    buckets, _ = _buckets()
    buckets.acquire("a", 150)
    buckets.set(5, 1000)
    assert buckets.acquire("a", 10) == 12.0
    assert buckets.acquire("b", 1000) == 0


def test_full_buckets_are_forgotten_and_others_are_not() -> None:
    buckets, time = _buckets()
    buckets.acquire("debtor", 199)
    for number in range(3):
        buckets.acquire(f"idle {number}", 1)
    time.now += 2
    assert buckets.acquire("new", 1) == 0
    assert len(buckets) == 2
    assert buckets.acquire("debtor", 1) == 8.0


def test_clients_beyond_the_size_of_the_table_share_one_bucket() -> None:
    buckets, time = _buckets()
    for number in range(4):
        buckets.acquire(f"debtor {number}", 199)
    assert buckets.acquire("late", 60) == 0
    assert buckets.acquire("later", 60) == 2.0
    assert len(buckets) == 4
    time.now += 30
    assert buckets.acquire("later", 60) == 0
    assert len(buckets) == 1


def test_the_table_is_looked_over_once_a_second_at_most() -> None:
    buckets, time = _buckets(rate=1000, burst=10)
    for number in range(4):
        buckets.acquire(f"debtor {number}", 1000)
    buckets.acquire("late", 1)
    time.now += Fraction(1, 2)
    buckets.set(100_000, 10)  # all are full a moment later
    time.now += Fraction(1, 4)
    buckets.acquire("late", 1)
    assert len(buckets) == 4
    time.now += 1
    buckets.acquire("late", 1)
    assert len(buckets) == 1


_MATCH = "/kv_cache_manager.proto.meta.MetaService/GetCacheLocation"
_PATIENT = "kvcm.limits.max_queue_ms=60000\n"
_RATE = "kvcm.limits.keys_per_second=1\nkvcm.limits.burst_keys=100\n"
_LANE = "kvcm.limits.long_request_keys=1000\nkvcm.limits.long_requests=1\nkvcm.limits.queued_long_requests=0\n"


class Limited:
    """A manager whose limits can be changed."""

    def __init__(self, process: ManagerProcess, file: Path) -> None:
        self.process = process
        self._file = file
        with process.api("grpc") as api:
            self.instance = Site(api).instance("default")

    @contextlib.contextmanager
    def under(self, settings: str) -> Iterator[None]:
        """Have these limits inside the block."""
        try:
            self._set(settings)
            yield
        finally:
            self._set("")

    def _set(self, settings: str) -> None:
        self._file.write_text(f"{_PATIENT}{settings}")
        with self.process.api("grpc") as api:
            api.ok("ConfigService.ReloadConfig")

    def rejected(self, reason: str) -> int:
        """Return the count of the metric."""
        text = ask(self.process.address.admin_http, "/metrics").body.decode()
        found = re.search(rf'^kvcm_rpc_rejected_total\{{reason="{reason}"\}} ([0-9.]+)$', text, re.MULTILINE)
        assert found, text
        return round(float(found[1]))

    def query(self, **fields: object) -> meta.GetCacheLocationRequest:
        query: dict[str, Any] = {"instance_id": self.instance, "query_type": meta.QT_PREFIX_MATCH, **fields}
        return meta.GetCacheLocationRequest(**query)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    directory = tmp_path_factory.mktemp("limited")
    file = directory / "kvcm.conf"
    file.write_text(_PATIENT)
    with manager(directory, "-c", str(file)) as process:
        yield Limited(process, file)


def test_every_reason_has_a_series_from_the_start(server: ManagerProcess) -> None:
    text = ask(server.address.admin_http, "/metrics").body.decode()
    reasons = set(re.findall(r'^kvcm_rpc_rejected_total\{reason="([a-z]+)"\}', text, re.MULTILINE))
    assert reasons == {*("draining", "rate", "overload", "deadline", "queue", "budget", "unauthenticated", "forbidden")}


def test_a_client_that_asks_for_too_many_keys_is_reported_when_to_come_back(limited: Limited) -> None:
    before = limited.rejected("rate")
    with limited.under(_RATE):
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
            answer = post(api.driver.data, "/api/getClusterInfo", b"{}")  # type: ignore[attr-defined]
            assert (answer.status, answer.body) == (429, b"{}")
            assert 800 < int(answer.headers["retry-after"]) <= 1000
            api.ok("AdminService.CheckHealth")
        assert health(limited.process.address.rpc) == "SERVING"
        assert ask(limited.process.address.http, "/readyz").status == 200
        assert limited.rejected("rate") == before + 2
    with limited.process.api("http") as api:
        api.ok("GetClusterInfo")


async def test_our_clients_do_not_ask_again_before_they_are_reported_to(limited: Limited) -> None:
    before = limited.rejected("rate")
    with limited.under(_RATE):
        with ManagerClient(limited.process.address.rpc, limited.instance, ClientSettings(30.0)) as client:
            assert client.match(range(1000)).outcome is Outcome.OK
            refused = client.match(range(1000))
            assert refused.outcome is Outcome.MISS_ON_ERROR
            assert "more keys per second" in refused.reason
        async with AsyncManagerClient(limited.process.address.rpc, limited.instance, ClientSettings(30.0)) as client_:
            assert (await client_.match(range(1000))).outcome is Outcome.MISS_ON_ERROR
        assert limited.rejected("rate") == before + 2


@contextlib.contextmanager
def _threads(count: int, target: Callable[[], None]) -> Iterator[list[threading.Thread]]:
    """Run a function in so many threads inside the block, which ends with the last of them."""
    threads = [threading.Thread(target=target) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join()


def test_long_requests_that_find_no_place_are_rejected_and_short_ones_served(limited: Limited) -> None:
    long = limited.query(token_ids=range(1 << 19)).SerializeToString()  # hashed in a thread: the loop goes on
    codes: Counter[grpc.StatusCode] = Counter()
    pushbacks: list[str] = []

    def ask_for_much() -> None:
        with grpc.insecure_channel(limited.process.address.rpc) as channel:
            call = channel.unary_unary(_MATCH)
            for _ in range(4):
                try:
                    call(long, timeout=60)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.RpcError as error:
                    codes[error.code()] += 1
                    pushbacks.append(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])

    before = limited.rejected("queue")
    with limited.under(_LANE), limited.process.api("grpc") as api, _threads(4, ask_for_much) as asking:
        while any(thread.is_alive() for thread in asking):
            Site(api).match(limited.instance, range(10))
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert sum(codes.values()) == 16
    assert limited.rejected("queue") - before == codes[grpc.StatusCode.UNAVAILABLE]
    assert all(int(pushback) >= 100 for pushback in pushbacks)


def test_a_loop_that_is_late_sheds_and_recovers(limited: Limited) -> None:
    """Requests of one moment wait for each other: those that wait longer than allowed are rejected."""
    before = limited.rejected("overload") + limited.rejected("queue")
    body = json_format.MessageToJson(limited.query(token_ids=range(15_000))).encode()
    statuses: Counter[int] = Counter()

    def ask_often() -> None:
        with limited.process.api("http") as api:
            for _ in range(30):
                answer = post(api.driver.data, "/api/getCacheLocation", body)  # type: ignore[attr-defined]
                statuses[answer.status] += 1
                if answer.status == 503:
                    assert answer.headers["retry-after"] == "1"

    with limited.under("kvcm.limits.max_queue_ms=1\n"), _threads(8, ask_often):
        pass
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[503]
    assert limited.rejected("overload") + limited.rejected("queue") - before == statuses[503]
    with limited.process.api("http") as api:
        assert eventually(lambda: api.ok("GetClusterInfo"))


READER = request_limits.BodyReader(request_limits.RequestLimits(), admission.RequestQueue(time.monotonic, 1, 10, 0.0))
STRICT = request_limits.BodyReader(
    request_limits.RequestLimits(max_keys=4096, max_tokens=65_536), admission.RequestQueue(time.monotonic, 1, 10, 0.0)
)


def _match(keys: int, tokens: int) -> Any:
    flags = {"bool_masks": {"values": [True, False] * (keys // 2)}}
    return meta.GetCacheLocationRequest(
        trace_id="t", instance_id="i", block_keys=range(keys), token_ids=range(tokens), block_mask=flags
    )


def _finish(locations: int, parts: int, name_bytes: int = 0) -> Any:
    request = meta.FinishWriteCacheRequest(instance_id="i", write_session_id="s")
    for number in range(locations):
        location = request.locations.add(type=meta.ST_NFS, spec_size=parts)
        for part in range(parts):
            location.location_specs.add(name=f"tp{part}".ljust(name_bytes), checksum=(1 << 60) + number)
    return request


def _snapshot(groups: int) -> Any:
    values = [{f"field{field}": field for field in range(100)} for _ in range(groups)]
    return admin.LoadConfigSnapshotRequest(config_snapshot=json.dumps({"groups": values}))


HONEST = {
    "small": (MATCH, lambda: _match(4, 4)),
    "all keys and tokens": (MATCH, lambda: _match(65_536, 1 << 20)),
    "many locations": (FINISH, lambda: _finish(3000, 8, 200)),
    "the snapshot of a large deployment": (LOAD, lambda: _snapshot(300)),
}


@pytest.mark.parametrize("case", HONEST)
async def test_honest_requests_are_read(case: str) -> None:
    call, make = HONEST[case]
    request = make()
    assert await READER.proto(call, request.SerializeToString()) == request
    plain = json_format.MessageToDict(request, preserving_proto_field_name=True)
    assert await READER.json(call, json.dumps(plain).encode()) == request


def _sized(number: int, content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 127:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


MANY = (2 << 20) + (1 << 19)
PROTO_BOMBS: dict[str, tuple[Call, Callable[[], bytes]]] = {
    "empty locations": (FINISH, lambda: _sized(5, b"") * MANY),
    "empty parts of one location": (FINISH, lambda: _sized(5, _sized(3, b"") * MANY)),
    "empty parts of many locations": (FINISH, lambda: _sized(5, _sized(3, b"") * 100) * (MANY // 100)),
    "empty names": (MATCH, lambda: _sized(8, b"") * MANY),
    "keys one by one": (MATCH, lambda: b"\x20\x01" * MANY),
    "flags one by one": (MATCH, lambda: b"\x08\x01" * MANY),
    "a field that is cut off": (MATCH, lambda: b"\x0a\x05" * 2 + b"\x00" * (5 << 20) + b"\x0a\xff"),
    "a number without end": (MATCH, lambda: b"\x20" + b"\xff" * (5 << 20)),
    "a group": (MATCH, lambda: b"\x0b" * (5 << 20)),
}


@pytest.mark.parametrize("bomb", PROTO_BOMBS)
async def test_many_fields_are_not_read(bomb: str) -> None:
    call, make = PROTO_BOMBS[bomb]
    with pytest.raises(DecodeError):
        await STRICT.proto(call, make())


JSON_BOMBS: dict[str, tuple[Call, Callable[[], bytes], str]] = {
    "values": (MATCH, lambda: b'{"x":[' + b"1," * MANY + b"1]}", "values"),
    "objects": (FINISH, lambda: b'{"x":[' + b"{}," * 100_000 + b"{}]}", "objects"),
    "keys": (MATCH, lambda: b"{" + b",".join(b'"%d":1' % key for key in range(200_000)) + b"}", "pairs"),
    "keys of a call with locations": (FINISH, lambda: b"{" + b'"":1,' * MANY + b'"":1}', "pairs"),
}


@pytest.mark.parametrize("bomb", JSON_BOMBS)
async def test_many_values_are_not_read(bomb: str) -> None:
    call, make, what = JSON_BOMBS[bomb]
    with pytest.raises(MalformedBody, match=f"^body: has [0-9]+ {what}, no request has more than [0-9]+$"):
        await STRICT.json(call, make())


async def test_a_key_that_is_given_twice_among_many_is_found() -> None:
    body = b"{" + b"".join(b'"%d":1,' % key for key in range(16_000)) + b'"15999":1}'
    with pytest.raises(MalformedBody, match="'15999' is given twice"):
        await READER.json(MATCH, body)


async def test_the_loop_goes_on_while_a_large_body_is_read() -> None:
    body = json.dumps(json_format.MessageToDict(_finish(3000, 8), preserving_proto_field_name=True)).encode()
    turns = 0
    reading = asyncio.create_task(READER.json(FINISH, body))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    await reading
    assert turns > 20


async def test_large_bodies_are_read_one_at_a_time_and_those_that_find_no_place_turned_away() -> None:
    reader = request_limits.BodyReader(
        request_limits.RequestLimits(), admission.RequestQueue(time.monotonic, 1, 1, 0.0)
    )
    body = json.dumps(json_format.MessageToDict(_finish(1000, 8), preserving_proto_field_name=True)).encode()
    results = await asyncio.gather(*(reader.json(FINISH, body) for _ in range(3)), return_exceptions=True)
    assert [isinstance(result, RejectedError) for result in results] == [False, False, True]
    assert results[0] == results[1] == _finish(1000, 8)
    assert await reader.json(FINISH, b"{}") == meta.FinishWriteCacheRequest()


LIMITS = request_limits.RequestLimits(max_keys=2000, max_tokens=3000)
SIZES = request_limits.RequestSizes(LIMITS)
LIMIT_OF_LIST = {
    **dict.fromkeys(("block_keys", "values", "location_spec_group_names", "locations", "parts"), 2000),
    **dict.fromkeys(("block_cache_keys", "block_hashes", "event_hashes", "events", "blocks"), 2000),
    "GetCacheLocationsByBackendRequest.location_spec_names": 2000,
    "token_ids": 3000,
}
NAMES = ("instance_id", "engines", "node_id", "owner", "location_spec_names", "location_spec_group_names")
LIMIT_OF_TEXT = {
    **dict.fromkeys(NAMES, request_limits.MAX_NAME_BYTES),
    **dict.fromkeys(("extra", "user_data", "lora_name", "extra_info"), request_limits.MAX_FREE_TEXT_BYTES),
    "config_snapshot": request_limits.MAX_SNAPSHOT_BYTES,
}
READ_BY_HANDLERS = {"locations", "parts", "events"}
REQUESTS = [GetMessageClass(method.input_type) for service in SERVICES.values() for method in service.methods]


def _fields(descriptor: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every field of a message, those of messages inside included."""
    for inner in descriptor.fields:
        yield (*path, inner)
        if inner.type == FieldDescriptor.TYPE_MESSAGE and inner.name not in READ_BY_HANDLERS:
            yield from _fields(inner.message_type, (*path, inner))


def _limited(path: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    """Yield each limited quantity of a field, its text or its entries, and the most allowed."""
    last = path[-1]
    if last.name in {"added_keys", "removed_keys"}:
        return  # the handler counts the keys of all of them: test_residency_cases.py
    if last.type in {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}:
        yield "text", LIMIT_OF_TEXT.get(last.name, request_limits.MAX_TEXT_BYTES)
    if last.is_repeated:
        of_message = LIMIT_OF_LIST.get(f"{last.containing_type.name}.{last.name}")
        yield "entries", of_message or LIMIT_OF_LIST.get(last.name, request_limits.MAX_ENTRIES)


def _with(request_type: Any, path: tuple[Any, ...], kind: str, size: int) -> Any:
    """Return a request whose field at the path has so many entries, or bytes."""
    request = part = request_type()
    for step in path[:-1]:
        part = getattr(part, step.name)
        if step.is_repeated:
            part = part.add()
    last = path[-1]
    if kind == "text":
        text: Any = "ü" * (size // 2) + "x" * (size % 2)  # bytes count, not characters
        text = text.encode() if last.type == FieldDescriptor.TYPE_BYTES else text
        if last.is_repeated:
            getattr(part, last.name).append(text)
        else:
            setattr(part, last.name, text)
    elif last.type == FieldDescriptor.TYPE_MESSAGE:
        for _ in range(size):
            getattr(part, last.name).add()
    else:
        getattr(part, last.name).extend(["x" if last.type == FieldDescriptor.TYPE_STRING else 1] * size)
    return request


def test_every_field_of_every_request_has_a_limit() -> None:
    checked = 0
    for request_type in {request.DESCRIPTOR.full_name: request for request in REQUESTS}.values():
        for path in _fields(request_type.DESCRIPTOR):
            for kind, most in _limited(path):
                SIZES.check(_with(request_type, path, kind, most))
                with pytest.raises(InvalidArgumentError, match=f"has {most + 1} .*at most {most} are") as refused:
                    SIZES.check(_with(request_type, path, kind, most + 1))
                assert path[-1].name in str(refused.value)
                checked += 1
    assert checked > 200


def test_keys_and_values_of_a_map_are_texts_with_limits() -> None:
    heartbeat, most = meta.HeartbeatEventParams, request_limits.MAX_TEXT_BYTES
    SIZES.check(heartbeat(system_status={"k" * most: "v" * most}))
    for long in ({"k" * (most + 1): ""}, {"k": "v" * (most + 1)}):
        with pytest.raises(InvalidArgumentError, match=f"has {most + 1} bytes of UTF-8, at most {most} are allowed"):
            SIZES.check(heartbeat(system_status=long))
    with pytest.raises(InvalidArgumentError, match="system_status has 1025 entries"):
        SIZES.check(heartbeat(system_status={str(key): "" for key in range(1025)}))


def test_limits_of_keys_and_tokens_follow_the_settings() -> None:
    limits = request_limits.RequestLimits(max_keys=3, max_tokens=5)
    sizes = request_limits.RequestSizes(limits)
    request = meta.GetCacheLocationRequest(block_keys=range(4), token_ids=range(6))
    with pytest.raises(InvalidArgumentError, match="block_keys has 4 entries, at most 3"):
        sizes.check(request)
    limits.max_keys = 4
    with pytest.raises(InvalidArgumentError, match="token_ids has 6 entries, at most 5"):
        sizes.check(request)
    limits.max_tokens = 6
    sizes.check(request)


def test_a_request_that_is_too_large_is_rejected_before_the_instance_is_looked_for(api: Api) -> None:
    fields = {"location_spec_names": ["x", "y" * 257]}
    code, message = api.refused("GetCacheLocation", instance_id="nobody", **fields)
    assert (code, message.startswith("location_spec_names[1] has ")) == ("INVALID_ARGUMENT", True)


def test_a_uri_that_is_too_long_is_refused(site: Site) -> None:
    parts = [{"block_key": 1}, {"block_key": 1, "uri": "file://s/".ljust(1025)}]
    code, message = site.api.refused("PinService.ReportMissing", instance_id=site.instance(), parts=parts)
    assert (code, message) == ("INVALID_ARGUMENT", "parts[1].uri has 1025 bytes of UTF-8, at most 1024 are allowed")


async def test_a_long_request_that_takes_too_long_is_cancelled_and_gives_its_turn_back() -> None:
    """Its slot would be taken for as long as it pleases otherwise."""
    was_cancelled = asyncio.Event()

    async def never_done(_request: Any) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()
        raise AssertionError

    limits = admission.AdmissionSettings(long_keys=1, long_slots=1, long_seconds=0.001)
    admitted = admission.GuardedAdmission(limits)
    caller = Caller(None, lambda _plane: None, lambda _instance: {}, admission=admitted)
    slow = replace(MATCH, handler=never_done)
    for _ in range(2):
        refused = await _refused(
            caller.answer(slow, meta.GetCacheLocationRequest(block_keys=[1]), Arrival("grpc", "a"))
        )
        assert (refused.reason, refused.http_status, was_cancelled.is_set()) == ("budget", 503, True)
        assert "kvcm.limits.long_request_ms" in str(refused)


def test_limits_are_on_by_default() -> None:
    default = Settings()
    assert 0 < default.keys_per_second <= default.burst_keys
    assert min(default.long_request_ms, default.max_queue_ms, default.corrupt_reports_per_minute) > 0
