"""Who is served: what is asked of the clock, the loop, the bucket and the lane, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.service.admission import REASONS, AdmissionSettings, GuardedAdmission, key_count
from kvcm.service.calls import Arrival, Call, Plane, Reply
from kvcm.service.turned_away import RateLimitedError, TurnedAwayError

NOW = 500.0


async def _nothing(_request: Any) -> Reply:
    return Reply(meta.CommonResponse())


def _call(request_type: type[Any], plane: Plane = Plane.DATA) -> Call:
    return Call("s", request_type.__name__.removesuffix("Request"), plane, request_type, meta.CommonResponse, _nothing)


MATCH, CHECK = _call(meta.GetCacheLocationRequest), _call(admin.CheckHealthRequest, Plane.ADMIN)
ADMIN_META = _call(admin.GetCacheMetaRequest, Plane.ADMIN)


class Rig:
    """An admission with a clock and a wait that stand still."""

    def __init__(self, **settings: Any) -> None:
        self.now, self.wait = NOW, 0.0
        self.admission = GuardedAdmission(
            AdmissionSettings(**settings), lambda: 1000, lambda: self.wait, lambda: self.now
        )

    async def enter(self, keys: int, peer: str = "a", deadline: float | None = None) -> Any:
        request = meta.GetCacheLocationRequest(block_keys=range(keys))
        return await self.admission.enter(MATCH, request, Arrival("grpc", peer, deadline))

    async def refused(self, keys: int, peer: str = "a", deadline: float | None = None) -> TurnedAwayError:
        with pytest.raises(TurnedAwayError) as refused:
            await self.enter(keys, peer, deadline)
        assert refused.value.reason in REASONS
        return refused.value

    def reason(self, arrival: Arrival, call: Call = MATCH) -> str:
        refusal = self.admission.refusal(call, arrival)
        return refusal.reason if refusal is not None else ""


def test_a_request_is_served_by_default() -> None:
    assert Rig().reason(Arrival("grpc", "a", NOW + 1)) == ""


def test_what_nobody_waits_for_any_more_is_not_read() -> None:
    rig = Rig()
    assert [rig.reason(Arrival("grpc", "a", NOW + late)) for late in (-0.1, 0.0, 0.1)] == ["deadline", "deadline", ""]


def test_what_has_waited_too_long_is_not_read() -> None:
    rig = Rig(most_wait_seconds=2.0)
    assert [rig.reason(Arrival("http", came=NOW - waited)) for waited in (1.9, 2.0, 2.1)] == ["", "", "overload"]
    assert Rig(most_wait_seconds=0.0).reason(Arrival("http", came=NOW - 1000)) == ""


def test_while_all_wait_too_long_few_are_served_but_some() -> None:
    rig = Rig(most_wait_seconds=2.0)
    rig.wait = 3.0
    reasons = [rig.reason(Arrival("grpc", "a")) for _ in range(80)]
    assert (reasons.count(""), reasons.count("overload")) == (10, 70)
    rig.wait = 1.0
    assert rig.reason(Arrival("grpc", "a")) == ""


async def test_operators_are_served_whatever_happens() -> None:
    rig = Rig(most_wait_seconds=0.1, keys_per_second=1, burst_keys=1, long_keys=1, long_slots=1, long_places=0)
    rig.wait = 3.0
    late = Arrival("http", "a", NOW - 1, came=NOW - 60)
    assert [rig.reason(late, call) for call in (CHECK, ADMIN_META)] == ["", ""]
    for _ in range(5):
        request = admin.GetCacheMetaRequest(block_keys=range(900))
        assert await rig.admission.enter(ADMIN_META, request, late) is None


async def test_a_client_gets_its_rate_of_keys_and_others_theirs() -> None:
    rig = Rig(keys_per_second=100, burst_keys=200)
    await rig.enter(200)
    refused = await rig.refused(50)
    assert (refused.reason, refused.http_status, refused.retry_after_seconds) == ("rate", 429, 0.5)
    assert isinstance(refused, RateLimitedError)
    await rig.enter(200, peer="b")
    rig.now += 0.5
    await rig.enter(50)


async def test_a_request_without_keys_counts_as_one() -> None:
    rig = Rig(keys_per_second=1, burst_keys=2)
    await rig.enter(0)
    await rig.enter(0)
    await rig.refused(0)


async def test_more_keys_than_any_request_may_have_are_not_charged_for() -> None:
    rig = Rig(keys_per_second=100, burst_keys=1000)
    await rig.enter(500_000)
    rig.now += 10
    await rig.enter(1000)


async def test_the_rate_can_be_changed_and_switched_off() -> None:
    rig = Rig(keys_per_second=1, burst_keys=1)
    await rig.enter(1)
    await rig.refused(1)
    rig.admission.set(AdmissionSettings())
    await rig.enter(1)


async def test_long_requests_wait_for_each_other_and_short_ones_do_not() -> None:
    rig = Rig(long_keys=100, long_slots=1, long_places=1)
    first = await rig.enter(100)
    second = asyncio.create_task(rig.enter(100))
    await asyncio.sleep(0)
    assert (await rig.refused(100)).reason == "queue"
    assert await rig.enter(99) is None
    rig.admission.leave(None)
    await asyncio.sleep(0)
    assert not second.done()
    rig.admission.leave(first)
    assert await second == NOW


async def test_a_long_request_that_is_refused_is_not_charged_for() -> None:
    rig = Rig(keys_per_second=100, burst_keys=300, long_keys=100, long_slots=1, long_places=0)
    await rig.enter(100)
    assert (await rig.refused(100)).reason == "queue"
    await rig.enter(50)
    await rig.enter(50)
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
    ],
)
def test_what_a_request_is_worth(request_: Any, count: int) -> None:
    assert key_count(_call(type(request_)), request_) == count
