"""Every resource x every kind of credential: the permissions are those of the calls behind it, written down again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from rest_client import RestAnswer, RestClient, component
from secured import Tenants, secured
from test_transport_sites import Site, unique

from kvcm.model.principals import new_key

_VIEWERS = {"viewer", "operator", "admin"}
_OPERATORS = {"operator", "admin"}
_ADMINS = {"admin"}
_OF_INSTANCES = {"getInstance", "exploreInstance", "listPins", "createPin", "deletePin", "score", "listReporters"}
_OF_A = {"match", "write", "remove", "pin", "score", "engine"}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with secured(tmp_path_factory.mktemp("secured"), "kvcm.optimizer.sampled_keys=64") as server:
        yield Tenants.on(server)


@pytest.fixture(scope="module")
def client(tenants: Tenants) -> Iterator[RestClient]:
    made = RestClient(tenants.server.process.address.admin_http)
    with contextlib.closing(made.connection):
        yield made


class Deed(NamedTuple):
    """One operation of the document.

    Attributes:
        may: names of the keys that may do it.
        make: prepares what it is done to; returns method, path and body.
    """

    may: set[str]
    make: Callable[[Site, Tenants], tuple[str, str, Any]]


def _get(path: str, may: set[str] = _VIEWERS) -> Deed:
    return Deed(may, lambda _site, _tenants: ("GET", path, None))


def _on_a(kind: str, path: str, may: set[str]) -> Deed:
    return Deed(may, lambda _site, tenants: ("GET", path.format(component(getattr(tenants, kind)["a"])), None))


def _document(site: Site, tenants: Tenants, path: str) -> Any:
    client = RestClient(tenants.server.process.address.admin_http)
    with contextlib.closing(client.connection):
        found = client.get(path, authorization=f"Bearer {tenants.server.admin_key}").body
    return {name: value for name, value in found.items() if name not in {"version", "status"}}


def _storage(method: str, suffix: str = "", body: Any = None) -> Callable[[Site, Tenants], tuple[str, str, Any]]:
    return lambda site, _tenants: (method, f"/v1/storages/{component(site.storage())}{suffix}", body)


def _put(kind: str, make: Callable[[Site, Tenants], str]) -> Callable[[Site, Tenants], tuple[str, str, Any]]:
    """Return a function that prepares a PUT of an unchanged resource."""

    def prepare(site: Site, tenants: Tenants) -> tuple[str, str, Any]:
        path = f"/v1/{kind}/{component(make(site, tenants))}"
        return "PUT", path, _document(site, tenants, path)

    return prepare


def _account(site: Site) -> str:
    name = unique("user")
    site.api.ok("AdminService.AddAccount", user_name=name, password="right", role="ROLE_USER")
    return f"/v1/accounts/{name}"


def _key(site: Site) -> str:
    made = site.api.ok("AccessService.CreateKey", name=unique("key"), role="ROLE_VIEWER")
    return f"/v1/keys/{made.key.key_id}"


def _drain(site: Site) -> str:
    name = site.storage()
    site.api.ok("StorageService.DrainStorage", storage_unique_name=name)
    return name


def _pin(site: Site, tenants: Tenants) -> str:
    instance = tenants.instances["a"]
    key = int(unique("1").rpartition("-")[2])
    site.write(instance, [key])
    fields = {"block_keys": [key], "owner": "o", "ttl_seconds": 60}
    made = site.api.ok("PinService.PinPrefix", instance_id=instance, **fields)
    return f"/v1/pins/{component(instance)}/{made.pin_id}"


def _create_pin(site: Site, tenants: Tenants) -> tuple[str, str, Any]:
    instance = tenants.instances["a"]
    site.write(instance, [424_242])
    order = {"instance_id": instance, "block_keys": ["424242"], "owner": "o", "ttl_seconds": 60}
    return "POST", "/v1/pins", order


def _curve(site: Site, tenants: Tenants) -> tuple[str, str, Any]:
    site.match(tenants.instances["a"], [1, 2, 3])
    return "GET", f"/v1/groups/{component(tenants.groups['a'])}/curve", None


def _explore(_site: Site, tenants: Tenants) -> tuple[str, str, Any]:
    return "POST", f"/v1/instances/{component(tenants.instances['a'])}/explore", {"block_keys": ["1"]}


def _score(_site: Site, tenants: Tenants) -> tuple[str, str, Any]:
    return "POST", "/v1/score", {"instance_id": tenants.instances["a"], "block_keys": ["1"]}


_PINNING = {"pin", "engine", "everywhere"}
_SCORING = {"score", "engine", "everywhere"}
ACTIONS = {
    "listStorages": _get("/v1/storages"),
    "getStorage": Deed(_VIEWERS, _storage("GET")),
    "getStorageStatus": Deed(_VIEWERS, _storage("GET", "/status")),
    "putStorage": Deed(_ADMINS, _put("storages", lambda site, _: site.storage())),
    "patchStorage": Deed(_ADMINS, _storage("PATCH", body={"capacity_bytes": 1 << 40})),
    "deleteStorage": Deed(_ADMINS, _storage("DELETE")),
    "drainStorage": Deed(_OPERATORS, _storage("POST", "/drain")),
    "cancelDrain": Deed(_OPERATORS, lambda site, _: ("DELETE", f"/v1/storages/{_drain(site)}/drain", None)),
    "listGroups": _get("/v1/groups"),
    "getGroup": _on_a("groups", "/v1/groups/{}", _VIEWERS),
    "getGroupCurve": Deed(_VIEWERS, _curve),
    "getGroupStore": Deed(_VIEWERS, lambda site, _: ("GET", f"/v1/groups/{component(site.group())}/store", None)),
    "putGroupStore": Deed(
        _ADMINS, lambda site, _: ("PUT", f"/v1/groups/{component(site.group())}/store", {"store": "registry"})
    ),
    "listStores": _get("/v1/stores"),
    "putGroup": Deed(_ADMINS, _put("groups", lambda site, _: site.group())),
    "patchGroup": Deed(
        _ADMINS, lambda site, _: ("PATCH", f"/v1/groups/{component(site.group())}", {"user_data": "mine"})
    ),
    "deleteGroup": Deed(_ADMINS, lambda site, _: ("DELETE", f"/v1/groups/{component(site.group())}", None)),
    "listInstances": _get("/v1/instances"),
    "getInstance": _on_a("instances", "/v1/instances/{}", _VIEWERS | {"match", "write", "engine", "everywhere"}),
    "putInstance": Deed(
        {"admin", "write", "engine", "everywhere"}, _put("instances", lambda _, tenants: tenants.instances["a"])
    ),
    "deleteInstance": Deed(_ADMINS, lambda site, _: ("DELETE", f"/v1/instances/{component(site.instance())}", None)),
    "listAccounts": _get("/v1/accounts", _OPERATORS),
    "getAccount": Deed(_OPERATORS, lambda site, _: ("GET", _account(site), None)),
    "putAccount": Deed(_ADMINS, lambda _site, _: ("PUT", f"/v1/accounts/{unique('new')}", {"password": "p"})),
    "setAccountPassword": Deed(_ADMINS, lambda site, _: ("PUT", f"{_account(site)}/password", {"password": "p"})),
    "deleteAccount": Deed(_ADMINS, lambda site, _: ("DELETE", _account(site), None)),
    "listKeys": _get("/v1/keys", _OPERATORS),
    "getKey": Deed(_OPERATORS, lambda site, _: ("GET", _key(site), None)),
    "createKey": Deed(_ADMINS, lambda _site, _: ("POST", "/v1/keys", {"name": unique("made"), "role": "ROLE_VIEWER"})),
    "revokeKey": Deed(_ADMINS, lambda site, _: ("DELETE", _key(site), None)),
    "rotateKey": Deed(_ADMINS, lambda site, _: ("POST", f"{_key(site)}/rotate", {})),
    "logout": Deed(_VIEWERS | _OF_A | {"foreign", "everywhere"}, lambda _site, _: ("DELETE", "/v1/login", None)),
    "whoAmI": _get("/v1/whoami", _VIEWERS | _OF_A | {"foreign", "everywhere"}),
    "getUsage": _get("/v1/usage"),
    "listManagers": _get("/v1/managers"),
    "getHistory": _get("/v1/history"),
    "listSessions": _get("/v1/sessions"),
    "exploreInstance": Deed(_VIEWERS | {"match", "engine", "everywhere"}, _explore),
    "listAlerts": _get("/v1/alerts"),
    "listTasks": _get("/v1/tasks"),
    "createTask": Deed(_OPERATORS, lambda site, _: ("POST", "/v1/tasks", {"kind": "drain", "storage": site.storage()})),
    "getTask": Deed(_VIEWERS, lambda site, _: ("GET", f"/v1/tasks/drain:{_drain(site)}", None)),
    "deleteTask": Deed(_OPERATORS, lambda site, _: ("DELETE", f"/v1/tasks/drain:{_drain(site)}", None)),
    "listRecentEvents": _get("/v1/events/recent", _ADMINS),
    "listPins": Deed(
        _VIEWERS | _PINNING,
        lambda _site, tenants: ("GET", f"/v1/pins?instance={component(tenants.instances['a'])}", None),
    ),
    "createPin": Deed(_OPERATORS | _PINNING, _create_pin),
    "score": Deed(_OPERATORS | _SCORING, _score),
    "listReporters": _on_a("instances", "/v1/instances/{}/residency", _VIEWERS | _SCORING),
    "deletePin": Deed(_OPERATORS | _PINNING, lambda site, tenants: ("DELETE", _pin(site, tenants), None)),
}
_STRANGERS = {"anonymous": "", "malformed": "Bearer kvcm_x", "wrong": f"Bearer {new_key().text}"}


def _ask(client: RestClient, deed: tuple[str, str, Any], authorization: str) -> RestAnswer:
    headers = {"authorization": authorization} if authorization else {}
    return client.ask(*deed, **headers)


def test_the_table_has_every_operation(client: RestClient) -> None:
    document = client.get("/v1/openapi.json").body
    operations = {each["operationId"] for path in document["paths"].values() for each in path.values()}
    assert operations - {"login"} == ACTIONS.keys()


@pytest.mark.parametrize("operation", ACTIONS)
def test_only_keys_with_the_permission_open_a_resource(operation: str, tenants: Tenants, client: RestClient) -> None:
    may, make = ACTIONS[operation]
    with tenants.server.api() as api:
        deed = make(Site(api), tenants)
    for name, authorization in (*_STRANGERS.items(), ("expired", tenants.authorization("expired"))):
        answer = _ask(client, deed, authorization)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Bearer realm="kvcm"'), name
        assert answer.body["status"] == 401
    for name in tenants.keys.keys() - may - {"expired"}:
        answer = _ask(client, deed, tenants.authorization(name))
        is_hidden = name == "foreign" and operation in _OF_INSTANCES
        status, text = (404, "is not registered|does not exist") if is_hidden else (403, "may not")
        assert (answer.status, bool(re.search(text, answer.body["detail"]))) == (status, True), (name, answer)
    for name in sorted(may):
        with tenants.server.api() as api:
            fresh = make(Site(api), tenants)
        answer = _ask(client, fresh, tenants.authorization(name))
        assert 200 <= answer.status < 300, (name, answer)


@pytest.mark.parametrize(
    "path",
    ["/v1/nothing", "/v1/", "/v1/groups/none", "/v1/%6cogin", "/v1/login/", "/v1//login", "/v1/openapi.json/../keys"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_stranger_does_not_learn_which_resources_exist(client: RestClient, method: str, path: str) -> None:
    assert client.ask(method, path).status in {401, 404, 405}
    assert "groups" not in str(client.ask(method, path).body)


def test_a_login_needs_no_key(tenants: Tenants, client: RestClient) -> None:
    with tenants.server.api() as api:
        user = _account(Site(api)).rpartition("/")[2]
    made = client.post("/v1/login", {"user_name": user, "password": "right"})
    assert made.status in {200, 201}
    assert client.get("/v1/groups", authorization=f"Bearer {made.body['secret']}").status == 200
    assert client.post("/v1/login", {"user_name": user, "password": "wrong"}).status == 401
