"""Whatever is sent: an answer that is no 5xx, and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rest_client import RestClient
from test_transport_sites import unique

from kvcm.service.rest.changing import merged
from kvcm.service.rest.documents import Document

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
LIVE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _fields(document: Any, name: str) -> list[str]:
    return list(document["components"]["schemas"][name]["properties"])


@pytest.fixture(scope="module")
def fields(server: Any) -> dict[str, list[str]]:
    client = RestClient(server.address.admin_http)
    document = client.get("/v1/openapi.json").body
    client.connection.close()
    return {name: _fields(document, name) for name in ("GroupDocument", "StorageDocument", "InstanceDocument")}


@LIVE
@given(data=st.data(), kind=st.sampled_from(["groups", "storages", "instances"]))
def test_no_document_breaks_a_resource(rest: RestClient, fields: dict[str, list[str]], data: Any, kind: str) -> None:
    names = fields[{"groups": "GroupDocument", "storages": "StorageDocument", "instances": "InstanceDocument"}[kind]]
    document = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=5) | VALUES)
    answer = rest.put(f"/v1/{kind}/{unique('any')}", json.dumps(document).encode())
    assert answer.status in {201, 400, 409}, (document, answer)
    assert answer.body is not None


@LIVE
@given(data=st.data())
def test_no_patch_breaks_a_group(rest: RestClient, fields: dict[str, list[str]], data: Any) -> None:
    patch = data.draw(st.dictionaries(st.sampled_from(fields["GroupDocument"]), VALUES, max_size=3))
    path = f"/v1/groups/{unique('patched')}"
    before = rest.put(path, {"storage_candidates": ["nfs_01"], "global_quota_group_name": "q"})
    answer = rest.patch(path, patch)
    assert answer.status in {200, 400}, (patch, answer)
    if answer.status == 400:
        assert rest.get(path).body == before.body
    rest.delete(path)


@LIVE
@given(body=st.binary(max_size=200))
def test_no_bytes_break_a_resource(rest: RestClient, body: bytes) -> None:
    answer = rest.ask("POST", "/v1/tasks", body)
    assert (answer.status, answer.body["status"]) == (400, 400)


class Any_(Document):  # noqa: N801 - a document of anything
    """Anything."""

    a: Any = 0
    b: Any = 0


RFC_EXAMPLES = [
    ({"a": "b"}, {"a": "c"}, {"a": "c", "b": 0}),
    ({"a": "b"}, {"a": None}, {"a": 0, "b": 0}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c", "b": 0}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}, "b": 0}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1], "b": 0}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}, "b": 0}),
]


@pytest.mark.parametrize(("document", "patch", "expected"), RFC_EXAMPLES)
def test_examples_of_the_rfc(document: Any, patch: Any, expected: Any) -> None:
    assert merged(Any_, document, patch).model_dump() == expected
