"""Prometheus: the metrics, their text format, and the content of a scrape of a real manager."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from command_runner import Commands
from loop_turns import turns_of_others
from probe_clients import ask
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from redis_servers import RedisServer, standalone
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager, manager_of_module
from test_transport_sites import Site, mask

from kvcm.cache.prefix_match import Match, MatchMode, MatchQuery
from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import BlockMask
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.reclaim.needs import ReclaimNeed
from kvcm.reclaim.reclaimer import EvictionRecord
from kvcm.service import metrics
from kvcm.service.calls import LOCAL, Call, Caller, CallRecorder, Plane, Reply
from kvcm.service.metrics import CacheMetrics, EvictionMetrics
from kvcm.service.metrics_page import FamilyTable, written
from kvcm.service.rejections import RejectedError
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import METRICS, OTHER, ApiMetrics, BoundedLabels, Distribution, Histogram, Kind, Reading
from kvcm.telemetry.metrics import Metric as CatalogMetric

ROOT = Path(__file__).parents[2]
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
OF_THE_PROCESS = re.compile(r"`((?:process|python)_\w+)`")

LOOKUPS = ("kvcm_lookup_keys_total", "kvcm_lookup_tokens_total")
SESSIONS = "kvcm_write_sessions_total"
OUTCOMES = ("committed", "partial", "aborted", "expired")
QT_WINDOW = "QT_REVERSE_ROLL_SW_MATCH"


def scrape(server: ManagerProcess, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and text."""
    answer = ask(server.address.admin_http, "/metrics", headers=headers)
    return answer.status, answer.headers.get("content-type", ""), answer.body.decode()


def families(server: ManagerProcess) -> list[Metric]:
    """Return the metric families of a scrape."""
    status, _, text = scrape(server)
    assert status == 200
    return list(parse_plain(text))


class Scrape:
    """Values of one scrape by name and labels."""

    def __init__(self, server: ManagerProcess) -> None:
        samples = [sample for family in families(server) for sample in family.samples]
        self.values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(self.values) == len(samples), "a series is reported twice"

    def of(self, name: str, **labels: str) -> float:
        """Return one value."""
        return self.values[name, frozenset(labels.items())]

    def since(self, before: Scrape, name: str, **labels: str) -> float:
        """Return how much a counter grew."""
        return self.of(name, **labels) - before.of(name, **labels)

    @property
    def names(self) -> set[str]:
        """Every name, as it is asked for."""
        return {name for name, _ in self.values}


fresh = manager_of_module()
"""A manager of this module's own."""


@pytest.fixture(scope="module")
def first(fresh: ManagerProcess) -> Scrape:
    """A scrape before the first call, and after the probes of the storages: their sizes are known then."""
    return eventually(lambda: known(Scrape(fresh)))


def known(scrape: Scrape) -> Scrape | None:
    """Return the scrape when it has sizes of storages."""
    return scrape if "kvcm_backend_capacity_bytes" in scrape.names else None


@pytest.fixture
def fresh_api(fresh: ManagerProcess, first: Scrape) -> Iterator[Api]:
    with fresh.api() as fresh_api:
        yield fresh_api


def test_every_metric_has_series_from_the_start(first: Scrape) -> None:
    suffix = {Kind.HISTOGRAM: "_count"}
    for metric in METRICS:
        assert metric.name + suffix.get(metric.kind, "") in first.names, metric.name
    for method in ("GetCacheLocation", "StartWriteCache", "FinishWriteCache", "GetMetrics", "CreateInstanceGroup"):
        for code in ("OK", "INTERNAL_ERROR"):
            assert first.of("kvcm_rpc_requests_total", method=method, code=code) == 0
    for result in ("hit", "miss", "filtered", "error"):
        assert first.of("kvcm_lookup_keys_total", group="default", result=result) == 0
    for outcome in ("committed", "partial", "aborted", "expired"):
        assert first.of("kvcm_write_sessions_total", outcome=outcome) == 0
    assert first.of("kvcm_rpc_rejected_total", reason="draining") == 0


