"""Accounts, leadership, metrics and the log through the admin calls on both transports (wire.md 6.4, 10.1)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_transport_drivers import Api, GrpcDriver, HttpDriver, eventually, post
from test_transport_every_call import EVERY_RPC
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, instance_fields, unique

from kvcm.protocol import admin_service_pb2 as admin

BOTH = pytest.mark.parametrize("transport", ["grpc", "http"])

# ── Accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _accounts(api: Api) -> dict[str, str]:
    accounts = api.ok("AdminService.ListAccount").accounts
    assert [account.user_name for account in accounts] == sorted(account.user_name for account in accounts)
    return {account.user_name: admin.AccountRole.Name(account.role) for account in accounts}


def test_accounts_are_added_listed_with_their_role_and_deleted(api: Api) -> None:
    user, operator = unique("user"), unique("operator")
    api.ok("AdminService.AddAccount", user_name=user, password="p")
    api.ok("AdminService.AddAccount", user_name=operator, password="p", role="ROLE_ADMIN")
    assert {user: "ROLE_USER", operator: "ROLE_ADMIN"}.items() <= _accounts(api).items()
    api.ok("AdminService.DeleteAccount", user_name=user)
    assert user not in _accounts(api)
    assert api.refused("AdminService.DeleteAccount", user_name=user).code == "INVALID_ARGUMENT"
    api.ok("AdminService.AddAccount", user_name=user, password="p")


def test_a_taken_user_name_keeps_its_role(api: Api) -> None:
    user = unique("user")
    api.ok("AdminService.AddAccount", user_name=user, password="p")
    fields = {"user_name": user, "password": "q", "role": "ROLE_ADMIN"}
    assert api.refused("AdminService.AddAccount", **fields).code == "DUPLICATE_ENTITY"
    assert _accounts(api)[user] == "ROLE_USER"


def test_of_many_who_add_the_same_account_at_once_one_succeeds(server: ManagerProcess) -> None:
    user = unique("user")

    def add(transport: str) -> int:
        with server.api(transport) as api:
            return int(api.call("AdminService.AddAccount", user_name=user, password="p").header.status.code)

    with ThreadPoolExecutor(6) as pool:
        codes = sorted(pool.map(add, ["grpc", "http"] * 3))
    assert codes == [admin.OK, *[admin.DUPLICATE_ENTITY] * 5]


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager that logs everything it can."""
    with manager(tmp_path_factory.mktemp("loud"), KVCM_LOG_LEVEL="DEBUG", GRPC_VERBOSITY="debug") as process:
        yield process


def _malformed_accounts(api: Api, secret: str) -> list[Any]:
    """What the transport says to requests that cannot be parsed and hold a password."""
    if isinstance(api.driver, HttpDriver):
        bodies = (
            f'{{"user_name":"x","password":["{secret}"]}}',
            f'{{"user_name":"x","password":"{secret}",}}',
            f'{{"user_name":"x","password":"{secret}","password":"{secret}"}}',
        )
        return [post(api.driver.admin, "/api/addAccount", body.encode()) for body in bodies]
    assert isinstance(api.driver, GrpcDriver)
    call = api.driver.channels["AdminService"].unary_unary("/kv_cache_manager.proto.admin.AdminService/AddAccount")
    with pytest.raises(grpc.RpcError) as refused:
        call(admin.AddAccountRequest(password=secret).SerializeToString() + b"\xff", timeout=10)
    return [refused.value]


@BOTH
def test_a_password_never_appears_in_the_log_or_in_an_answer(loud: ManagerProcess, transport: str) -> None:
    secret, user = "s3cr3t-Passw0rd-1234567890", unique("user")
    with loud.api(transport) as api:
        answers: list[Any] = [
            api.ok("AdminService.AddAccount", user_name=user, password=secret),
            api.call("AdminService.AddAccount", user_name=user, password=secret),
            api.call("AdminService.AddAccount", user_name="", password=secret),
            api.call("AdminService.AddAccount", user_name="a\tb", password=secret),
            api.call("AdminService.AddAccount", user_name="c", password=secret, role=77),
            api.ok("AdminService.ListAccount"),
            api.ok("AdminService.GetMetrics"),
        ]
        answers += _malformed_accounts(api, secret)
        assert secret not in repr(answers)
        # What was refused is logged at this level: the log is on, and the password is not in it.
        eventually(lambda: any(event.get("api") == "AddAccount" for event in loud.events("refused")))
    assert secret not in loud.log_text()


