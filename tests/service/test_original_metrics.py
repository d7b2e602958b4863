"""GetMetrics: every name that the original answers, with its tags, its type and a value that follows what happens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from redis_servers import standalone
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.calls import LOCAL, Call, CallRecorder, Outcome, Plane
from kvcm.telemetry.metrics import CALL_MEASURES, ApiMetrics, close_measures, open_measures

sys.path.insert(0, str(Path(__file__).parents[1] / "index"))
from index_rig import TableView, record

KEYS = [1, 2, 3]
STATE = 64  # bytes of a block

# wire.md 10.1, by the tags that the original gives.
COUNTERS_OF_CALLS = {"service.query_counter", "service.error_counter"}
GAUGES_OF_CALLS = {
    "service.query_rt_us", "service.error_code", "service.request_queue_size",
    "manager.request_key_count", "manager.prefix_match_len", "manager.prefix_match_time_us",
    "manager.lock_write_location_retry_times", "manager.write_cache_io_cost_us", "manager.filter_write_cache_time_us",
    "manager.gen_write_location_us", "manager.put_write_location_manager_us", "manager.batch_get_location_time_us",
    "manager.batch_add_location_time_us", "manager.batch_update_location_time_us",
    "meta_searcher.indexer_get_time_us", "meta_searcher.indexer_read_modify_write_time_us",
    "meta_searcher.index_serialize_time_us", "meta_searcher.index_deserialize_time_us",
    "meta_searcher.indexer_query_times",
    "meta_indexer.query_key_count", "meta_indexer.get_not_exist_key_count", "meta_indexer.query_batch_num",
    "meta_indexer.search_cache_hit_count", "meta_indexer.search_cache_miss_count",
    "meta_indexer.search_cache_hit_ratio", "meta_indexer.io_data_size", "meta_indexer.put_io_time_us",
    "meta_indexer.update_io_time_us", "meta_indexer.upsert_io_time_us", "meta_indexer.delete_io_time_us",
    "meta_indexer.get_io_time_us", "meta_indexer.read_modify_write_put_key_count",
    "meta_indexer.read_modify_write_update_key_count", "meta_indexer.read_modify_write_skip_key_count",
    "meta_indexer.read_modify_write_delete_key_count",
}  # fmt: skip
COUNTERS_OF_STORAGES = {"data_storage.create_counter", "data_storage.create_keys_counter"}
GAUGES_OF_STORAGES = {"data_storage.create_keys_qps", "data_storage.create_time_us"}
HEALTH = {"data_storage.healthy_status", "data_storage.storage_usage_ratio"}
GAUGES = {
    "meta_indexer.total_key_count",
    "meta_indexer.total_cache_usage",
    "cache_manager.write_location_expire_size",
}
OF_GROUPS = {"cache_manager_group.usage_ratio"}
OF_INSTANCES = {"cache_manager_instance.key_count", "cache_manager_instance.byte_size"}
COUNTERS = {
    "cache_reclaimer.block_submit_count", "cache_reclaimer.location_submit_count", "cache_reclaimer.block_del_count",
    "cache_reclaimer.location_del_count", "schedule_plan_executor.waiting_task_count",
    "schedule_plan_executor.executing_task_count",
}  # fmt: skip
ALL = (
    COUNTERS_OF_CALLS | GAUGES_OF_CALLS | COUNTERS_OF_STORAGES | GAUGES_OF_STORAGES
    | HEALTH | GAUGES | OF_GROUPS | OF_INSTANCES | COUNTERS
)  # fmt: skip
Tags = frozenset[tuple[str, str]]


class Metrics:
    """One answer of GetMetrics."""

    def __init__(self, site: Site) -> None:
        self.values: dict[tuple[str, Tags], int | float] = {}
        for series in site.api.ok("AdminService.GetMetrics").metrics:
            tags = frozenset((tag.tag_key, tag.tag_value) for tag in series.metric_tags)
            value = series.metric_value
            assert (series.metric_name, tags) not in self.values
            self.values[series.metric_name, tags] = getattr(value, value.WhichOneof("value"))

    def of(self, name: str, **tags: str) -> int | float:
        return self.values[name, frozenset(tags.items())]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    directory = tmp_path_factory.mktemp("metrics")
    with (
        standalone(directory / "redis") as redis,
        manager(directory / "manager", f"kvcm.registry_storage.uri={redis.uri('metrics')}") as process,
    ):
        yield process


@pytest.fixture
def site(server: ManagerProcess) -> Iterator[Site]:
    with server.api() as api:
        yield Site(api)


def test_all_names_exist_from_the_start_with_their_types(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage)
    site.instance(group)
    metrics = Metrics(site)
    assert metrics.names >= ALL
    assert len(ALL) == 55
    assert set(CALL_MEASURES) <= GAUGES_OF_CALLS
    of_call = {"api_name": "GetCacheLocation"}
    assert all(isinstance(metrics.of(name, **of_call), int) for name in COUNTERS_OF_CALLS)
    assert all(isinstance(metrics.of(name, **of_call), float) for name in GAUGES_OF_CALLS)
    of_storage = {"dummy": storage}
    assert [metrics.of(name, **of_storage) for name in (*COUNTERS_OF_STORAGES, *GAUGES_OF_STORAGES)] == [0, 0, 0.0, 0.0]
    assert metrics.of("data_storage.healthy_status", type="dummy", unique_name=storage) == 1.0
    assert metrics.of("data_storage.storage_usage_ratio", type="dummy", unique_name=storage) == 0.0
    assert all(isinstance(metrics.of(name), int) for name in COUNTERS)


def test_a_write_and_reads_move_the_values_of_their_calls(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage, capacity=10 * STATE)
    instance = site.instance(group)

    def of(name: str, api_name: str) -> float:
        return Metrics(site).of(name, api_name=api_name, instance_group=group, instance_id=instance)

    before = Metrics(site)
    started = site.start(instance, KEYS)
    start = Metrics(site)
    call = {"api_name": "StartWriteCache", "instance_group": group, "instance_id": instance}
    assert start.of("service.query_counter", **call) == 1
    assert start.of("manager.request_key_count", **call) == 3
    assert start.of("meta_indexer.read_modify_write_put_key_count", **call) == 3
    assert start.of("meta_indexer.get_not_exist_key_count", **call) >= 3
    assert start.of("meta_indexer.query_key_count", **call) >= 3
    assert start.of("meta_indexer.query_batch_num", **call) >= 2  # to look, and to change
    assert start.of("meta_searcher.indexer_query_times", **call) >= 2
    for name in (
        "manager.write_cache_io_cost_us", "manager.filter_write_cache_time_us", "manager.gen_write_location_us",
        "manager.put_write_location_manager_us", "manager.batch_get_location_time_us",
        "manager.batch_add_location_time_us", "meta_searcher.indexer_get_time_us",
        "meta_searcher.indexer_read_modify_write_time_us", "meta_searcher.index_serialize_time_us",
        "meta_indexer.put_io_time_us", "meta_indexer.get_io_time_us", "meta_indexer.io_data_size",
    ):  # fmt: skip
        assert 0 < start.of(name, **call) < 60e6, name
    assert start.of("manager.gen_write_location_us", **call) < start.of("manager.write_cache_io_cost_us", **call)
    assert start.of("manager.write_cache_io_cost_us", **call) < start.of("service.query_rt_us", **call)
    assert (
        start.of("cache_manager.write_location_expire_size")
        == before.of("cache_manager.write_location_expire_size") + 1
    )
    assert start.of("data_storage.create_counter", dummy=storage) == 1
    assert start.of("data_storage.create_keys_counter", dummy=storage) == 3
    assert start.of("data_storage.create_keys_qps", dummy=storage) > 0
    assert start.of("data_storage.create_time_us", dummy=storage) > 0

    site.finish(instance, started)
    assert of("meta_indexer.read_modify_write_update_key_count", "FinishWriteCache") == 3
    assert of("manager.batch_update_location_time_us", "FinishWriteCache") > 0
    assert of("meta_indexer.update_io_time_us", "FinishWriteCache") > 0

    site.match(instance, [*KEYS, 9])
    assert of("meta_searcher.index_deserialize_time_us", "GetCacheLocation") > 0  # a finish reads no record
    assert of("manager.prefix_match_len", "GetCacheLocation") == 3
    assert of("manager.prefix_match_time_us", "GetCacheLocation") > 0
    assert of("meta_indexer.search_cache_miss_count", "GetCacheLocation") == 4
    assert of("meta_indexer.search_cache_hit_count", "GetCacheLocation") == 0
    site.match(instance, KEYS)
    again = Metrics(site)
    call = {"api_name": "GetCacheLocation", "instance_group": group, "instance_id": instance}
    assert again.of("meta_indexer.search_cache_hit_count", **call) == 3
    assert again.of("meta_indexer.search_cache_hit_ratio", **call) == 100.0
    assert again.of("service.query_counter", **call) == 2
    assert again.of("meta_indexer.total_cache_usage") > before.of("meta_indexer.total_cache_usage")
    assert again.of("meta_indexer.total_key_count") == before.of("meta_indexer.total_key_count") + 3
    assert again.of("cache_manager_instance.key_count", instance_group=group, instance_id=instance) == 3
    assert again.of("cache_manager_instance.byte_size", instance_group=group, instance_id=instance) == 3 * STATE
    assert again.of("cache_manager_group.usage_ratio", instance_group=group) == pytest.approx(0.3)

    site.api.refused("GetCacheLocation", instance_id=instance, block_keys=[1])
    assert of("service.error_counter", "GetCacheLocation") == 1
    assert of("service.error_code", "GetCacheLocation") == pb.INVALID_ARGUMENT
    assert of("manager.prefix_match_len", "GetCacheLocation") == 0  # of the last request


def test_a_removal_counts_what_is_submitted_and_waits(site: Site) -> None:
    storage = site.storage()
    site.limit_storage(storage, 10 * STATE)
    group = site.group(storage, delay_ms=3_600_000)
    instance = site.instance(group)
    site.write(instance, KEYS)
    metrics = Metrics(site)
    assert metrics.of("data_storage.storage_usage_ratio", type="dummy", unique_name=storage) == pytest.approx(0.3)
    before = metrics.of("schedule_plan_executor.waiting_task_count")
    site.api.ok("RemoveCache", instance_id=instance, block_keys=KEYS)
    eventually(lambda: Metrics(site).of("schedule_plan_executor.waiting_task_count") == before + 3)
    assert Metrics(site).of("meta_indexer.read_modify_write_update_key_count", api_name="RemoveCache",
                            instance_group=group, instance_id=instance) == 3  # fmt: skip


def test_evictions_count_blocks_and_locations(site: Site) -> None:
    before = Metrics(site)
    instance = site.instance(site.group(capacity=10 * STATE, ratio=0.5))
    site.write(instance, [1, 2, 3, 4, 5, 6, 7, 8])
    for name in ("block_submit_count", "location_submit_count", "block_del_count", "location_del_count"):
        full_name = f"cache_reclaimer.{name}"
        eventually(lambda full_name=full_name: Metrics(site).of(full_name) >= before.of(full_name) + 3)


def measured(index: MetaIndex, work: str) -> Mapping[str, float]:
    measures: dict[str, float] = {}

    async def run() -> None:
        opened = open_measures(measures)
        if work == "upsert":
            await index.put({1: record(depth=1), 2: record()})
        elif work == "delete":
            await index.delete([1, 2])
        elif work == "skip":
            await index.read_modify_write([1], lambda _key, old: old)
        else:
            await index.put({1: record()})
        close_measures(opened)

    asyncio.run(run())
    return measures


def test_changes_of_the_index_are_measured_by_their_kind() -> None:
    index = MetaIndex(MemoryBackend(), TableView())
    for work, kinds in (
        ("put", {"put": 1}), ("upsert", {"update": 1, "put": 1}), ("skip", {"skip": 1}), ("delete", {"delete": 2}),
    ):  # fmt: skip
        measures = measured(index, work)
        for kind in ("put", "update", "skip", "delete"):
            assert measures.get(f"meta_indexer.read_modify_write_{kind}_key_count", 0) == kinds.get(kind, 0), work
        if work != "skip":
            assert measures[f"meta_indexer.{work}_io_time_us"] > 0


def test_a_request_sees_how_many_others_are_being_answered() -> None:
    call = Call("s", "GetCacheLocation", Plane.DATA, pb.GetCacheLocationRequest, pb.GetCacheLocationResponse, None)  # type: ignore[arg-type]
    table = ApiMetrics()
    recorder = CallRecorder(table)
    requests = [pb.GetCacheLocationRequest(block_keys=range(count)) for count in (2, 5)]
    begun = [recorder.begin(call, request, LOCAL) for request in requests]
    for started, request in zip(reversed(begun), reversed(requests), strict=True):
        recorder.end(started, call, request, LOCAL, Outcome(ErrorCode.OK, "", 0.001, {}))
        values = {series.name: series.value for series in table.series()}
        last = begun.index(started)
        assert values["service.request_queue_size"] == last
        assert values["manager.request_key_count"] == len(request.block_keys)
