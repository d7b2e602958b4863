"""Every call x every kind of credential x every transport: the permissions are written down here a second time."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from secured import Tenants, secured_over
from test_transport_drivers import SERVICES, Api, post
from test_transport_sites import Site, unique

from kvcm.service.access import PAGE_POLICIES, POLICIES, Scope

_ADMIN = "admin"
_OPERATORS = "operator admin"
_VIEWERS = "viewer operator admin"
_MATCH = "match engine everywhere operator admin"
_WRITE = "write engine everywhere admin"
_REMOVE = "remove engine everywhere operator admin"
_PIN = "pin engine everywhere operator admin"
_SCORE = "score engine everywhere operator admin"
_ALL = "viewer operator admin match write remove pin score engine everywhere foreign"
_EVERYBODY = f"{_ALL} anonymous malformed wrong expired"
_KNOWS_REGISTRATION = "viewer operator admin match write engine everywhere"

MAY = {
    "MetaService": {
        _WRITE: "RegisterInstance StartWriteCache FinishWriteCache",
        _KNOWS_REGISTRATION: "GetInstanceInfo",
        _MATCH: "GetCacheMeta GetCacheLocation GetCacheLocationLen",
        _REMOVE: "RemoveCache TrimCache",
        _ALL: "GetClusterInfo",
        f"{_WRITE} operator": "ReportEvent",
        f"{_MATCH} score": "GetHostCacheState GetCacheLocationsByBackend",
    },
    "LeaseService": {_MATCH: "RenewReadLease ReleaseReadLease", _WRITE: "RenewWriteSession"},
    "PinService": {
        _PIN: "PinPrefix UnpinPrefix",
        "pin engine everywhere viewer operator admin": "ListPins",
        _MATCH: "ReportMissing",
    },
    "PoolService": {"everywhere admin": "ReportPool"},
    "ResidencyService": {
        f"{_WRITE} operator": "ReportResidency RegisterPublisher UnregisterPublisher",
        _SCORE: "Score MatchModel",
        f"{_SCORE} viewer": "ListReporters",
        f"{_SCORE} viewer write": "DescribeIndex",
    },
    "AdminService": {
        _ADMIN: (
            "AddStorage RemoveStorage UpdateStorage CreateInstanceGroup UpdateInstanceGroup RemoveInstanceGroup "
            "RemoveInstance AddAccount DeleteAccount LoadConfigSnapshot"
        ),
        _OPERATORS: (
            "EnableStorage DisableStorage ListAccount GenConfigSnapshot LeaderDemote UpdateLeaderElectorConfig "
            "UpdateLogger"
        ),
        _VIEWERS: "ListStorage GetInstanceGroup ListInstanceGroup ListInstanceInfo GetMetrics GetLeaderElectorConfig",
        _MATCH: "GetCacheMeta",
        _REMOVE: "RemoveCache",
        _WRITE: "RegisterInstance",
        _KNOWS_REGISTRATION: "GetInstanceInfo",
        _ALL: "GetManagerClusterInfo",
        _EVERYBODY: "CheckHealth",
    },
    "GroupService": {_VIEWERS: "ListInstanceGroup ListGroupStore", _ADMIN: "MoveInstanceGroup"},
    "CapacityService": {
        _VIEWERS: "GetUsage ListGlobalQuota",
        _OPERATORS: "CollectGarbage ScrubStorage",
        _ADMIN: "SetGlobalQuota RemoveGlobalQuota",
    },
    "InsightService": {_VIEWERS: "ListSessions GetCurve ListAlerts", f"{_MATCH} viewer": "ExploreBlocks"},
    "StorageService": {_OPERATORS: "DrainStorage CancelDrain", _VIEWERS: "ListDrain"},
    "ConfigService": {_OPERATORS: "ReloadConfig"},
    "AccessService": {
        # A login may change the password of its own account: test_passwords_and_first_keys.py
        _ADMIN: "CreateKey RotateKey RevokeKey SetPassword",
        _OPERATORS: "ListKeys",
        _ALL: "Logout WhoAmI",
        _EVERYBODY: "Login",
    },
}
_MAY_CALL = {
    f"{service}.{name}": set(may.split())
    for service, calls in MAY.items()
    for may, names in calls.items()
    for name in names.split()
}
_STRANGERS = {
    "anonymous": ("", "known here|a key is required"),
    "malformed": ("Bearer kvcm_abc", "must be: Bearer"),
    "wrong": (f"Bearer kvcm_{'a' * 16}_{'b' * 43}", "not known"),
}


@pytest.fixture(scope="module", params=["plain", "mtls"])
def tenants(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with secured_over(request.param, tmp_path_factory.mktemp("secured")) as server:
        yield Tenants.on(server)


@pytest.fixture(scope="module", params=["grpc", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stranger(transport: str, tenants: Tenants) -> Iterator[Api]:
    with tenants.server.api(transport, key="") as api:
        yield api


@pytest.fixture(scope="module")
def certified(transport: str, tenants: Tenants) -> Iterator[dict[str, Api]]:
    """Clients with a certificate in the place of a key, by name; none where the manager asks for no certificates."""
    with contextlib.ExitStack() as stack:
        names = [] if tenants.server.clients is None else [*tenants.keys, "unknown"]
        clients = {name: tenants.server.certified(name) for name in names}
        yield {name: stack.enter_context(tenants.server.api(transport, "", tls)) for name, tls in clients.items()}


def fields_of(rpc: str, tenants: Tenants, tenant: str = "a") -> dict[str, Any]:
    """A request about a tenant that does nothing to it."""
    service, _, name = rpc.partition(".")
    message = GetMessageClass(SERVICES[service].methods_by_name[name].input_type)
    known = message.DESCRIPTOR.fields_by_name
    fields: dict[str, Any] = {}
    if "instance_id" in known and rpc != "CapacityService.CollectGarbage":
        fields["instance_id"] = tenants.instances[tenant]
    if name == "RemoveInstance":
        fields["instance_id"] = "never-registered"
    of_group = {"MatchModel", "RegisterPublisher", "UnregisterPublisher", "DescribeIndex"}
    if name in of_group | {"RegisterInstance", "GetUsage", "GetCurve", "ListSessions", "ListAlerts"}:
        fields["instance_group"] = tenants.groups[tenant]
    if name == "ListInstanceInfo":
        fields["instance_group_name"] = tenants.groups[tenant]
    if name == "GetInstanceGroup":
        fields["name"] = tenants.groups[tenant]
    return fields


def test_the_table_has_every_call() -> None:
    served = {(service.full_name, method.name) for service in SERVICES.values() for method in service.methods}
    with_debug = {key for key in POLICIES if "debug" in key[0]}
    assert served | with_debug == set(POLICIES)
    listed = [rpc.split(".") for rpc in _MAY_CALL]
    assert {(SERVICES[service].full_name, name) for service, name in listed} == served


@pytest.mark.parametrize("tenants", ["plain"], indirect=True)
@pytest.mark.parametrize("rpc", _MAY_CALL)
def test_a_call_is_open_to_keys_with_the_permission_and_to_no_others(rpc: str, tenants: Tenants, stranger: Api) -> None:
    """Each kind of credential once; an allowed call gets an answer, even if the request makes no sense."""
    may = _MAY_CALL[rpc]
    answered = may | _answered_as_unknown(rpc)
    fields = fields_of(rpc, tenants)
    found = {name: stranger.attempt(rpc, tenants.authorization(name), **fields) for name in tenants.keys}
    found |= {name: stranger.attempt(rpc, sent, **fields) for name, (sent, _) in _STRANGERS.items()}
    assert {name for name, turn in found.items() if turn.status == 200} == answered
    assert all("is not registered" in found[name].text for name in answered - may)
    unknown = {*_STRANGERS, "expired"}
    assert {name for name, turn in found.items() if turn.status == 401} == unknown - may
    for name, (_, text) in _STRANGERS.items():
        assert name in may or re.search(text, found[name].text)
    assert "expired" in may or "has ended" in found["expired"].text


@pytest.mark.parametrize("tenants", ["mtls"], indirect=True)
@pytest.mark.parametrize("rpc", _MAY_CALL)
def test_a_certificate_stands_for_a_key(rpc: str, tenants: Tenants, certified: dict[str, Api]) -> None:
    may = _MAY_CALL[rpc]
    fields = fields_of(rpc, tenants)
    found = {name: api.attempt(rpc, **fields).status for name, api in certified.items()}
    is_open = "anonymous" in may
    answered = set(found) if is_open else may | _answered_as_unknown(rpc)
    assert {name for name, status in found.items() if status == 200} == answered
    assert {name for name, status in found.items() if status == 401} == (set() if is_open else {"unknown", "expired"})


def _answered_as_unknown(rpc: str) -> set[str]:
    """Return the kinds of keys that may call this, and not for the instance of tenant a: they do not learn of it."""
    return {"foreign"} if _is_of_instance(rpc) and "engine" in _MAY_CALL[rpc] else set()


def _is_of_instance(rpc: str) -> bool:
    service, _, name = rpc.partition(".")
    return POLICIES[SERVICES[service].full_name, name].scope is Scope.INSTANCE


_OF_TENANTS = [rpc for rpc, may in _MAY_CALL.items() if may & {"engine", "viewer"} and "foreign" not in may]


@pytest.mark.parametrize("rpc", _OF_TENANTS)
def test_a_tenant_has_no_permission_in_the_group_of_another(rpc: str, tenants: Tenants, stranger: Api) -> None:
    """A key has no permission in a group that it does not name. Nothing there is shown, not even that it exists."""
    fields, foreign = fields_of(rpc, tenants, "b"), tenants.instances["b"]
    for kind, key in (("engine", tenants.keys["engine"]), ("admin", tenants.admin_of_a)):
        turn = stranger.attempt(rpc, f"Bearer {key}", **fields)
        if _is_of_instance(rpc) and kind in _MAY_CALL[rpc]:
            unknown = stranger.attempt(rpc, f"Bearer {key}", **{**fields, "instance_id": "unknown"})
            assert (turn.status, unknown.status) == (200, 200)
            assert turn.text.replace(fields["instance_id"], "unknown") == unknown.text
            assert "'unknown' is not registered" in unknown.text
        else:
            assert (turn.status, foreign in turn.text, tenants.groups["b"] in turn.text) == (403, False, False)


def test_pages_are_shown_to_keys_with_the_permission(tenants: Tenants) -> None:
    allowed = {
        **dict.fromkeys(("/livez", "/readyz", "/startupz"), _ALL.split()),
        **dict.fromkeys(("/metrics", "/api/events"), _VIEWERS.split()),
    }
    for path, may in allowed.items():
        for name, key in tenants.keys.items():
            status, _ = tenants.server.page(path, key, is_stream=path == "/api/events")
            expected = 200 if name in may or PAGE_POLICIES[path].is_open else 401 if name == "expired" else 403
            assert status == expected, (path, name)


def test_reasons_of_probes_are_shown_to_keys_that_may_view(tenants: Tenants) -> None:
    names = ("viewer", "engine", "expired")
    shown = {name: tenants.server.page("/readyz?verbose", tenants.keys[name])[1] for name in names}
    assert "metadata-store" in shown["viewer"]
    assert shown["engine"] == shown["expired"] == "ok"


_BY_KEYS = ["GetCacheLocation", "GetCacheLocationLen", "GetCacheMeta", "StartWriteCache", "RemoveCache"]
_OF_BLOCKS: dict[str, dict[str, Any]] = {
    **{rpc: {"block_keys": [1, 2]} for rpc in _BY_KEYS},
    "FinishWriteCache": {"write_session_id": "0" * 32},
    "TrimCache": {"strategy": "TS_REMOVE_ALL_CACHE"},
    "PinService.PinPrefix": {"block_keys": [1, 2], "owner": "eve", "ttl_seconds": 60},
    "PinService.ReportMissing": {"parts": [{"block_key": 1, "uri": "file://nfs_01/x"}]},
}


def test_a_refused_call_makes_no_lookup(tenants: Tenants, stranger: Api) -> None:
    """A hit and a miss have the same answer, and no lookup is counted: there is nothing to time."""
    with tenants.server.api(key=tenants.keys["foreign"]) as owner:
        site = Site(owner)
        site.write(tenants.instances["b"], [1, 2])
        before = _lookups(tenants)
        for rpc, fields in _OF_BLOCKS.items():
            hit = stranger.attempt(rpc, tenants.authorization("engine"), instance_id=tenants.instances["b"], **fields)
            missing = {**fields, "block_keys": [77]} if "block_keys" in fields else fields
            miss = stranger.attempt(rpc, tenants.authorization("engine"), instance_id=tenants.instances["b"], **missing)
            assert (hit.status, hit.text) == (miss.status, miss.text), rpc
            assert "is not registered" in hit.text, rpc
        assert _lookups(tenants) == before
        assert site.hits(tenants.instances["b"], [1, 2]) == [1, 2]


@pytest.mark.parametrize("misspelled", [{"verbs": ["match"]}, {"verb": ["MATCH"]}, {"ttl": 60}])
def test_a_misspelled_limit_makes_no_key(tenants: Tenants, misspelled: dict[str, Any]) -> None:
    name, headers = unique("key"), {"authorization": f"Bearer {tenants.server.admin_key}"}
    body = {"name": name, "role": "ROLE_ENGINE", "instance_groups": ["*"], **misspelled}
    with tenants.server.api("http") as api:
        refused = post(api.driver.admin, "/api/createKey", json.dumps(body).encode(), headers=headers)
        assert (refused.status, next(iter(misspelled)) in refused.headers["x-kvcm-error"]) == (400, True)
        assert name not in {key.name for key in api.ok("AccessService.ListKeys").keys}


def _lookups(tenants: Tenants) -> list[str]:
    _, text = tenants.server.page("/metrics", tenants.keys["viewer"])
    return [line for line in text.splitlines() if line.startswith(("kvcm_lookup_", "kvcm_write_sessions"))]
