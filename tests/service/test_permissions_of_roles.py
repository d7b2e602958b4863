"""Every call x every kind of credential x every transport: who may make it is written down here a second time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from secured import Tenants, secured_over
from test_transport_drivers import SERVICES, Api
from test_transport_sites import Site

from kvcm.service.access import PAGE_POLICIES, POLICIES

_ADMIN = "admin"
_OPERATORS = "operator admin"
_VIEWERS = "viewer operator admin"
_MATCH = "match engine everywhere operator admin"
_WRITE = "write engine everywhere admin"
_REMOVE = "remove engine everywhere operator admin"
_PIN = "pin engine everywhere operator admin"
_ALL = "viewer operator admin match write remove pin engine everywhere foreign"
_KNOWS_REGISTRATION = "viewer operator admin match write engine everywhere"

MAY = {
    "MetaService": {
        "RegisterInstance": _WRITE,
        "GetInstanceInfo": _KNOWS_REGISTRATION,
        "GetCacheMeta": _MATCH,
        "GetCacheLocation": _MATCH,
        "GetCacheLocationLen": _MATCH,
        "StartWriteCache": _WRITE,
        "FinishWriteCache": _WRITE,
        "RemoveCache": _REMOVE,
        "TrimCache": _REMOVE,
        "GetClusterInfo": _ALL,
    },
    "LeaseService": {"RenewReadLease": _MATCH, "ReleaseReadLease": _MATCH, "RenewWriteSession": _WRITE},
    "PinService": {
        "PinPrefix": _PIN,
        "UnpinPrefix": _PIN,
        "ListPins": "pin engine everywhere viewer operator admin",
        "ReportMissing": _MATCH,
    },
    "PoolService": {"ReportPool": "everywhere admin"},
    "AdminService": {
        "AddStorage": _ADMIN,
        "EnableStorage": _OPERATORS,
        "DisableStorage": _OPERATORS,
        "RemoveStorage": _ADMIN,
        "UpdateStorage": _ADMIN,
        "ListStorage": _VIEWERS,
        "CreateInstanceGroup": _ADMIN,
        "UpdateInstanceGroup": _ADMIN,
        "RemoveInstanceGroup": _ADMIN,
        "GetInstanceGroup": _VIEWERS,
        "GetCacheMeta": _MATCH,
        "RemoveCache": _REMOVE,
        "RegisterInstance": _WRITE,
        "RemoveInstance": _ADMIN,
        "GetInstanceInfo": _KNOWS_REGISTRATION,
        "ListInstanceInfo": _VIEWERS,
        "AddAccount": _ADMIN,
        "DeleteAccount": _ADMIN,
        "ListAccount": _OPERATORS,
        "GenConfigSnapshot": _OPERATORS,
        "LoadConfigSnapshot": _ADMIN,
        "GetMetrics": _VIEWERS,
        "CheckHealth": f"{_ALL} nobody malformed wrong expired",
        "GetManagerClusterInfo": _ALL,
        "LeaderDemote": _OPERATORS,
        "GetLeaderElectorConfig": _VIEWERS,
        "UpdateLeaderElectorConfig": _OPERATORS,
        "UpdateLogger": _OPERATORS,
    },
    "GroupService": {"ListInstanceGroup": _VIEWERS},
    "CapacityService": {
        "GetUsage": _VIEWERS,
        "SetGlobalQuota": _ADMIN,
        "ListGlobalQuota": _VIEWERS,
        "RemoveGlobalQuota": _ADMIN,
        "CollectGarbage": _OPERATORS,
        "ScrubStorage": _OPERATORS,
    },
    "InsightService": {
        "ListSessions": _VIEWERS,
        "ExploreBlocks": f"{_MATCH} viewer",
        "GetCurve": _VIEWERS,
        "ListAlerts": _VIEWERS,
    },
    "StorageService": {"DrainStorage": _OPERATORS, "CancelDrain": _OPERATORS, "ListDrain": _VIEWERS},
    "ConfigService": {"ReloadConfig": _OPERATORS},
    "AccessService": {
        "CreateKey": _ADMIN,
        "ListKeys": _OPERATORS,
        "RotateKey": _ADMIN,
        "RevokeKey": _ADMIN,
        "Login": f"{_ALL} nobody malformed wrong expired",
        "Logout": _ALL,
        "SetPassword": _ADMIN,  # and of its own account whoever is logged in as it: test_passwords.py
        "WhoAmI": _ALL,
    },
}
_MAY_CALL = {f"{service}.{name}": set(may.split()) for service, calls in MAY.items() for name, may in calls.items()}
_STRANGERS = {
    "nobody": ("", "known here|a key is required"),
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
    """Everybody who shows a certificate in the place of a key; nobody where none are asked for."""
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
        fields["instance_id"] = "nobody-has-registered-this"
    if name in {"RegisterInstance", "GetUsage", "GetCurve", "ListSessions", "ListAlerts"}:
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
    assert {(SERVICES[service].full_name, name) for service, calls in MAY.items() for name in calls} == served


@pytest.mark.parametrize("tenants", ["plain"], indirect=True)
@pytest.mark.parametrize("rpc", _MAY_CALL)
def test_a_call_is_made_by_those_who_may_and_by_no_one_else(rpc: str, tenants: Tenants, stranger: Api) -> None:
    """Each kind of credential once; who may do a thing gets an answer, be it that the request makes no sense."""
    may = _MAY_CALL[rpc]
    fields = fields_of(rpc, tenants)
    found = {who: stranger.attempt(rpc, tenants.authorization(who), **fields) for who in tenants.keys}
    found |= {who: stranger.attempt(rpc, sent, **fields) for who, (sent, _) in _STRANGERS.items()}
    assert {who for who, turn in found.items() if turn.status == 200} == may
    unknown = {*_STRANGERS, "expired"}
    assert {who for who, turn in found.items() if turn.status == 401} == unknown - may
    for who, (_, text) in _STRANGERS.items():
        assert who in may or re.search(text, found[who].text)
    assert "expired" in may or "has ended" in found["expired"].text


@pytest.mark.parametrize("tenants", ["mtls"], indirect=True)
@pytest.mark.parametrize("rpc", _MAY_CALL)
def test_a_certificate_stands_for_a_key(rpc: str, tenants: Tenants, certified: dict[str, Api]) -> None:
    may = _MAY_CALL[rpc]
    fields = fields_of(rpc, tenants)
    found = {who: api.attempt(rpc, **fields).status for who, api in certified.items()}
    is_open = "nobody" in may
    assert {who for who, status in found.items() if status == 200} == (set(found) if is_open else may)
    assert {who for who, status in found.items() if status == 401} == (set() if is_open else {"unknown", "expired"})


_OF_TENANTS = [rpc for rpc, may in _MAY_CALL.items() if may & {"engine", "viewer"} and "foreign" not in may]


@pytest.mark.parametrize("rpc", _OF_TENANTS)
def test_a_tenant_may_nothing_with_what_is_another_s(rpc: str, tenants: Tenants, stranger: Api) -> None:
    """Whatever a key may: not in a group that it does not name. The answer says nothing of what is there."""
    fields = fields_of(rpc, tenants, "b")
    for key in (tenants.keys["engine"], tenants.admin_of_a):
        authorization = f"Bearer {key}"
        turn = stranger.attempt(rpc, authorization, **fields)
        assert turn.status == 403
        assert tenants.instances["b"] not in turn.text
        assert tenants.groups["b"] not in turn.text


def test_pages_are_shown_to_those_who_may(tenants: Tenants) -> None:
    allowed = {
        **dict.fromkeys(("/livez", "/readyz", "/startupz"), _ALL.split()),
        **dict.fromkeys(("/metrics", "/api/events"), _VIEWERS.split()),
    }
    for path, may in allowed.items():
        for who, key in tenants.keys.items():
            status, _ = tenants.server.page(path, key, is_stream=path == "/api/events")
            expected = 200 if who in may or PAGE_POLICIES[path].is_open else 401 if who == "expired" else 403
            assert status == expected, (path, who)


def test_reasons_of_probes_are_shown_to_those_who_may_view(tenants: Tenants) -> None:
    shown = {
        who: tenants.server.page("/readyz?verbose", tenants.keys[who])[1] for who in ("viewer", "engine", "expired")
    }
    assert "metadata-store" in shown["viewer"]
    assert shown["engine"] == shown["expired"] == "ok"


_OF_BLOCKS = {
    "GetCacheLocation": {"block_keys": [1, 2]},
    "GetCacheLocationLen": {"block_keys": [1, 2]},
    "GetCacheMeta": {"block_keys": [1, 2]},
    "StartWriteCache": {"block_keys": [1, 2]},
    "FinishWriteCache": {"write_session_id": "0" * 32},
    "RemoveCache": {"block_keys": [1, 2]},
    "TrimCache": {"strategy": "TS_REMOVE_ALL_CACHE"},
    "PinService.PinPrefix": {"block_keys": [1, 2], "owner": "eve", "ttl_seconds": 60},
    "PinService.ReportMissing": {"parts": [{"block_key": 1, "uri": "file://nfs_01/x"}]},
}


def test_what_is_refused_was_not_looked_up(tenants: Tenants, stranger: Api) -> None:
    """A hit and a miss have the same answer, and no lookup is counted: there is nothing to time."""
    with tenants.server.api(key=tenants.keys["foreign"]) as owner:
        site = Site(owner)
        site.write(tenants.instances["b"], [1, 2])
        before = _lookups(tenants)
        for rpc, fields in _OF_BLOCKS.items():
            hit = stranger.attempt(rpc, tenants.authorization("engine"), instance_id=tenants.instances["b"], **fields)
            missing = {**fields, "block_keys": [77]} if "block_keys" in fields else fields
            miss = stranger.attempt(rpc, tenants.authorization("engine"), instance_id=tenants.instances["b"], **missing)
            assert (hit.status, hit.text) == (miss.status, miss.text) == (403, hit.text), rpc
        assert _lookups(tenants) == before
        assert site.hits(tenants.instances["b"], [1, 2]) == [1, 2]


def _lookups(tenants: Tenants) -> list[str]:
    _, text = tenants.server.page("/metrics", tenants.keys["viewer"])
    return [line for line in text.splitlines() if line.startswith(("kvcm_lookup_", "kvcm_write_sessions"))]
