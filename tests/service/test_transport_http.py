"""HTTP and JSON as raw bytes (wire.md 2.2, 2.5): paths, statuses, headers, keep-alive, spelling of values."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_transport_drivers import SERVICES, Api, HttpAnswer, HttpDriver, post
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, group_spec, instance_fields, unique

Connection = http.client.HTTPConnection


@pytest.fixture
def driver(apis: dict[str, Api]) -> HttpDriver:
    found = apis["http"].driver
    assert isinstance(found, HttpDriver)
    return found


@pytest.fixture
def site(apis: dict[str, Api]) -> Site:
    return Site(apis["http"])


def _json(driver: HttpDriver, rpc: str, body: str, *, admin: bool = False) -> Any:
    answer = post(driver.admin if admin else driver.data, f"/api/{rpc}", body.encode())
    assert answer.status == 200, answer
    return json.loads(answer.body)


def _path(rpc: str) -> str:
    return f"/api/{rpc[0].lower()}{rpc[1:]}"


def _paths(*services: str) -> set[str]:
    return {_path(method.name) for name in services for method in SERVICES[name].methods}


# ── Paths and statuses ───────────────────────────────────────────────────────────────────────────────────────────────


def _assert_not_found(answer: HttpAnswer) -> None:
    assert (answer.status, answer.body) == (404, b"404 Not Found")
    assert "content-type" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/", "/api", "/api/", "/api/nothing", "/api/GetInstanceInfo", "/api/getInstanceInfo/"]
)
def test_an_unknown_path_is_404_with_a_plain_text(driver: HttpDriver, path: str) -> None:
    for connection in (driver.data, driver.admin):
        _assert_not_found(post(connection, path, b"{}"))


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_any_method_but_post_is_404(driver: HttpDriver, method: str) -> None:
    _assert_not_found(post(driver.data, "/api/getInstanceInfo", b"", method))
    _assert_not_found(post(driver.admin, "/api/checkHealth", b"", method))


def test_the_meta_port_serves_the_meta_calls_and_the_admin_port_the_others(driver: HttpDriver) -> None:
    data, admin = _paths("MetaService", "LeaseService"), _paths("AdminService", "GroupService")
    for path in admin - data:
        _assert_not_found(post(driver.data, path, b"{}"))
    for path in data - admin:
        _assert_not_found(post(driver.admin, path, b"{}"))


MALFORMED = {
    "broken": '{"trace_id": ',
    "array": "[]",
    "not UTF-8": '{"trace_id": "\udcff"}',
    "number for a string": '{"trace_id": 7}',
}


@pytest.mark.parametrize("rule", MALFORMED)
def test_a_body_that_is_not_the_message_is_400_with_an_empty_object(driver: HttpDriver, rule: str) -> None:
    body = MALFORMED[rule].encode("utf-8", "surrogateescape")
    answer = post(driver.data, "/api/getCacheLocation", body)
    assert (answer.status, answer.body) == (400, b"{}")
    assert "content-type" not in answer.headers


@pytest.mark.parametrize(
    "body",
    ['{"sw_size":"\\r\\nSet-Cookie: a"}', '{"ü\u2028\\r\\nx":1,"ü\u2028\\r\\nx":2}', '{"block_keys":[0,"x"]}'],
)
def test_the_reason_of_a_400_is_one_printable_header(driver: HttpDriver, body: str) -> None:
    answer = post(driver.data, "/api/getCacheLocation", body.encode())
    assert (answer.status, answer.body, "set-cookie" in answer.headers) == (400, b"{}", False)
    assert answer.headers["x-kvcm-error"].isprintable()
    if "block_keys" in body:
        assert "block_keys[1]" in answer.headers["x-kvcm-error"]


def test_a_message_of_only_defaults_is_an_empty_object(driver: HttpDriver) -> None:
    assert _json(driver, "checkHealth", "{}", admin=True)["header"]["status"]["code"] == "OK"


def test_the_content_type_of_a_request_is_not_looked_at(driver: HttpDriver) -> None:
    driver.admin.request("POST", "/api/checkHealth", b"{}", {"content-type": "text/plain; charset=latin-1"})
    response = driver.admin.getresponse()
    assert (response.status, json.loads(response.read())["is_health"]) == (200, True)


def test_connections_are_kept_alive_through_refusals_of_every_kind(driver: HttpDriver) -> None:
    connection = driver.data
    post(connection, "/api/getClusterInfo", b"{}")
    kept = connection.sock
    for path, body, status in (
        ("/api/getClusterInfo", b"{}", 200),
        ("/api/getClusterInfo", b"{", 400),
        ("/api/nothing", b"x" * 100_000, 404),
        ("/api/getClusterInfo", b"{}", 200),
    ):
        assert post(connection, path, body).status == status
        assert connection.sock is kept


def test_a_chunked_request_is_served(server: ManagerProcess) -> None:
    connection = Connection(server.address.admin_http, timeout=10)
    connection.request(
        "POST", "/api/checkHealth", iter([b"{", b"}"]), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    response = connection.getresponse()
    assert json.loads(response.read())["is_health"] is True
    connection.close()


# ── Size of a body ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager that takes bodies of 2,000 bytes at most."""
    with manager(tmp_path_factory.mktemp("small"), "kvcm.limits.max_body_bytes=2000") as process:
        yield process