# ── Leadership of a single node ──────────────────────────────────────────────────────────────────────────────────────


def _health(api: Api) -> Any:
    return api.ok("AdminService.CheckHealth")


def _latest_ms(api: Api, since_ms: int) -> int:
    """Return when the last round of the election was, 0 if that was before a moment; unix time in ms."""
    last_ms = int(_health(api).elector_last_loop_time_ms)
    return last_ms if last_ms >= since_ms else 0


@pytest.fixture
def delayed(api: Api) -> Iterator[Api]:
    """A leading manager that stays out for two seconds once it gave up leadership."""
    eventually(lambda: _health(api).is_leader)
    api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=2000)
    yield api
    api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=0)
    eventually(lambda: _health(api).is_leader)


def test_a_single_node_leads_and_says_where_it_listens(server: ManagerProcess, api: Api) -> None:
    eventually(lambda: _health(api).is_leader)
    assert _health(api).is_health
    begin_ms = int(time.time() * 1000)
    last_ms = eventually(lambda: _latest_ms(api, begin_ms))
    assert last_ms <= time.time() * 1000
    cluster, node = api.ok("AdminService.GetManagerClusterInfo"), api.ok("GetClusterInfo", instance_id="any")
    assert cluster.self_node_id == cluster.leader_node_id == node.self_node_id == node.leader_node_id != ""
    assert 0 < cluster.self_leader_expiration_time / 1_000_000 - time.time() <= 10
    ports = [int(text.rpartition(":")[2]) for text in server.address]
    endpoint = cluster.leader_endpoint
    assert (endpoint.node_id, endpoint.host) == (cluster.self_node_id, "127.0.0.1")
    found = [endpoint.meta_rpc_port, endpoint.meta_http_port, endpoint.admin_rpc_port, endpoint.admin_http_port]
    assert found == ports
    assert [node.leader_endpoint.meta_rpc_port, node.leader_endpoint.meta_http_port] == ports[:2]


def test_after_a_demotion_nobody_leads_until_the_campaign_delay_is_over(delayed: Api) -> None:
    before = time.monotonic()
    delayed.ok("AdminService.LeaderDemote")
    assert not _health(delayed).is_leader
    cluster = delayed.ok("AdminService.GetManagerClusterInfo")
    assert (cluster.self_leader_expiration_time, cluster.leader_node_id) == (-1, "")
    assert not cluster.HasField("leader_endpoint")
    node = delayed.ok("GetClusterInfo")
    assert (node.leader_node_id, node.HasField("leader_endpoint"), node.self_node_id != "") == ("", False, True)
    eventually(lambda: _health(delayed).is_leader)
    assert time.monotonic() - before >= 2.0 - 0.01


def test_a_node_that_does_not_lead_cannot_be_demoted(delayed: Api) -> None:
    delayed.ok("AdminService.LeaderDemote")
    code, message = delayed.refused("AdminService.LeaderDemote")
    assert (code, "not the leader" in message) == ("SERVER_NOT_LEADER", True)


def test_every_call_is_served_without_leadership_decision_7(delayed: Api) -> None:
    delayed.ok("AdminService.LeaderDemote")
    site = Site(delayed)
    instance = site.instance()
    site.write(instance, [1])
    assert site.hits(instance, [1]) == [1]
    assert not _health(delayed).is_leader


@pytest.mark.parametrize("delay", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_the_campaign_delay_takes_any_int64(delayed: Api, delay: int) -> None:
    delayed.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=delay)
    assert delayed.ok("AdminService.GetLeaderElectorConfig").campaign_delay_time_ms == delay


ANY_NODE = {
    "AdminService.CheckHealth",
    "AdminService.GetLeaderElectorConfig",
    "AdminService.GetManagerClusterInfo",
    "AdminService.GetMetrics",
    "AdminService.UpdateLogger",
    "AdminService.UpdateLeaderElectorConfig",
    "AdminService.LeaderDemote",
    "ConfigService.ReloadConfig",
    "MetaService.GetClusterInfo",
}


