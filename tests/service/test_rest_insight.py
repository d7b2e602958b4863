"""/v1/sessions, explore, curve and alerts over a running manager."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from rest_client import RestAnswer, RestClient, component
from secured import Tenants
from test_transport_drivers import Api, eventually
from test_transport_process import ManagerProcess, manager_of_module
from test_transport_sites import Site, group_spec


@pytest.fixture
def data(apis: dict[str, Api]) -> Site:
    return Site(apis["grpc"])


def explored(rest: RestClient, instance: str, **body: Any) -> Any:
    answer = rest.post(f"/v1/instances/{component(instance)}/explore", body)
    assert answer.status == 200, answer
    return answer.body


def states(chain: Any) -> list[str]:
    return [block["state"] for block in chain["blocks"]]


def test_a_chain_reports_of_every_block_and_where_the_match_ends(rest: RestClient, data: Site) -> None:
    instance = data.instance()
    data.write(instance, [11, 12])
    data.start(instance, [13], parent_block_key=12)
    before = data.api.ok("GetCacheMeta", instance_id=instance, block_keys=[11, 12])
    chain = explored(rest, instance, block_keys=["11", "12", "13", "14"])
    assert states(chain) == ["serving", "serving", "writing", "absent"]
    assert [block["is_readable"] for block in chain["blocks"]] == [True, True, False, False]
    assert chain["summary"] == {
        **{"blocks": 4, "tokens_per_block": 4, "matched_blocks": 2, "matched_tokens": 8, "complete_blocks": 2},
        "end": "writing",
        "end_reason": f"block 2: {chain['blocks'][2]['why_not']}",
    }
    assert "it is being written; the write session ends in" in chain["blocks"][2]["why_not"]
    first, _, third, fourth = chain["blocks"]
    (location,) = first["locations"]
    assert (location["status"], location["specs"], location["size_bytes"]) == ("serving", ["kv"], 64)
    assert abs(location["began_at_ms"] / 1000 - time.time()) < 60
    assert (first["block_key"], first["why_not"], first["is_pinned"]) == ("11", "", False)
    assert (third["parent_is_present"], fourth["parent_is_present"]) == (True, False)
    assert fourth["age_seconds"] == -1
    assert not [uri for meta in before.locations for spec in meta.location_specs if (uri := spec.uri) in str(chain)]


def test_to_explore_is_no_access(rest: RestClient, data: Site) -> None:
    instance = data.instance()
    data.write(instance, [1])
    data.match(instance, [1])

    def reads() -> int:
        return int(explored(rest, instance, block_keys=["1"])["blocks"][0]["accesses"])

    eventually(lambda: reads() == 1)  # reads are written down in the background
    for _ in range(5):
        reads()
        data.metas(instance, [1])
    data.match(instance, [1])
    eventually(lambda: reads() == 2)


def test_tokens_are_the_same_as_their_keys(rest: RestClient, data: Site) -> None:
    instance = data.instance()
    tokens = list(range(9))
    by_tokens = explored(rest, instance, token_ids=tokens)
    assert (by_tokens["summary"]["blocks"], by_tokens["summary"]["end"]) == (2, "absent")
    keys = [block["block_key"] for block in by_tokens["blocks"]]
    data.write(instance, [int(key) for key in keys])
    chain = explored(rest, instance, block_keys=keys)
    assert chain["summary"] | {"end_reason": ""} == chain["summary"]
    assert (chain["summary"]["end"], chain["summary"]["matched_tokens"]) == ("none", 8)


def test_a_block_on_a_storage_that_is_off_and_one_of_some_parts_say_so(rest: RestClient, data: Site) -> None:
    storage, other = data.storage(), data.storage()
    groups = [{"name": "half", "spec_names": ["a"]}, {"name": "rest", "spec_names": ["b"]}]
    infos = [{"name": "a", "size": 8}, {"name": "b", "size": 8}]
    instance = data.instance(data.group(storage, other), location_spec_infos=infos, location_spec_groups=groups)
    data.write(instance, [1, 2], location_spec_group_names=["half", "half"])
    chain = explored(rest, instance, block_keys=["1", "2"])
    assert chain["summary"]["matched_blocks"] == 2
    assert (chain["summary"]["complete_blocks"], chain["blocks"][0]["why_not"]) == (0, "it lacks 1 of 2 specs: b")
    data.api.ok("AdminService.DisableStorage", storage_unique_name=storage)
    chain = explored(rest, instance, block_keys=["1", "2"])
    assert (chain["summary"]["matched_blocks"], chain["summary"]["end"]) == (0, "storage")
    assert chain["blocks"][0]["why_not"] == f"storage {storage} is disabled"


def test_a_removed_block_is_being_deleted(rest: RestClient, data: Site) -> None:
    instance = data.instance(data.group(delay_ms=600_000))
    data.write(instance, [1, 2])
    data.api.ok("RemoveCache", instance_id=instance, block_keys=[2])
    chain = explored(rest, instance, block_keys=["1", "2"])
    assert (states(chain), chain["summary"]["end"]) == (["serving", "deleting"], "deleting")
    assert "it was evicted or removed; its bytes go in" in chain["summary"]["end_reason"]


def test_of_a_block_that_is_written_again_the_end_of_the_write_is_reported(rest: RestClient, data: Site) -> None:
    instance = data.instance(data.group(delay_ms=3_600_000))
    data.write(instance, [1])
    data.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    data.start(instance, [1], write_timeout_seconds=600)
    (block,) = explored(rest, instance, block_keys=["1"])["blocks"]
    assert [each["status"] for each in block["locations"]] == ["deleting", "writing"]
    found = re.search(r"the write session ends in (\d+) s", block["why_not"])
    assert found is not None
    assert 0 < int(found[1]) <= 600


def test_a_block_whose_prefix_is_gone_says_so(rest: RestClient, data: Site) -> None:
    instance = data.instance()
    data.write(instance, [1, 2, 3])

    def parents(*keys: str) -> list[bool]:
        return [block["parent_is_present"] for block in explored(rest, instance, block_keys=list(keys))["blocks"]]

    assert parents("1", "2", "3") == parents("3", "1", "2") == [True] * 3
    data.api.ok("RemoveCache", instance_id=instance, block_keys=[2])
    eventually(lambda: states(explored(rest, instance, block_keys=["2"])) == ["absent"])
    assert (parents("1", "2", "3"), parents("3")) == ([True, False, False], [False])


def test_long_chains_are_reported_as_a_whole(rest: RestClient, data: Site) -> None:
    instance = data.instance()
    keys = list(range(1, 3001))
    data.write(instance, keys)
    chain = explored(rest, instance, block_keys=[str(key) for key in keys])
    assert [block["position"] for block in chain["blocks"]] == list(range(3000))
    assert all(block["parent_is_present"] and block["is_readable"] for block in chain["blocks"])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "neither is given"),
        ({"block_keys": ["1"], "token_ids": [1]}, "both are given"),
        ({"block_keys": [1]}, "block_keys"),
        ({"block_keys": ["9223372036854775808"]}, "block_keys[0]: is out of the range of int64"),
        ({"keys": ["1"]}, "keys"),
    ],
)
def test_a_body_without_a_chain_is_refused(rest: RestClient, data: Site, body: Any, text: str) -> None:
    answer = rest.post(f"/v1/instances/{component(data.instance())}/explore", body)
    assert answer.status == 400
    assert text in answer.raw.decode()


def test_an_instance_that_is_not_there_is_404(rest: RestClient) -> None:
    assert rest.post("/v1/instances/nobody/explore", {"block_keys": ["1"]}).status == 404
    assert rest.get("/v1/sessions?instance=nobody").status == 404


def test_open_sessions_are_listed_with_short_ids_until_they_end(rest: RestClient, data: Site) -> None:
    group = data.group()
    instances = [data.instance(group), data.instance(group)]
    started = [data.start(instance, [1, 2, 3], write_timeout_seconds=100 + n) for n, instance in enumerate(instances)]
    path = f"/v1/sessions?group={component(group)}"
    first, second = rest.items(path)
    assert (first["instance_id"], second["instance_id"]) == (instances[0], instances[1])
    assert (first["short_id"], len(first["short_id"])) == (started[0].write_session_id[:8], 8)
    assert started[0].write_session_id not in rest.get(path).raw.decode()
    assert (first["blocks"], first["bytes"], first["instance_group"], first["starter"]) == (3, 192, group, "")
    assert (first["is_overdue"], first["is_ending"]) == (False, False)
    assert 90_000 < first["deadline_ms"] - first["begun_at_ms"] <= 101_000
    page = rest.get(f"{path}&limit=1")
    assert page.body["items"] == [first]
    assert rest.get(f"{path}&limit=1&page_token={page.body['next_page_token']}").body["items"] == [second]
    data.finish(instances[0], started[0])
    assert rest.items(path) == [second]
    assert rest.items(f"/v1/sessions?instance={component(instances[1])}") == [second]
    assert rest.items(f"/v1/sessions?instance={component(instances[0])}") == []


def alerts_of(rest: RestClient, group: str) -> list[Any]:
    answer = rest.get(f"/v1/alerts?group={component(group)}")
    assert answer.status == 200, answer
    return list(answer.body["items"])


def test_a_group_that_pins_fill_says_so(rest: RestClient, data: Site) -> None:
    storage, limits = data.storage(), {"capacity": 640, "pin_budget_bytes": 2000}
    group = data.group(storage, **limits)
    instance = data.instance(group)
    keys = list(range(1, 11))
    data.write(instance, keys)
    data.api.ok("PinService.PinPrefix", instance_id=instance, block_keys=keys, owner="me", ttl_seconds=3600)
    data.update_group(group, storage, ratio=1.0, **limits)  # a mark only now: nothing was evicted before the pin
    refused = data.api.refused("StartWriteCache", instance_id=instance, block_keys=[77])
    assert refused.code == "REACH_MAX_ENTITY_CAPACITY"

    def that_reports_of_pins() -> Any:
        (alert,) = alerts_of(rest, group)  # the store is asked for pins once in two seconds at most
        return "pinned" in alert["reason"] and alert

    alert = eventually(that_reports_of_pins)
    assert (alert["name"], alert["severity"]) == ("KvcmGroupFull", "page")
    assert alert["subject"] == {"kind": "group", "name": group}
    assert (group in alert["summary"], "end pins" in alert["advice"].lower()) == (True, True)
    assert abs(alert["since_ms"] / 1000 - time.time()) < 60


def test_a_disabled_storage_is_reported_to_the_groups_that_use_it(rest: RestClient, data: Site) -> None:
    storage = data.storage()
    group = data.group(storage)
    assert alerts_of(rest, group) == []
    data.api.ok("AdminService.DisableStorage", storage_unique_name=storage)
    found = {(alert["name"], alert["subject"]["name"]) for alert in alerts_of(rest, group)}
    assert found == {("KvcmGroupWithoutStorage", group), ("KvcmStorageDisabled", storage)}
    assert [each["severity"] for each in alerts_of(rest, group)] == ["page", "info"]


def test_without_a_sample_there_is_no_curve_and_the_answer_names_the_setting(rest: RestClient, data: Site) -> None:
    answer = rest.get(f"/v1/groups/{component(data.group())}/curve")
    assert (answer.status, "kvcm.optimizer.sampled_keys" in answer.body["detail"]) == (409, True)
    assert rest.get("/v1/groups/nowhere/curve").status == 404


sampling = manager_of_module("kvcm.optimizer.sampled_keys=512")


def test_a_curve_rises_to_the_attainable_rate(sampling: ManagerProcess) -> None:
    with sampling.api("grpc") as api:
        site, rest = Site(api), RestClient(sampling.address.admin_http)
        group = site.group(capacity=64 * 2000)
        instance = site.instance(group)
        path = f"/v1/groups/{component(group)}/curve"
        waiting = rest.get(path)
        assert (waiting.status, "nothing was asked" in waiting.body["detail"]) == (409, True)
        for _ in range(3):
            for begin in range(1, 8001, 100):
                site.match(instance, list(range(begin, begin + 100)))
        curve = rest.get(path).body
        rest.connection.close()
    assert 20_000 <= curve["lookups"] <= 24_000
    assert 0.5 < curve["attainable_ratio"] <= 0.75
    points = [(point["bytes"], point["hit_ratio"]) for point in curve["points"]]
    assert points == sorted(points)
    assert points[-1][1] == curve["attainable_ratio"]
    assert [target["part"] for target in curve["targets"]] == [0.6, 0.8, 0.9, 0.95, 0.99]
    assert curve["present"] == {
        **{"quota_bytes": 128_000, "kept_bytes": 128_000, "used_bytes": 0},
        "predicted_ratio": curve["present"]["predicted_ratio"],
    }
    # 2,000 of 8,000 blocks that are read in turn find nothing; some 125 keys are followed, drawn anew by each process.
    assert curve["present"]["predicted_ratio"] < 0.4
    assert abs(curve["since_ms"] / 1000 - time.time()) < 120


def _ask_of_a(tenants: Tenants, by_tenants: RestClient, path: str) -> RestAnswer:
    return by_tenants.get(path, authorization=f"Bearer {tenants.admin_of_a}")


def test_a_key_limited_to_a_group_sees_its_sessions(tenants: Tenants, by_tenants: RestClient) -> None:
    with tenants.server.api(key=tenants.keys["everywhere"]) as api:
        for instance in tenants.instances.values():
            Site(api).start(instance, [1], write_timeout_seconds=100)
    admin = by_tenants.get("/v1/sessions", authorization=tenants.authorization("admin")).body["items"]
    started = {each["instance_id"] for each in admin if each["starter"] == "everywhere"}
    assert started == set(tenants.instances.values())
    own = _ask_of_a(tenants, by_tenants, "/v1/sessions").body["items"]
    # Other tests may have started some in its group, too.
    assert {each["instance_id"] for each in own} & started == {tenants.instances["a"]}
    assert _ask_of_a(tenants, by_tenants, f"/v1/sessions?group={component(tenants.groups['b'])}").status == 403
    foreign = _ask_of_a(tenants, by_tenants, f"/v1/sessions?instance={component(tenants.instances['b'])}")
    unknown = _ask_of_a(tenants, by_tenants, "/v1/sessions?instance=unknown")
    assert (foreign.status, foreign.body["detail"]) == (
        404,
        unknown.body["detail"].replace("unknown", tenants.instances["b"]),
    )


def test_a_key_limited_to_a_group_receives_its_alerts(tenants: Tenants, by_tenants: RestClient) -> None:
    with tenants.server.api() as api:
        full = group_spec("full", Site(api).storage(), capacity=64)
        api.ok("AdminService.CreateInstanceGroup", instance_group=full)
        instance = Site(api).instance("full")
        Site(api).write(instance, [1])
        assert api.attempt("StartWriteCache", instance_id=instance, block_keys=[2]).status == 200
    seen = by_tenants.get("/v1/alerts", authorization=tenants.authorization("viewer")).body["items"]
    assert "full" in {alert["subject"]["name"] for alert in seen}
    assert _ask_of_a(tenants, by_tenants, "/v1/alerts").body["items"] == []
    assert _ask_of_a(tenants, by_tenants, "/v1/alerts?group=full").status == 403
