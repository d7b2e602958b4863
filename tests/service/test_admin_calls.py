"""Groups, instances, storages, accounts, leadership and the log through the admin calls (wire.md 6)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_transport_drivers import Api, GrpcDriver, HttpDriver, eventually, post
from test_transport_every_call import EVERY_RPC
from test_transport_process import ManagerProcess, manager, manager_of_module
from test_transport_sites import Site, group_spec, unique

from kvcm.protocol import admin_service_pb2 as admin


def test_a_group_comes_back_as_it_was_created(site: Site) -> None:
    name = unique("Gruppe ü/1")
    spec = group_spec(name, site.storage(), "b", "a", types={"ST_NFS": 2**62}, ratio=0.123456789, version=-(2**63))
    site.api.ok("AdminService.CreateInstanceGroup", instance_group=spec)
    found = site.api.ok("AdminService.GetInstanceGroup", name=name).instance_group
    for listed in (
        site.api.ok("AdminService.ListInstanceGroup").instance_group,
        site.api.ok("GroupService.ListInstanceGroup").instance_groups,
    ):
        assert [found] == [group for group in listed if group.name == name] == [admin.InstanceGroup(**spec)]
        assert [group.name for group in listed] == sorted(group.name for group in listed)


def test_a_refused_group_is_not_stored(site: Site) -> None:
    spec = group_spec(unique("group"), "s", ratio=math.nan)
    site.api.refused("AdminService.CreateInstanceGroup", instance_group=spec)
    assert site.api.refused("AdminService.GetInstanceGroup", name=spec["name"]).code == "INVALID_ARGUMENT"


# ── Instances ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _listed(site: Site, group: str = "") -> list[str]:
    infos = site.api.ok("AdminService.ListInstanceInfo", instance_group_name=group).instance_info
    return [info.instance_id for info in infos]


def test_the_instances_of_a_group_are_listed_in_order(site: Site) -> None:
    group, other = site.group(), site.group()
    mine = sorted([site.instance(group), site.instance(group)])
    foreign = site.instance(other)
    assert _listed(site, group) == mine
    assert {*mine, foreign} <= set(_listed(site))
    assert _listed(site) == sorted(_listed(site))


def _stored_storage(site: Site, name: str) -> Any:
    """The storage of that name as ListStorage returns it, None when it is not listed."""
    found = [s for s in site.api.ok("AdminService.ListStorage").storage if s.global_unique_name == name]
    assert len(found) <= 1
    return found[0] if found else None


def test_an_update_is_all_or_nothing(site: Site, tmp_path: Path) -> None:
    name = site.storage(nfs={"root_path": str(tmp_path), "key_count_per_file": 1})
    instance = site.instance(site.group(name))
    written = site.write(instance, [1])
    before = _stored_storage(site, name)
    for root, code in (("/dev/null/x", "IO_ERROR"), ("x", "INVALID_ARGUMENT"), ("/tmp/a?b", "INVALID_ARGUMENT")):
        storage = {"global_unique_name": name, "nfs": {"root_path": root}}
        assert site.api.refused("AdminService.UpdateStorage", storage=storage, force_update=True).code == code
    assert _stored_storage(site, name) == before
    assert site.match(instance, [1]) == written
    assert len(site.write(instance, [2])) == 1


def test_an_update_applies_to_new_blocks_and_old_ones_stay_where_they_are(site: Site, tmp_path: Path) -> None:
    old_root, new_root = tmp_path / "old", tmp_path / "new"
    name = site.storage(nfs={"root_path": str(old_root), "key_count_per_file": 1})
    instance = site.instance(site.group(name))
    (old,) = site.write(instance, [1])
    storage = {"global_unique_name": name, "nfs": {"root_path": str(new_root), "key_count_per_file": 1}}
    site.api.ok("AdminService.UpdateStorage", storage=storage)
    (new,) = site.write(instance, [2])
    assert f"file://{name}{old_root}/" in old["kv"]
    assert f"file://{name}{new_root}/" in new["kv"]
    assert site.match(instance, [1, 2]) == [old, new]
    path = Path(old["kv"].removeprefix(f"file://{name}").rpartition("?")[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(64))
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    eventually(lambda: not path.exists())


def test_a_removed_storage_is_listed_no_more_and_its_blocks_are_missing_invariant_1(site: Site) -> None:
    name = site.storage()
    instance = site.instance(site.group(name, site.storage()))
    site.write(instance, [1])
    site.api.ok("AdminService.RemoveStorage", storage_unique_name=name)
    assert _stored_storage(site, name) is None
    assert site.hits(instance, [1]) == []
    assert site.api.refused("AdminService.RemoveStorage", storage_unique_name=name).code == "INVALID_ARGUMENT"


def test_where_others_can_reach_the_server_files_stay_below_the_allowed_roots_decision_12(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    roots = f"{inside}, {tmp_path / 'manager'}"  # the second one is for the built-in storage
    settings = ("--insecure", "kvcm.service.host=0.0.0.0", f"kvcm.storage.allowed_roots={roots}")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        _assert_only_inside(api, inside, outside)


def test_without_allowed_roots_a_server_for_others_takes_its_own_directory_only_decision_12(tmp_path: Path) -> None:
    settings = ("--insecure", "kvcm.service.host=0.0.0.0")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        _assert_only_inside(api, process.data_dir / "nfs", tmp_path / "out")


def test_a_server_for_others_connects_only_to_allowed_hosts(tmp_path: Path) -> None:
    settings = ("--insecure", "kvcm.service.host=0.0.0.0", "kvcm.storage.allowed_hosts=10.0.0.0/8")
    with manager(tmp_path / "manager", *settings) as process, process.api() as api:
        for host in ("11.0.0.1:50051", "169.254.169.254:80"):
            spec = {"local_hostname": "127.0.0.1", "protocol": "tcp", "metadata_connstring": "P2PHANDSHAKE"}
            mooncake = spec | {"master_service_entry": host}
            storage = {"global_unique_name": unique("storage"), "mooncake": mooncake}
            code, message = api.refused("AdminService.AddStorage", storage=storage)
            assert code == "INVALID_ARGUMENT"
            assert "allowed_hosts" in message or "allowed hosts: 10.0.0.0/8" in message


def _assert_only_inside(api: Api, inside: Path, outside: Path) -> None:
    for root in (outside, inside / ".." / "out", Path(f"{inside}side")):
        storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(root)}}
        code, message = api.refused("AdminService.AddStorage", storage=storage)
        assert (code, str(inside) in message) == ("INVALID_ARGUMENT", True)
        assert not outside.exists()
    inside.mkdir(exist_ok=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(inside / "link")}}
    assert api.refused("AdminService.AddStorage", storage=storage).code == "INVALID_ARGUMENT"
    storage = {"global_unique_name": unique("storage"), "nfs": {"root_path": str(inside / "sub")}}
    api.ok("AdminService.AddStorage", storage=storage)


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


loud = manager_of_module(KVCM_LOG_LEVEL="DEBUG", GRPC_VERBOSITY="debug")
"""A manager that logs everything it can."""


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
        call(admin.AddAccountRequest(password=secret).SerializeToString() + b"\xff", timeout=30)
    return [refused.value]


@pytest.mark.parametrize("transport", ["grpc", "http"])
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
        # This level logs refused requests: the log is on, and the password is not in it.
        eventually(lambda: any(event.get("api") == "AddAccount" for event in loud.events("refused")))
    assert secret not in loud.log_text()


# ── Leadership of a single node ──────────────────────────────────────────────────────────────────────────────────────


def _health(api: Api) -> Any:
    return api.ok("AdminService.CheckHealth")


def _latest_ms(api: Api, since_ms: int) -> int:
    """Return when the last round of the election was, 0 if that was before a moment; unix time in ms."""
    last_ms = int(_health(api).elector_last_loop_time_ms)
    return last_ms if last_ms >= since_ms else 0


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


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[Api]:
    """A manager that led, stayed out for half a second, and leads again; next time it stays out for an hour."""
    with manager(tmp_path) as process, process.api() as api:
        eventually(lambda: _health(api).is_leader)
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=500)
        before = time.monotonic()
        api.ok("AdminService.LeaderDemote")
        eventually(lambda: _health(api).is_leader)
        assert time.monotonic() - before >= 0.5 - 0.01
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=3_600_000)
        yield api


def test_after_a_demotion_all_is_served_and_no_manager_leads_until_the_campaign_delay_is_over(delayed: Api) -> None:
    """Design decision 7."""
    site = Site(delayed)
    instance = site.instance()
    delayed.ok("AdminService.LeaderDemote")
    assert not _health(delayed).is_leader
    cluster = delayed.ok("AdminService.GetManagerClusterInfo")
    assert (cluster.self_leader_expiration_time, cluster.leader_node_id) == (-1, "")
    assert not cluster.HasField("leader_endpoint")
    node = delayed.ok("GetClusterInfo")
    assert (node.leader_node_id, node.HasField("leader_endpoint"), node.self_node_id != "") == ("", False, True)
    code, message = delayed.refused("AdminService.LeaderDemote")
    assert (code, "not the leader" in message) == ("SERVER_NOT_LEADER", True)
    site.write(instance, [1])
    assert site.hits(instance, [1]) == [1]
    assert not _health(delayed).is_leader


_OF_THE_NODE = ["CheckHealth", "GetManagerClusterInfo", "GetMetrics", "UpdateLogger"]
_OF_ITS_ELECTOR = ["GetLeaderElectorConfig", "UpdateLeaderElectorConfig", "LeaderDemote"]
ANY_NODE = {f"AdminService.{name}" for name in _OF_THE_NODE + _OF_ITS_ELECTOR}
ANY_NODE |= {"ConfigService.ReloadConfig", "MetaService.GetClusterInfo"}


def test_with_require_leader_only_the_leader_serves_all_but_the_node_calls(tmp_path: Path) -> None:
    with manager(tmp_path, "kvcm.service.require_leader=true") as process, process.api() as api:
        site = Site(api)
        instance = site.instance()
        site.write(instance, [1])
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=500)
        api.ok("AdminService.LeaderDemote")
        eventually(lambda: api.call("GetInstanceInfo", instance_id=instance).header.status.code == admin.OK)
        api.ok("AdminService.UpdateLeaderElectorConfig", campaign_delay_time_ms=3_600_000)
        api.ok("AdminService.LeaderDemote")
        for rpc in EVERY_RPC:
            if rpc not in ANY_NODE:
                code, message = api.refused(rpc, **({"instance_id": "x"} if "Cache" in rpc else {}))
                assert (code, "does not lead" in message) == ("SERVER_NOT_LEADER", True), rpc
        assert api.ok("GetClusterInfo").self_node_id
        assert not _health(api).is_leader
        assert api.ok("AdminService.GetMetrics").metrics


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
    assert 0 < times[("api_name", "GetMetrics"),].float_value < 100_000_000
    begin_ms = int(time.time() * 1000)
    assert begin_ms <= api.ok("AdminService.GetMetrics").timestamp <= time.time() * 1000


def test_calls_about_blocks_are_counted_per_known_instance_and_errors_apart(site: Site) -> None:
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
    unknown = unique("nobody")
    site.api.refused("GetCacheLocation", instance_id=unknown)
    assert unknown not in str(_series(site.api, "service.query_counter").keys())


@pytest.mark.parametrize(
    ("name", "field"), [("listInstanceGroup", "instance_group"), ("listInstanceGroups", "instance_groups")]
)
def test_over_http_the_original_and_our_own_list_of_groups_have_paths_of_their_own(
    server: ManagerProcess, name: str, field: str
) -> None:
    with server.api("http") as api:
        assert isinstance(api.driver, HttpDriver)
        answer = json.loads(post(api.driver.admin, f"/api/{name}", b"{}").body)
    assert set(answer) == {"header", field}
    assert "default" in [group["name"] for group in answer[field]]