@pytest.fixture
def small_connection(small: ManagerProcess) -> Iterator[Connection]:
    connection = Connection(small.address.admin_http, timeout=10)
    yield connection
    connection.close()


def test_a_body_of_the_limit_is_served_and_one_byte_more_is_413(small_connection: Connection) -> None:
    assert post(small_connection, "/api/checkHealth", b"{}".ljust(2000)).status == 200
    answer = post(small_connection, "/api/checkHealth", b"{}".ljust(2001))
    assert answer.status == 413
    assert "2000" in answer.headers["x-kvcm-error"]


def test_an_announced_body_beyond_the_limit_is_413_before_it_is_sent(small_connection: Connection) -> None:
    small_connection.putrequest("POST", "/api/checkHealth")
    small_connection.putheader("content-length", str(1 << 40))
    small_connection.endheaders()
    assert small_connection.getresponse().status == 413


def test_a_chunked_body_beyond_the_limit_is_413(small_connection: Connection) -> None:
    chunks = iter([b"{}", b" " * 1500, b" " * 1500])
    small_connection.request("POST", "/api/checkHealth", chunks, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert small_connection.getresponse().status == 413


def test_a_body_of_more_than_4_mib_is_served_by_default(driver: HttpDriver, site: Site) -> None:
    tokens = ",".join(["-9007199254740993"] * 300_000)
    body = f'{{"instance_id":"{site.instance()}","query_type":"QT_PREFIX_MATCH","token_ids":[{tokens}]}}'
    assert len(body) > 4 << 20
    assert _json(driver, "getCacheLocation", body)["header"]["status"]["code"] == "OK"


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_both_spellings_of_names_and_int64_as_number_or_text_mean_the_same(driver: HttpDriver, site: Site) -> None:
    instance = site.instance()
    keys = [2**63 - 1, -(2**63), 9007199254740993]
    site.write(instance, keys)
    texts = [
        f'{{"instance_id":"{instance}","query_type":"QT_BATCH_GET","block_keys":{json.dumps(keys)}}}',
        f'{{"instanceId":"{instance}","queryType":1,"blockKeys":{json.dumps([str(key) for key in keys])}}}',
        f'{{"instance_id":"{instance}","query_type":1.0,"block_keys":{json.dumps(keys)},"new":{{"a":[1]}},"sw_size":null}}',
    ]
    answers = [_json(driver, "getCacheLocation", text)["locations"] for text in texts]
    assert answers[0] == answers[1] == answers[2]
    assert all(entry["location_specs"][0]["uri"] for entry in answers[0])


def test_answers_print_int64_as_text_int32_as_number_enums_as_names_and_defaults(driver: HttpDriver) -> None:
    name, group = unique("storage"), unique("group")
    storage = {"storage": {"global_unique_name": name, "dummy": {"root_path": "", "key_count_per_file": 0}}}
    _json(driver, "addStorage", json.dumps(storage), admin=True)
    spec = group_spec(group, name, capacity=2**53 + 1, types={"ST_DUMMY": 7}, ratio=0.5)
    _json(driver, "createInstanceGroup", json.dumps({"instance_group": spec}), admin=True)
    stored = _json(driver, "getInstanceGroup", json.dumps({"name": group}), admin=True)["instance_group"]
    assert stored["quota"] == {
        "capacity": "9007199254740993",
        "quota_config": [{"storage_type": "ST_DUMMY", "capacity": "7"}],
    }
    assert stored["version"] == "1"
    assert stored["user_data"] == ""
    assert stored["max_instance_count"] == "0"
    strategy = stored["cache_config"]["reclaim_strategy"]
    assert strategy["trigger_strategy"] == {"used_size": "0", "used_percentage": 0.5}
    assert strategy["delay_before_delete_ms"] == 0
    assert strategy["reclaim_policy"] == "POLICY_LRU"
    listed = _json(driver, "listStorage", "{}", admin=True)["storage"]
    assert [s for s in listed if s["global_unique_name"] == name] == [
        {
            "global_unique_name": name,
            "dummy": {"root_path": "", "key_count_per_file": 0},
            "check_storage_available_when_open": False,
            "capacity_bytes": "0",
            "used_percentage": 0.0,
        }
    ]


def test_an_answer_has_no_whitespace_between_its_tokens(driver: HttpDriver) -> None:
    answer = post(driver.data, "/api/getInstanceInfo", b'{"instance_id":"nobody","trace_id":"t"}')
    assert b'{"header":{"status":{"code":"INSTANCE_NOT_EXIST","message":"' in answer.body
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body)["header"]["tracer_result"] == ""


