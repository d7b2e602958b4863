"""/v1/managers and /v1/history: of one manager, of several on one store, and of what some may not see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rest_client import RestClient, component
from secured import Tenants
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm import __version__


def test_a_manager_alone_is_its_leader(rest: RestClient, server: ManagerProcess) -> None:
    eventually(lambda: rest.get("/v1/managers").body["items"][0]["phase"] == "serving")
    (manager,) = rest.get("/v1/managers").body["items"]
    assert (manager["is_leader"], manager["is_self"], manager["version"]) == (True, True, __version__)
    assert f"127.0.0.1:{manager['admin_http_port']}" == server.address.admin_http
    assert manager["started_at_ms"] <= manager["seen_at_ms"]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ManagerProcess]:
    """A manager of the test's own: of groups as many as all tests make, the last ones are not told apart."""
    with manager(tmp_path) as process:
        yield process


def test_traffic_shows_in_the_rates_and_in_the_history(own_server: ManagerProcess) -> None:
    rest = RestClient(own_server.address.admin_http)
    with contextlib.closing(rest.connection), own_server.api("grpc") as api:
        _show_traffic(rest, Site(api))


def _show_traffic(rest: RestClient, site: Site) -> None:
    group = site.group()
    instance = site.instance(group)

    def series() -> dict[tuple[str, ...], list[float | None]]:
        body = rest.get(f"/v1/history?seconds=600&group={component(group)}").body
        return {(each["name"], *each["labels"].values()): each["values"] for each in body["series"]}

    def is_told() -> bool:
        site.hits(instance, [1, 2, 3, 4])
        return any(series().get(("hit_ratio", group), ()))

    site.write(instance, [1, 2, 3])
    eventually(is_told, seconds=60)
    found = series()
    assert {len(values) for values in found.values()} == {60}
    assert max(filter(None, found["hit_ratio", group])) == 0.75
    assert found["quota_bytes", group][-1]
    assert rest.get("/v1/managers").body["items"][0]["rates"]["requests_per_second"]["match"] > 0
    names = {each["name"] for each in rest.get("/v1/history").body["series"]}
    assert {"requests_per_second", "errors_per_second", "match_p50_seconds", "match_p99_seconds"} <= names


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ("seconds=59", 400, "query.seconds"),
        ("seconds=86401", 400, "query.seconds"),
        ("seconds=x", 400, "query.seconds"),
        ("minutes=5", 400, "query.minutes"),
        ("group=none", 404, None),
    ],
)
def test_what_cannot_be_told_is_refused(rest: RestClient, query: str, status: int, field: str | None) -> None:
    answer = rest.get(f"/v1/history?{query}")
    assert answer.status == status
    assert [error["field"] for error in answer.body.get("errors", ())] == ([field] if field else [])


def test_a_day_is_answered_in_360_values(rest: RestClient) -> None:
    body = rest.get("/v1/history?seconds=86400").body
    assert body["interval_seconds"] == 240
    assert {len(each["values"]) for each in body["series"]} == {360}


def test_whoever_is_limited_to_a_group_is_told_of_that_alone(tenants: Tenants) -> None:
    own, other = "default", tenants.groups["b"]
    key = tenants.server.key("viewer-of-one", "ROLE_VIEWER", instance_groups=[own])
    client = RestClient(tenants.server.process.address.admin_http)
    with contextlib.closing(client.connection):

        def groups(headers: dict[str, str]) -> set[str | None]:
            return {each["labels"].get("group") for each in client.get("/v1/history", **headers).body["series"]}

        headers, of_all = ({"authorization": f"Bearer {each}"} for each in (key, tenants.keys["viewer"]))
        eventually(lambda: own in groups(of_all))  # from the first moment on
        assert groups(headers) == {own}
        assert None in groups(of_all)
        assert client.get(f"/v1/history?group={component(own)}", **headers).status == 200
        for name in (other, "none"):
            refused = client.get(f"/v1/history?group={component(name)}", **headers)
            assert (refused.status, name in refused.body["detail"]) == (403, False)
        assert client.get("/v1/managers", **headers).status == 403