def test_the_state_of_a_new_manager(first: Scrape) -> None:
    assert first.of("kvcm_leader") == 1
    assert first.of("kvcm_leader_transitions_total") == 1
    assert first.of("kvcm_lease_remaining_seconds") > 0
    assert first.of("kvcm_backend_up", backend="nfs_01") == 1
    assert first.of("kvcm_group_quota_bytes", group="default", tier="total") > 0
    assert first.of("process_resident_memory_bytes") > 10_000_000


def test_calls_are_counted_by_method_and_code(fresh: ManagerProcess, fresh_api: Api) -> None:
    instance = Site(fresh_api).instance()
    before = Scrape(fresh)
    fresh_api.ok("GetCacheMeta", instance_id=instance, block_keys=[1, 2, 3])
    fresh_api.ok("GetCacheMeta", instance_id=instance, block_keys=range(100))
    fresh_api.refused("GetCacheMeta", instance_id="nobody", block_keys=[1])
    after = Scrape(fresh)
    assert after.since(before, "kvcm_rpc_requests_total", method="GetCacheMeta", code="OK") == 2
    assert after.of("kvcm_rpc_requests_total", method="GetCacheMeta", code="INSTANCE_NOT_EXIST") == 1
    assert after.since(before, "kvcm_rpc_requests_total", method="GetCacheMeta", code="INTERNAL_ERROR") == 0
    assert after.since(before, "kvcm_rpc_duration_seconds_count", method="GetCacheMeta") == 3
    assert 0 < after.since(before, "kvcm_rpc_duration_seconds_sum", method="GetCacheMeta") < 100
    assert after.since(before, "kvcm_rpc_request_keys_sum", method="GetCacheMeta") == 104
    assert after.since(before, "kvcm_rpc_request_keys_bucket", method="GetCacheMeta", le="4.0") == 2
    assert after.of("kvcm_rpc_inflight") == 0


