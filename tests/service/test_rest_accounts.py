"""/v1/accounts, /v1/usage and /v1/pins against a live manager."""

from __future__ import annotations

import pytest
from rest_client import RestClient, component
from test_transport_drivers import Api
from test_transport_process import ManagerProcess
from test_transport_sites import Site, unique


@pytest.fixture
def site(apis: dict[str, Api]) -> Site:
    return Site(apis["http"])


def test_an_account_is_added_once_and_its_password_is_never_shown(rest: RestClient, server: ManagerProcess) -> None:
    name, password = unique("user@example"), "swordfish-0451"
    path = f"/v1/accounts/{component(name)}"
    made = rest.put(path, {"password": password, "role": "ROLE_ADMIN"})
    assert (made.status, made.body) == (201, {"user_name": name, "role": "ROLE_ADMIN"})
    assert (rest.get(path).body, rest.get(path).headers["etag"]) == (made.body, made.headers["etag"])
    assert made.body in rest.items("/v1/accounts")
    again = rest.put(path, {"password": password})
    assert (again.status, again.body["code"]) == (409, "DUPLICATE_ENTITY")
    assert rest.put(path, {"password": password}, if_none_match="*").status == 412
    refused = rest.put(path, {"password": [password], "role": "ROLE_KING"})
    assert refused.status == 400
    assert password.encode() not in made.raw + again.raw + refused.raw
    assert rest.delete(path).status == 204
    assert [rest.get(path).status, rest.delete(path).status] == [404, 404]
    assert password not in server.log_text()


def test_the_password_of_an_account_is_changed(rest: RestClient, server: ManagerProcess) -> None:
    path = f"/v1/accounts/{component(name := unique('user@example'))}"
    rest.put(path, {"password": "old-swordfish"})
    changed = rest.put(f"{path}/password", {"password": "new-swordfish"})
    assert (changed.status, changed.raw) == (204, b"")
    found = [rest.post("/v1/login", {"user_name": name, "password": f"{age}-swordfish"}) for age in ("old", "new")]
    assert [answer.status for answer in found] == [401, 201]
    assert rest.put("/v1/accounts/nobody/password", {"password": "p"}).status == 404
    for body in (
        {},
        {"password": ""},
        {"password": "p", "old_password": "swordfish" * 200},
        {"password": "swordfish" * 200},
    ):
        refused = rest.put(f"{path}/password", body)
        assert (refused.status, bool(refused.body["errors"]), b"swordfish" in refused.raw) == (400, True, False)
    assert "swordfish" not in server.log_text()


@pytest.mark.parametrize("body", [{}, {"password": ""}, {"password": "a", "user_name": "b"}, [], "secret-text"])
def test_what_is_no_account_is_400(rest: RestClient, body: object) -> None:
    refused = rest.put(f"/v1/accounts/{unique('user')}", body)
    assert (refused.status, bool(refused.body["errors"])) == (400, True)


def test_usage_is_that_of_the_calls(rest: RestClient, site: Site) -> None:
    instance = site.instance(group := site.group(capacity=1000))
    site.write(instance, [1, 2])
    usage = rest.get(f"/v1/usage?group={component(group)}").body
    (shown,) = usage["groups"]
    assert (shown["name"], shown["total"]["used_bytes"], shown["total"]["capacity_bytes"]) == (group, 128, 1000)
    assert [(each["instance_id"], each["key_count"]) for each in shown["instances"]] == [(instance, 2)]
    assert group in [each["name"] for each in rest.get("/v1/usage").body["groups"]]
    assert rest.get("/v1/usage?group=none").status == 400


def test_pins_are_made_listed_and_ended(rest: RestClient, site: Site) -> None:
    instance = site.instance(site.group(pin_budget_bytes=1 << 20))
    keys = [9007199254740993, -(2**63), 2**63 - 1]
    site.write(instance, keys)
    order = {"instance_id": instance, "block_keys": [str(key) for key in keys], "owner": "me", "ttl_seconds": 60}
    made = rest.post("/v1/pins", order)
    assert (made.status, made.body["pinned_blocks"], made.body["pinned_bytes"]) == (201, 3, 192)
    assert made.headers["location"] == f"/v1/pins/{instance}/{made.body['pin_id']}"
    (pin,) = rest.items(f"/v1/pins?instance={instance}")
    assert (pin["pin_id"], pin["owner"], pin["last_block_key"]) == (made.body["pin_id"], "me", str(keys[-1]))
    assert rest.delete(made.headers["location"]).status == 204
    assert rest.delete(made.headers["location"]).status == 204
    assert rest.items(f"/v1/pins?instance={instance}") == []
    nothing = rest.post("/v1/pins", {**order, "block_keys": ["5"]})
    assert (nothing.status, "nothing to pin" in nothing.body["detail"]) == (409, True)
    assert rest.post("/v1/pins", {**order, "instance_id": "none"}).status == 404
    assert rest.get("/v1/pins?instance=none").status == 404
    assert rest.delete("/v1/pins/none/abc").status == 404


def test_a_pin_above_the_budget_is_507(rest: RestClient, site: Site) -> None:
    instance = site.instance(site.group(pin_budget_bytes=10))
    site.write(instance, [1])
    order = {"instance_id": instance, "block_keys": ["1"], "owner": "me", "ttl_seconds": 60}
    refused = rest.post("/v1/pins", order)
    assert (refused.status, refused.body["code"]) == (507, "REACH_MAX_ENTITY_CAPACITY")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_keys": [1]}, "body.block_keys[0]"),
        ({"block_keys": ["0x1"]}, "body.block_keys[0]"),
        ({"block_keys": ["1_0"]}, "body.block_keys[0]"),
        ({"block_keys": "1"}, "body.block_keys"),
        ({"ttl_seconds": 0}, "body.ttl_seconds"),
        ({"ttl_seconds": 10**9}, "body.ttl_seconds"),
        ({"owner": ""}, "body.owner"),
        ({"token_ids": ["1"]}, "body.token_ids[0]"),
    ],
)
def test_an_order_that_is_no_pin_names_the_field(rest: RestClient, change: dict[str, object], field: str) -> None:
    order = {"instance_id": "i", "block_keys": ["1"], "owner": "me", "ttl_seconds": 60}
    refused = rest.post("/v1/pins", {**order, **change})
    assert (refused.status, [error["field"] for error in refused.body["errors"]]) == (400, [field])


def test_a_block_key_beyond_64_bits_is_400(rest: RestClient, site: Site) -> None:
    order = {"instance_id": site.instance(), "block_keys": [str(2**63)], "owner": "me", "ttl_seconds": 60}
    refused = rest.post("/v1/pins", order)
    assert (refused.status, "block_keys[0]" in refused.body["detail"]) == (400, True)
