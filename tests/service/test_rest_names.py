"""Names of any kind in paths, and pages of lists."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rest_client import RestClient, component
from test_transport_drivers import Api
from test_transport_sites import unique

from kvcm.service.rest.names import decoded_name, encoded_name
from kvcm.service.rest.paging import PageQuery, page_of
from kvcm.service.rest.problem import ProblemError

NAMES = [
    "../etc/passwd", "..", "a?b=c", "100%", "%2F", "two words", "‮evil", "a#b", "Qwen/Qwen3-8B", "a\\b", "+", "'\"",
]  # fmt: skip
DOC = {"storage_candidates": ["nfs_01"], "global_quota_group_name": "quota"}


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_any_name_is_reached_by_it_alone(rest: RestClient, apis: dict[str, Api], name: str) -> None:
    path = f"/v1/groups/{encoded_name(name)}"
    made = rest.put(path, DOC)
    assert (made.status, made.body["name"]) == (201, name)
    assert rest.get(made.headers["location"]).body == made.body
    assert apis["grpc"].ok("AdminService.GetInstanceGroup", name=name).instance_group.name == name
    assert name in [group["name"] for group in rest.items("/v1/groups")]
    assert rest.patch(path, {"user_data": "x"}).body["version"] == 2
    assert rest.delete(path).status == 204


@pytest.mark.parametrize("path", ["%FF", "%C3", "a%00b", "%0A", component("ä" * 129), "%7F"])
def test_a_name_that_nothing_can_have_is_400_and_names_the_path(rest: RestClient, path: str) -> None:
    refused = rest.get(f"/v1/groups/{path}")
    assert (refused.status, refused.body["errors"][0]["field"]) == (400, "path.name")


@pytest.mark.parametrize(
    "path", ["/v1/groups/", "/v1/groups//", "/v1/groups/a/b", "/v1/", "/v1/groups/a/", "/v1//groups"]
)
def test_more_and_fewer_steps_than_a_resource_has_are_404(rest: RestClient, path: str) -> None:
    missing = rest.get(path)
    assert (missing.status, missing.headers["content-type"]) == (404, "application/problem+json")


@given(st.text(min_size=1))
def test_a_name_comes_back_from_its_component(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    path = encoded_name(name)
    assert decoded_name(path) == name
    assert "/" not in path
    assert path not in {".", ".."}


def test_pages_go_on_while_entries_come_and_go(rest: RestClient) -> None:
    prefix = unique("page")
    names = [f"{prefix}-{number}" for number in range(5)]
    for name in names:
        rest.put(f"/v1/accounts/{name}", {"password": "p"})
    seen: list[str] = []
    token = ""
    while True:
        page = rest.get(f"/v1/accounts?limit=2&page_token={token}").body
        assert len(page["items"]) <= 2
        seen += [account["user_name"] for account in page["items"]]
        if seen[-1] == names[1]:  # what was seen goes, what is to come comes
            rest.delete(f"/v1/accounts/{names[1]}")
            rest.put(f"/v1/accounts/{names[1]}x", {"password": "p"})
        token = page["next_page_token"]
        if token is None:
            break
    assert [name for name in seen if name.startswith(prefix)] == [*names[:2], f"{names[1]}x", *names[2:]]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "limit=1.5", "page_token=!", "page_token=bnVsbA", "page_token=WzFd", "grp=a"],
)
def test_a_query_that_makes_no_sense_is_400(rest: RestClient, query: str) -> None:
    rest.put("/v1/accounts/somebody", {"password": "p"})
    refused = rest.get(f"/v1/accounts?{query}")
    assert (refused.status, refused.body["errors"][0]["field"].startswith("query.")) == (400, True)


@given(st.sets(st.text()), st.integers(1, 5))
def test_pages_hold_every_entry_once_in_order(names: set[str], limit: int) -> None:
    seen: list[str] = []
    token: str | None = ""
    while token is not None:
        page = page_of(names, lambda name: (name,), PageQuery(limit=limit, page_token=token), str)
        seen += page["items"]
        token = page["next_page_token"]
    assert seen == sorted(names)


@given(st.text(max_size=50))
def test_no_token_breaks_a_list(token: str) -> None:
    with contextlib.suppress(ProblemError):
        assert len(page_of(["a", "b"], lambda name: (name,), PageQuery(page_token=token), str)["items"]) <= 2
