"""What observers count: every end of a call, groups and reasons within their bounds, lookups by what was found."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvcm.cache.match import Match, MatchMode, MatchQuery
from kvcm.index.backends.backend import Change
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.masks import BlockMask
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.reclaim.evicted import Evicted
from kvcm.reclaim.needs import Need
from kvcm.service import prometheus_evictions
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import LOCAL, Call, Caller, Plane, Reply
from kvcm.service.prometheus_cache import CacheMetrics
from kvcm.service.prometheus_evictions import EvictionMetrics
from kvcm.service.turned_away import TurnedAwayError
from kvcm.telemetry import metrics_catalog as catalog
from kvcm.telemetry.metrics import ApiMetrics
from kvcm.telemetry.metrics_catalog import Metric
from kvcm.telemetry.metrics_values import OTHER, BoundedNames, Distribution


def _values(counted: CallMetrics | CacheMetrics, metric: Metric) -> dict[tuple[str, ...], Any]:
    return {reading.labels: reading.value for reading in counted.readings() if reading.metric is metric}


class Handler:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.may_go = asyncio.Event()

    async def __call__(self, _request: Any) -> Reply:
        self.entered.set()
        await self.may_go.wait()
        return Reply(pb.GetCacheLocationResponse())


def _call(handler: Any) -> Call:
    return Call("s", "Match", Plane.DATA, pb.GetCacheLocationRequest, pb.GetCacheLocationResponse, handler)


def _caller(counted: CallMetrics, **options: Any) -> Caller:
    return Caller([counted], lambda _plane: None, lambda _instance: {}, **options)


async def test_a_client_that_goes_away_ends_its_call() -> None:
    table, handler = ApiMetrics(), Handler()
    counted = CallMetrics(table)
    task = asyncio.create_task(_caller(counted).answer(_call(handler), pb.GetCacheLocationRequest(block_keys=[1, 2])))
    await handler.entered.wait()
    assert _values(counted, catalog.RPC_INFLIGHT) == {(): 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _values(counted, catalog.RPC_INFLIGHT) == {(): 0}
    assert _values(counted, catalog.RPC_REQUESTS)["Match", "CANCELLED"] == 1
    assert not [series for series in table.series() if series.name == "service.query_counter" and series.value]


async def test_a_defect_is_an_internal_error() -> None:
    async def broken(_request: Any) -> Reply:
        raise RuntimeError("a defect")

    counted = CallMetrics(ApiMetrics())
    await _caller(counted).answer(_call(broken), pb.GetCacheLocationRequest())
    assert _values(counted, catalog.RPC_REQUESTS) == {("Match", "OK"): 0, ("Match", "INTERNAL_ERROR"): 1}
    assert _values(counted, catalog.RPC_INFLIGHT) == {(): 0}


class Refuses:
    """Admits nobody, for a reason that is new each time."""

    def __init__(self) -> None:
        self.refused = 0

    async def enter(self, *_: Any) -> None:
        self.refused += 1
        raise TurnedAwayError("later", f"reason {self.refused}", 1.0)

    def leave(self, *_: Any) -> None:
        raise AssertionError("nobody entered")


async def test_reasons_of_refusals_are_bounded() -> None:
    counted = CallMetrics(ApiMetrics(), ["draining"])
    caller = _caller(counted, admission=Refuses())
    for _ in range(100):
        with pytest.raises(TurnedAwayError):
            await caller.answer(_call(Handler()), pb.GetCacheLocationRequest(), LOCAL)
    found = _values(counted, catalog.RPC_REJECTED)
    assert found[("draining",)] == 0
    assert sum(found.values()) == 100
    assert len(found) == 33
    assert found[(OTHER,)] == 69
    assert _values(counted, catalog.RPC_REQUESTS) == {}


def _instance(group: str, block_size: int = 4) -> Instance:
    return Instance("", group, "i", block_size, (LocationSpecInfo("kv", 64),), ModelDeployment("m", "bf16"))


def _looked_up(counted: CacheMetrics, group: str, keys: int, hits: int, **query: Any) -> None:
    counted.looked_up(
        _instance(group), MatchQuery(MatchMode.PREFIX_MATCH, range(keys), **query), Match((), range(hits))
    )


def test_groups_beyond_the_bound_share_their_series() -> None:
    counted = CacheMetrics(BoundedNames(2))
    for group in ("a", "b", "c", "d"):
        _looked_up(counted, group, 10, 4)
    found = _values(counted, catalog.LOOKUP_KEYS)
    assert {labels[0]: value for labels, value in found.items() if labels[1] == "hit"} == {"a": 4, "b": 4, OTHER: 8}
    blocks: dict[tuple[str, ...], Distribution] = _values(counted, catalog.LOOKUP_PREFIX_BLOCKS)
    assert blocks[(OTHER,)].counts[-1] == 2


@pytest.mark.parametrize(
    ("mask", "filtered"),
    [
        (BlockMask(), 0),
        (BlockMask(offset=3), 3),
        (BlockMask(offset=99), 10),
        (BlockMask(offset=-1), 10),
        (BlockMask(flags=(True, False, True)), 2),
        (BlockMask(flags=(True,) * 40), 10),
    ],
)
def test_masked_keys_are_those_that_no_lookup_asks_for(mask: BlockMask, filtered: int) -> None:
    assert len(mask.unmasked(10)) == 10 - filtered
    counted = CacheMetrics(BoundedNames())
    _looked_up(counted, "a", 10, 0, mask=mask)
    found = _values(counted, catalog.LOOKUP_KEYS)
    assert (found["a", "filtered"], found["a", "miss"]) == (filtered, 10 - filtered)


def test_without_a_block_size_no_tokens_are_counted() -> None:
    counted = CacheMetrics(BoundedNames())
    counted.lookup_failed(_instance("a", 0), MatchQuery(MatchMode.BATCH_GET, [1, 2]))
    assert _values(counted, catalog.LOOKUP_KEYS)["a", "error"] == 2
    assert _values(counted, catalog.LOOKUP_TOKENS)["a", "error"] == 0


def _evicted(keys: range) -> Evicted:
    changes = [Change(key, None, None, False) for key in keys]
    return Evicted(_instance("a"), cast("Need", None), "lru", changes, 0.0)


def test_evicted_blocks_that_are_asked_for_again_are_counted_by_how_long_they_were_gone() -> None:
    now = [100.0]
    evictions = EvictionMetrics(lambda: now[0])
    counted = CacheMetrics(BoundedNames(), evictions.missed)
    evictions.evicted(_evicted(range(800)))
    now[0] += 20
    for key in range(1600):  # the match finds one block and ends in front of this one
        found = Match((), [-1])
        counted.looked_up(_instance("a"), MatchQuery(MatchMode.PREFIX_MATCH, [-1, key, 5]), found)
        counted.looked_up(_instance("a"), MatchQuery(MatchMode.BATCH_GET, [-1, key, 5]), found)
    (reading,) = evictions.readings()
    gaps = cast("Distribution", reading.value)
    assert 60 <= gaps.counts[-1] <= 140  # one in 8, and each once
    assert gaps.total == 20.0 * gaps.counts[-1]


def test_a_masked_prefix_is_no_part_of_a_match_that_ends() -> None:
    missed: list[int] = []
    counted = CacheMetrics(BoundedNames(), lambda _instance_id, key: missed.append(key))
    for offset, hits in ((2, [12]), (0, [10, 11, 12, 13]), (9, [])):
        query = MatchQuery(MatchMode.PREFIX_MATCH, [10, 11, 12, 13], BlockMask(offset=offset))
        counted.looked_up(_instance("a"), query, Match((), hits))
    assert missed == [13]


def test_what_is_remembered_of_evictions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_evictions, "_MOST", 10)
    evictions = EvictionMetrics(lambda: 1.0)
    for first in range(0, 8000, 100):
        evictions.evicted(_evicted(range(first, first + 100)))
    for key in range(8000):
        evictions.missed("i", key)
    (reading,) = evictions.readings()
    assert cast("Distribution", reading.value).counts[-1] == 10