def test_lookups_are_counted_by_outcome(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    group = site.group()
    instance = site.instance(group)
    site.write(instance, [1, 2, 3])
    before = Scrape(fresh)
    site.match(instance, [1, 2, 3, 4, 5])
    site.match(instance, [1, 9, 3], "QT_BATCH_GET")
    site.match(instance, [1, 2, 3, 4], block_mask=mask(2))
    site.match(instance, [1, 2, 3], peek=True)
    Commands(fresh).ok("get", instance, "--keys", "1,2,3")
    after = Scrape(fresh)
    found = {
        result: [after.since(before, name, group=group, result=result) for name in LOOKUPS]
        for result in ("hit", "miss", "filtered", "error")
    }
    assert found == {"hit": [6, 24], "miss": [4, 16], "filtered": [2, 8], "error": [0, 0]}
    assert after.since(before, "kvcm_lookup_mode_total", mode="prefix_match") == 2
    assert after.since(before, "kvcm_lookup_mode_total", mode="batch_get") == 1
    assert after.since(before, "kvcm_lookup_prefix_blocks_count", group=group) == 2
    assert after.since(before, "kvcm_lookup_prefix_blocks_sum", group=group) == 4


def test_a_lookup_that_cannot_be_answered_is_an_error(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    group = site.group()
    instance = site.instance(group)
    fresh_api.refused("GetCacheLocation", instance_id=instance, block_keys=[1, 2], query_type=QT_WINDOW, sw_size=9)
    assert Scrape(fresh).of("kvcm_lookup_keys_total", group=group, result="error") == 2


def test_write_sessions_are_counted_by_how_they_end(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    instance = site.instance()
    before = Scrape(fresh)
    site.finish(instance, site.start(instance, [1, 2]))
    site.finish(instance, site.start(instance, [1, 2, 3, 4]), mask(1))
    site.finish(instance, site.start(instance, [5, 6]), mask(0))
    opened = site.start(instance, [7])
    after = Scrape(fresh)
    ends = {outcome: after.since(before, SESSIONS, outcome=outcome) for outcome in OUTCOMES}
    assert ends == {"committed": 1, "partial": 1, "aborted": 1, "expired": 0}
    assert after.since(before, "kvcm_write_session_seconds_count") == 3
    assert after.since(before, "kvcm_write_sessions_open") == 1
    assert after.since(before, "kvcm_write_masked_keys_total") == 2
    site.finish(instance, opened)
    site.finish(instance, site.start(instance, [1, 2]))
    assert Scrape(fresh).since(before, SESSIONS, outcome="committed") == 3  # nothing to write is no failure


def test_unfinished_sessions_expire(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    instance = site.instance()
    before = Scrape(fresh).of(SESSIONS, outcome="expired")
    site.start(instance, [1], write_timeout_seconds=1)
    eventually(lambda: Scrape(fresh).of(SESSIONS, outcome="expired") == before + 1)


def test_usage_is_reported_by_group_tier_and_storage(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    storage = site.storage()
    group = site.group(storage, capacity=1 << 20, types={"ST_NFS": 1 << 19}, pin_budget_bytes=1 << 10)
    instance = site.instance(group)
    site.write(instance, [1, 2, 3])
    site.limit_storage(storage, 1 << 18)
    found = Scrape(fresh)
    assert found.of("kvcm_group_used_bytes", group=group, tier="total") == 192
    assert found.of("kvcm_group_used_bytes", group=group, tier="dummy") == 192
    assert found.of("kvcm_group_quota_bytes", group=group, tier="total") == 1 << 20
    assert found.of("kvcm_group_quota_bytes", group=group, tier="file") == 1 << 19
    assert found.of("kvcm_backend_used_bytes", backend=storage) == 192
    assert found.of("kvcm_backend_capacity_bytes", backend=storage) == 1 << 18
    assert found.of("kvcm_index_keys", group=group) == 3
    fresh_api.ok("PinService.PinPrefix", instance_id=instance, block_keys=[1, 2], owner="me", ttl_seconds=600)
    assert Scrape(fresh).of("kvcm_pinned_bytes", group=group, kind="pin") == 128


def test_probes_are_counted(fresh: ManagerProcess) -> None:
    eventually(lambda: Scrape(fresh).of("kvcm_backend_probe_seconds_count", backend="nfs_01") > 0)
    eventually(lambda: Scrape(fresh).of("kvcm_loop_lag_seconds_count") > 0)


def test_no_label_reports_a_key_a_token_or_an_id(fresh: ManagerProcess, fresh_api: Api) -> None:
    site = Site(fresh_api)
    instance = site.instance()
    keys = [7_700_000_000_000_000_000 + position for position in range(50)]
    started = site.start(instance, keys, trace_id="trace-of-somebody")
    site.finish(instance, started)
    site.match(instance, keys, trace_id="trace-of-somebody")
    fresh_api.ok("GetCacheMeta", instance_id=instance, token_ids=[123454321] * 8)
    before = len(Scrape(fresh).values)
    text = scrape(fresh)[2]
    for secret in ("77000000000", "123454321", instance, started.write_session_id, "trace-of-somebody", "127.0.0.1"):
        assert secret not in text
    for position in range(20):  # neither do instances and keys make series
        site.write(site.instance("default"), [position])
    assert len(Scrape(fresh).values) - before < 20


@pytest.mark.usefixtures("first")
def test_both_formats_are_valid_and_report_the_same_metrics(fresh: ManagerProcess) -> None:
    _, plain_type, plain = scrape(fresh)
    _, open_type, text = scrape(fresh, Accept=OPENMETRICS)
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parse_plain(plain)} == {family.name for family in parse_openmetrics(text)}
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize("header", ["Origin", "Accept-Language"])
def test_web_pages_are_refused(fresh: ManagerProcess, header: str) -> None:
    status, _, text = scrape(fresh, **{header: "http://evil.example"})
    assert (status, text) == (403, "{}")


@pytest.mark.ci
def test_the_document_lists_what_a_scrape_reports(fresh: ManagerProcess) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) ?\| (.+) \|$", text, re.MULTILINE)
    assert {tuple(map(str.strip, row)) for row in rows} == {
        (metric.name, metric.kind.value, ", ".join(metric.labels), metric.about) for metric in METRICS
    }
    found = families(fresh)
    documented = {name for name, *_ in rows} | set(OF_THE_PROCESS.findall(text))
    assert {name(family) for family in found} == documented
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for family in found:
        for sample in family.samples:
            assert set(sample.labels) - {"le", "generation"} == labels.get(name(family), set()), sample


def name(family: Metric) -> str:
    """Return the name of a metric in documents."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _asked_for(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    return set(re.findall(r"(?<!:)\b(?:kvcm|process|python)_\w+", expression))


@pytest.mark.ci
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_metric_of_a_dashboard_is_in_a_scrape(path: Path, fresh: ManagerProcess) -> None:
    dashboard = json.loads(path.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(expressions) > 5
    for expression in (*expressions, *variables):
        assert (asked := _asked_for(expression)), expression
        assert asked <= Scrape(fresh).names, expression


@pytest.mark.ci
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_shows_the_deployment_that_is_chosen(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    chosen = {each["name"] for each in dashboard["templating"]["list"] if each.get("allValue") == ".*"}
    assert {"namespace", "job"} <= chosen, "all of them where labels are missing"
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in expressions:
        selectors = re.findall(r"\b(?:kvcm|process)_\w+(\{[^}]*\})?", expression)
        assert all(each.startswith('{namespace=~"$namespace",job=~"$job"') for each in selectors), expression
        assert "on (instance)" not in expression, "two deployments may have one address"


@pytest.mark.ci
def test_every_metric_of_the_rules_is_in_a_scrape(fresh: ManagerProcess) -> None:
    asked = _asked_for("\n".join(re.findall(r"^ +(?!summary|description).*$", RULES.read_text(), re.MULTILINE)))
    assert len(asked) > 10
    assert asked <= Scrape(fresh).names


@pytest.mark.ci
def test_every_metric_of_our_own_is_on_a_dashboard_or_in_a_rule() -> None:
    texts = [path.read_text() for path in (*DASHBOARDS, RULES)]
    asked = {re.sub("_(bucket|sum|count)$", "", name) for text in texts for name in _asked_for(text)}
    assert {metric.name for metric in METRICS} <= asked


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own checker."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on the PATH: make promtool")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.ci
@pytest.mark.parametrize(("command", "file"), [("check", "rules.yml"), ("test", "rules_test.yml")])
def test_the_rules_are_valid_and_fire_when_they_should(command: str, file: str) -> None:
    checked = promtool(command, "rules", str(RULES.with_name(file)))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _values(counted: CallRecorder | CacheMetrics, metric: CatalogMetric) -> dict[tuple[str, ...], Any]:
    return {reading.labels: reading.value for reading in counted.readings() if reading.metric is metric}


def _call(handler: Any) -> Call:
    return Call("s", "Match", Plane.DATA, pb.GetCacheLocationRequest, pb.GetCacheLocationResponse, handler)


def _caller(counted: CallRecorder, **options: Any) -> Caller:
    return Caller(counted, lambda _plane: None, lambda _instance: {}, **options)


async def test_a_client_that_goes_away_ends_its_call() -> None:
    entered = asyncio.Event()

    async def waits(_request: Any) -> Reply:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    table = ApiMetrics()
    counted = CallRecorder(table)
    task = asyncio.create_task(_caller(counted).answer(_call(waits), pb.GetCacheLocationRequest(block_keys=[1, 2])))
    await entered.wait()
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

    counted = CallRecorder(ApiMetrics())
    await _caller(counted).answer(_call(broken), pb.GetCacheLocationRequest())
    assert _values(counted, catalog.RPC_REQUESTS) == {("Match", "OK"): 0, ("Match", "INTERNAL_ERROR"): 1}
    assert _values(counted, catalog.RPC_INFLIGHT) == {(): 0}


class Refuses:
    """Admits no call, for a reason that is new each time."""

    def __init__(self) -> None:
        self.refused = 0

    async def enter(self, *_: Any) -> None:
        self.refused += 1
        raise RejectedError("later", f"reason {self.refused}", 1.0)

    def leave(self, *_: Any) -> None:
        raise AssertionError("no call entered")


async def test_reasons_of_refusals_are_bounded() -> None:
    counted = CallRecorder(ApiMetrics(), ["draining"])
    caller = _caller(counted, admission=Refuses())
    for _ in range(100):
        with pytest.raises(RejectedError):
            await caller.answer(_call(None), pb.GetCacheLocationRequest(), LOCAL)
    found = _values(counted, catalog.RPC_REJECTED)
    assert found[("draining",)] == 0
    assert sum(found.values()) == 100
    assert len(found) == 33
    assert found[(OTHER,)] == 69
    assert _values(counted, catalog.RPC_REQUESTS) == {}


def _instance(group: str, block_size: int = 4) -> Instance:
    return Instance("", group, "i", block_size, (LocationSpecInfo("kv", 64),), ModelDeployment("m", "bf16"))


def _looked_up(counted: CacheMetrics, group: str, keys: int, hits: int, **query: Any) -> None:
    counted.on_lookup(
        _instance(group), MatchQuery(MatchMode.PREFIX_MATCH, range(keys), **query), Match((), range(hits))
    )


def test_groups_beyond_the_bound_share_their_series() -> None:
    counted = CacheMetrics(BoundedLabels(2))
    for group in ("a", "b", "c", "d"):
        _looked_up(counted, group, 10, 4)
    found = _values(counted, catalog.LOOKUP_KEYS)
    assert {labels[0]: value for labels, value in found.items() if labels[1] == "hit"} == {"a": 4, "b": 4, OTHER: 8}
    blocks: dict[tuple[str, ...], Distribution] = _values(counted, catalog.LOOKUP_PREFIX_BLOCKS)
    assert blocks[(OTHER,)].counts[-1] == 2


def _evicted(keys: range) -> EvictionRecord:
    return EvictionRecord(_instance("a"), cast("ReclaimNeed", None), "lru", keys, 0, 0, changes=(), delay_seconds=0.0)


def test_evicted_blocks_that_are_asked_for_again_are_counted_by_how_long_they_were_gone() -> None:
    now = [100.0]
    evictions = EvictionMetrics(lambda: now[0])
    counted = CacheMetrics(BoundedLabels(), evictions.on_missed)
    evictions.on_evicted(_evicted(range(800)))
    now[0] += 20
    for key in range(1600):  # the match finds one block and ends in front of this one
        found = Match((), [-1])
        counted.on_lookup(_instance("a"), MatchQuery(MatchMode.PREFIX_MATCH, [-1, key, 5]), found)
        counted.on_lookup(_instance("a"), MatchQuery(MatchMode.BATCH_GET, [-1, key, 5]), found)
    (reading,) = evictions.readings()
    gaps = cast("Distribution", reading.value)
    assert 60 <= gaps.counts[-1] <= 140  # one in 8, and each once
    assert gaps.total == 20.0 * gaps.counts[-1]


def test_a_masked_prefix_is_no_part_of_a_match_that_ends() -> None:
    missed: list[int] = []
    counted = CacheMetrics(BoundedLabels(), lambda _instance_id, key: missed.append(key))
    for offset, hits in ((2, [12]), (0, [10, 11, 12, 13]), (9, [])):
        query = MatchQuery(MatchMode.PREFIX_MATCH, [10, 11, 12, 13], BlockMask(offset=offset))
        counted.on_lookup(_instance("a"), query, Match((), hits))
    assert missed == [13]


def test_the_memory_of_evictions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_TRACKED", 10)
    evictions = EvictionMetrics(lambda: 1.0)
    for first in range(0, 8000, 100):
        evictions.on_evicted(_evicted(range(first, first + 100)))
    for key in range(8000):
        evictions.on_missed("i", key)
    (reading,) = evictions.readings()
    assert cast("Distribution", reading.value).counts[-1] == 10


ACCEPT_OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"
GROUPS = [f"group {number}" for number in range(300)]


def _table() -> FamilyTable:
    table = FamilyTable()
    for number, group in enumerate(GROUPS):
        table.add(Reading(catalog.INDEX_KEYS, number, (group,)))
        table.add(Reading(catalog.WRITES_REFUSED, number, (group,)))
        histogram = Histogram((1.0, 10.0))
        for value in (1, number + 1):
            histogram.observe(value)
        table.add(Reading(catalog.LOOKUP_PREFIX_BLOCKS, histogram.read(), (group,)))
    return table


@pytest.mark.parametrize(("accept", "parse"), [("", parse_plain), (ACCEPT_OPENMETRICS, parse_openmetrics)])
async def test_metrics_written_in_many_slices_read_as_one_family_each(accept: str, parse: object) -> None:
    body, content_type = await written(_table().pop_all(), accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    families = {family.name: family for family in parse(body.decode())}  # type: ignore[operator]
    assert families.keys() == {metric.name.removesuffix("_total") for metric in METRICS}
    keys = {sample.labels["group"]: sample.value for sample in families["kvcm_index_keys"].samples}
    assert keys == {group: number for number, group in enumerate(GROUPS)}
    refused = {sample.labels["group"]: sample.value for sample in families["kvcm_writes_refused"].samples}
    assert refused == keys
    blocks = {
        (sample.name.removeprefix("kvcm_lookup_prefix_blocks"), sample.labels.get("le")): sample.value
        for sample in families["kvcm_lookup_prefix_blocks"].samples
        if sample.labels["group"] == GROUPS[20]
    }
    buckets = {("_bucket", "1.0"): 1, ("_bucket", "10.0"): 1, ("_bucket", "+Inf"): 2}
    assert blocks == {**buckets, ("_count", None): 2, ("_sum", None): 22}


async def test_others_get_turns_while_a_large_page_is_written() -> None:
    (body, _), turns = await turns_of_others(written(_table().pop_all(), ""))
    assert turns > body.count(b"\n") / 400


async def test_a_version_that_is_none_is_answered_in_the_plain_format() -> None:
    _, content_type = await written(FamilyTable().pop_all(), "application/openmetrics-text; version=x.y")
    assert content_type.startswith("text/plain")


def test_buckets_hold_values_up_to_their_bound() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.0, 0.5, 0.75, 1.0, 1.5, 100.0):
        histogram.observe(value)
    found = histogram.read()
    assert (list(found.counts), found.total) == ([2, 4, 6], 103.75)


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("kvcm_"), metric
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric
        assert metric.about.endswith("."), metric
        assert not {"key", "keys", "token", "user", "instance", "trace_id", "peer"} & set(metric.labels), metric


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[RedisServer, str]]:
    with standalone(tmp_path / "redis") as made:
        yield made.server, made.uri("away")


@pytest.fixture
def shared(store: tuple[RedisServer, str], tmp_path: Path) -> Iterator[ManagerProcess]:
    with manager(tmp_path / "manager", f"kvcm.registry_storage.uri={store[1]}") as process:
        yield process


def test_the_last_values_stay_while_the_store_is_away(store: tuple[RedisServer, str], shared: ManagerProcess) -> None:
    with shared.api() as api:
        site = Site(api)
        group = site.group()
        site.write(site.instance(group), [1, 2, 3])
        assert Scrape(shared).of("kvcm_group_used_bytes", group=group, tier="total") == 192
        store[0].pause()
        try:
            for _ in range(3):
                away = Scrape(shared)
                assert away.of("kvcm_group_used_bytes", group=group, tier="total") == 192
                assert away.of("kvcm_index_keys", group=group) == 3
        finally:
            store[0].resume()


def test_followers_report_others_writes(store: tuple[RedisServer, str], shared: ManagerProcess, tmp_path: Path) -> None:
    with manager(tmp_path / "second", f"kvcm.registry_storage.uri={store[1]}") as second, shared.api() as api:
        site = Site(api)
        group = site.group()
        site.write(site.instance(group), [1, 2])
        assert Scrape(shared).of("kvcm_index_keys", group=group) == 2
        keys = ("kvcm_index_keys", frozenset({("group", group)}))
        eventually(lambda: Scrape(second).values.get(keys) == 2)  # managers see a new group within a second
        assert sum(Scrape(process).of("kvcm_leader") for process in (shared, second)) == 1