def test_with_require_leader_only_the_leader_serves_all_but_the_node_calls(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.require_leader=true") as process, process.api() as api:
        site = Site(api)
        instance = site.instance()
        site.write(instance, [1])
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=3_600_000)
        api.ok("AdminService.LeaderDemote")
        for rpc in EVERY_RPC:
            if rpc not in ANY_NODE:
                code, message = api.refused(rpc, **({"instance_id": "x"} if "Cache" in rpc else {}))
                assert (code, "does not lead" in message) == ("SERVER_NOT_LEADER", True), rpc
        assert api.ok("GetClusterInfo").self_node_id
        assert not _health(api).is_leader
        assert api.ok("AdminService.GetMetrics").metrics
    with manager(tmp_path / "leads", "kvcm.service.require_leader=true") as process, process.api() as api:
        api.ok("RegisterInstance", **instance_fields("i", "default"))
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=2000)
        api.ok("AdminService.LeaderDemote")
        assert api.refused("GetInstanceInfo", instance_id="i").code == "SERVER_NOT_LEADER"
        eventually(lambda: api.call("GetInstanceInfo", instance_id="i").header.status.code == 1)


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _series(api: Api, name: str) -> dict[tuple[tuple[str, str], ...], Any]:
    """The values of a metric by tags; no tags are there twice."""
    found = [series for series in api.ok("AdminService.GetMetrics").metrics if series.metric_name == name]
    tags = [tuple(sorted((tag.tag_key, tag.tag_value) for tag in series.metric_tags)) for series in found]
    assert len(set(tags)) == len(tags)
    return dict(zip(tags, (series.metric_value for series in found), strict=True))


def test_every_api_has_its_counter_and_its_last_duration_by_name(api: Api) -> None:
    names = {rpc.partition(".")[2] for rpc in EVERY_RPC}
    counters, times = _series(api, "service.query_counter"), _series(api, "service.query_rt_us")
    for name in names:
        tags = (("api_name", name),)
        assert counters[tags].WhichOneof("value") == "int_value"
        assert times[tags].WhichOneof("value") == "float_value"
    assert 0 < times[("api_name", "GetMetrics"),].float_value < 10_000_000
    begin_ms = int(time.time() * 1000)
    assert begin_ms <= api.ok("AdminService.GetMetrics").timestamp <= time.time() * 1000


def test_calls_about_blocks_are_counted_per_instance_and_errors_apart(site: Site) -> None:
    group = site.group()
    instance = site.instance(group)
    tags = (("api_name", "GetCacheLocation"), ("instance_group", group), ("instance_id", instance))
    for count in (1, 2):
        site.match(instance, [1])
        assert _series(site.api, "service.query_counter")[tags].int_value == count
    assert _series(site.api, "service.error_counter")[tags].int_value == 0
    site.api.refused("GetCacheLocation", instance_id=instance, block_keys=[1])
    assert _series(site.api, "service.error_counter")[tags].int_value == 1
    assert _series(site.api, "service.error_code")[tags].float_value == admin.INVALID_ARGUMENT


def test_unknown_instances_do_not_grow_the_table_of_metrics(api: Api) -> None:
    name = unique("nobody")
    api.refused("GetCacheLocation", instance_id=name)
    assert not [tags for tags in _series(api, "service.query_counter") if name in str(tags)]


# ── Log level ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_log_level_is_changed_at_once_in_any_spelling(tmp_path: Path) -> None:
    def refused(process: ManagerProcess) -> int:
        """How many refusals stand in the log; each call adds one at level DEBUG."""
        assert api.refused("GetInstanceInfo", instance_id="nobody").code == "INSTANCE_NOT_EXIST"
        return len(process.events("refused"))

    with manager(tmp_path) as process, process.api() as api:
        before = refused(process)
        api.ok("AdminService.UpdateLogger", log_level="debug", module_name="ignored")
        eventually(lambda: refused(process) > before)
        for level in ("Error", "WARN", "info"):
            api.ok("AdminService.UpdateLogger", log_level=level)
            quiet = len(process.events("refused"))
            refused(process)
            assert len(process.events("refused")) == quiet