def test_admin_answers_have_no_tracer_result(driver: HttpDriver) -> None:
    assert set(_json(driver, "listAccount", "{}", admin=True)["header"]) == {"status", "request_id"}


def test_unset_messages_are_left_out_and_empty_lists_are_printed(driver: HttpDriver, site: Site) -> None:
    info = _json(driver, "getInstanceInfo", '{"instance_id":"nobody"}')
    assert set(info) == {"header", "instance_group"}
    query = json.dumps({"instance_id": site.instance(), "query_type": "QT_PREFIX_MATCH", "block_keys": [1]})
    assert _json(driver, "getCacheLocation", query)["locations"] == []


def test_a_mask_of_offset_0_is_printed_and_bool_masks_is_left_out(driver: HttpDriver, site: Site) -> None:
    start = json.dumps({"instance_id": site.instance(), "block_keys": [1]})
    assert _json(driver, "startWriteCache", start)["block_mask"] == {"offset": 0}


# ── What real clients send ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_vllm_connector_registers_writes_and_finishes(driver: HttpDriver, site: Site) -> None:
    instance, group = unique("vllm"), site.group()
    registration = json.dumps(instance_fields(instance, group))
    for _ in range(2):  # every process of an engine registers
        answer = _json(driver, "registerInstance", registration)
        assert [config["type"] for config in json.loads(answer["storage_configs"])] == ["dummy"]
    start = json.dumps({"instance_id": instance, "block_keys": [], "token_ids": list(range(1, 10))})
    started = _json(driver, "startWriteCache", start)
    assert started["block_mask"]["offset"] == 0
    assert len(started["locations"]) == 2
    finish = {"instance_id": instance, "write_session_id": started["write_session_id"]}
    done = _json(
        driver, "finishWriteCache", json.dumps({**finish, "success_blocks": {"bool_masks": {"values": [True, True]}}})
    )
    assert done["header"]["status"]["code"] == "OK"
    again = _json(driver, "startWriteCache", start)
    assert (again["block_mask"], again["locations"]) == ({"offset": 2}, [])
    stray = {"bool_masks": {"offset": 0}}
    finish = {"instance_id": instance, "write_session_id": again["write_session_id"], "success_blocks": stray}
    assert _json(driver, "finishWriteCache", json.dumps(finish))["header"]["status"]["code"] == "OK"


def test_the_stray_key_of_the_vllm_connector_is_no_excuse_for_missing_flags(driver: HttpDriver, site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    finish = {
        "instance_id": instance,
        "write_session_id": started.write_session_id,
        "success_blocks": {"bool_masks": {"offset": 0}},
    }
    assert _json(driver, "finishWriteCache", json.dumps(finish))["header"]["status"]["code"] == "INVALID_ARGUMENT"


def test_the_sglang_connector_finishes_with_flags_also_with_none(driver: HttpDriver, site: Site) -> None:
    instance = site.instance()
    site.write(instance, [1, 2])
    started = _json(driver, "startWriteCache", json.dumps({"instance_id": instance, "block_keys": [1, 2]}))
    assert started["block_mask"]["offset"] == 2
    finish = {"instance_id": instance, "write_session_id": started["write_session_id"]}
    done = _json(driver, "finishWriteCache", json.dumps({**finish, "success_blocks": {"bool_masks": {"values": []}}}))
    assert done["header"]["status"]["code"] == "OK"
