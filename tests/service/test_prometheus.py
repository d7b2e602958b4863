"""`GET /metrics` of a real manager: complete from the start, counts what was asked, and tells nobody's keys."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, mask

from kvcm.telemetry.metrics_catalog import METRICS, Kind

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
    connection = http.client.HTTPConnection(server.address.admin_http, timeout=10)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type", ""), answer.read().decode()
    finally:
        connection.close()


def families(server: ManagerProcess) -> list[Metric]:
    """Return what a scrape tells."""
    status, _, text = scrape(server)
    assert status == 200
    return list(parse_plain(text))


class Scrape:
    """Values of one scrape by name and labels."""

    def __init__(self, server: ManagerProcess) -> None:
        samples = [sample for family in families(server) for sample in family.samples]
        self.values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(self.values) == len(samples), "a series is told twice"

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


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager of this module's own."""
    with manager(tmp_path_factory.mktemp("metrics")) as process:
        yield process


@pytest.fixture(scope="module")
def first(fresh: ManagerProcess) -> Scrape:
    """A scrape before anybody asked it for anything, and after its storages were probed: their sizes are known then."""
    return eventually(lambda: known(Scrape(fresh)))


def known(scrape: Scrape) -> Scrape | None:
    """A scrape that tells sizes of storages."""
    return scrape if "kvcm_backend_capacity_bytes" in scrape.names else None


@pytest.fixture
def api(fresh: ManagerProcess, first: Scrape) -> Iterator[Api]:
    with fresh.api() as api:
        yield api


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


def test_calls_are_counted_by_method_and_code(fresh: ManagerProcess, api: Api) -> None:
    instance = Site(api).instance()
    before = Scrape(fresh)
    api.ok("GetCacheMeta", instance_id=instance, block_keys=[1, 2, 3])
    api.ok("GetCacheMeta", instance_id=instance, block_keys=range(100))
    api.refused("GetCacheMeta", instance_id="nobody", block_keys=[1])
    after = Scrape(fresh)
    assert after.since(before, "kvcm_rpc_requests_total", method="GetCacheMeta", code="OK") == 2
    assert after.of("kvcm_rpc_requests_total", method="GetCacheMeta", code="INSTANCE_NOT_EXIST") == 1
    assert after.since(before, "kvcm_rpc_requests_total", method="GetCacheMeta", code="INTERNAL_ERROR") == 0
    assert after.since(before, "kvcm_rpc_duration_seconds_count", method="GetCacheMeta") == 3
    assert 0 < after.since(before, "kvcm_rpc_duration_seconds_sum", method="GetCacheMeta") < 10
    assert after.since(before, "kvcm_rpc_request_keys_sum", method="GetCacheMeta") == 104
    assert after.since(before, "kvcm_rpc_request_keys_bucket", method="GetCacheMeta", le="4.0") == 2
    assert after.of("kvcm_rpc_inflight") == 0


def test_lookups_are_counted_by_what_was_found(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
    group = site.group()
    instance = site.instance(group)
    site.write(instance, [1, 2, 3])
    before = Scrape(fresh)
    site.match(instance, [1, 2, 3, 4, 5])
    site.match(instance, [1, 9, 3], "QT_BATCH_GET")
    site.match(instance, [1, 2, 3, 4], block_mask=mask(2))
    site.match(instance, [1, 2, 3], peek=True)
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


def test_a_lookup_that_cannot_be_answered_is_an_error(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
    group = site.group()
    instance = site.instance(group)
    api.refused("GetCacheLocation", instance_id=instance, block_keys=[1, 2], query_type=QT_WINDOW, sw_size=9)
    assert Scrape(fresh).of("kvcm_lookup_keys_total", group=group, result="error") == 2


def test_write_sessions_are_counted_by_how_they_end(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
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


def test_sessions_that_nobody_finishes_expire(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
    instance = site.instance()
    before = Scrape(fresh).of(SESSIONS, outcome="expired")
    site.start(instance, [1], write_timeout_seconds=1)
    eventually(lambda: Scrape(fresh).of(SESSIONS, outcome="expired") == before + 1, 15)


def test_usage_is_told_by_group_tier_and_storage(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
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
    api.ok("PinService.PinPrefix", instance_id=instance, block_keys=[1, 2], owner="me", ttl_seconds=60)
    assert Scrape(fresh).of("kvcm_pinned_bytes", group=group, kind="pin") == 128


def test_probes_are_counted(fresh: ManagerProcess) -> None:
    eventually(lambda: Scrape(fresh).of("kvcm_backend_probe_seconds_count", backend="nfs_01") > 0, 15)
    eventually(lambda: Scrape(fresh).of("kvcm_loop_lag_seconds_count") > 0, 15)


def test_no_label_tells_a_key_a_token_or_an_id(fresh: ManagerProcess, api: Api) -> None:
    site = Site(api)
    instance = site.instance()
    keys = [7_700_000_000_000_000_000 + position for position in range(50)]
    started = site.start(instance, keys, trace_id="trace-of-somebody")
    site.finish(instance, started)
    site.match(instance, keys, trace_id="trace-of-somebody")
    api.ok("GetCacheMeta", instance_id=instance, token_ids=[123454321] * 8)
    before = len(Scrape(fresh).values)
    text = scrape(fresh)[2]
    for secret in ("77000000000", "123454321", instance, started.write_session_id, "trace-of-somebody", "127.0.0.1"):
        assert secret not in text
    for position in range(20):  # neither do instances and keys make series
        site.write(site.instance("default"), [position])
    assert len(Scrape(fresh).values) - before < 20


def test_both_formats_are_valid_and_tell_the_same_metrics(fresh: ManagerProcess) -> None:
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
def test_the_document_lists_what_a_scrape_tells(fresh: ManagerProcess) -> None:
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
    """Return what a document calls it."""
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
def test_prometheus_takes_the_rules() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.ci
def test_the_alerts_fire_when_they_should() -> None:
    checked = promtool("test", "rules", str(RULES.with_name("rules_test.yml")))
    assert checked.returncode == 0, checked.stdout + checked.stderr
