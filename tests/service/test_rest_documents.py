"""Documents of resources have the fields of the messages they are made of, and the OpenAPI documents are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter
from rest_client import RestClient
from test_transport_drivers import SERVICES
from test_transport_process import ManagerProcess

from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin
from kvcm.service.rest.account_resource import AccountDocument, PasswordDocument
from kvcm.service.rest.group_documents import GroupDocument
from kvcm.service.rest.instance_resource import InstanceDocument
from kvcm.service.rest.key_resource import (
    KeyDocument,
    LoginDocument,
    MadeKeyDocument,
    NewKeyDocument,
    RotationDocument,
    WhoAmIDocument,
)
from kvcm.service.rest.paging import Page
from kvcm.service.rest.pin_resource import MadePinDocument, NewPinDocument, PinDocument
from kvcm.service.rest.storage_documents import StorageDocument, StorageStatusDocument
from kvcm.service.rest.task_resource import GarbageReport, ScrubReport, TaskDocument
from kvcm.service.rest.usage_resource import UsageReportDocument

# Fields that stand in paths, that are no part of resources, or that only resources have.
PAIRS: list[tuple[type[BaseModel], Any, set[str], set[str]]] = [
    (GroupDocument, admin.InstanceGroup, set(), set()),
    (StorageDocument, admin.StorageConfig, {"local"}, {"is_available", "status"}),
    (StorageStatusDocument, admin.StorageStatus, set(), set()),
    (InstanceDocument, admin.InstanceInfo, set(), set()),
    (AccountDocument, admin.Account, set(), set()),
    (UsageReportDocument, capacity.GetUsageResponse, set(), set()),
    (GarbageReport, capacity.CollectGarbageResponse, set(), set()),
    (ScrubReport, capacity.ScrubStorageResponse, set(), set()),
    (PinDocument, pin.Pin, set(), set()),
    (NewPinDocument, pin.PinPrefixRequest, set(), set()),
    (MadePinDocument, pin.PinPrefixResponse, set(), set()),
    (KeyDocument, access.Key, set(), set()),
    (NewKeyDocument, access.CreateKeyRequest, set(), set()),
    (RotationDocument, access.RotateKeyRequest, {"key_id"}, set()),
    (LoginDocument, access.LoginRequest, set(), set()),
    (PasswordDocument, access.SetPasswordRequest, {"user_name"}, set()),
    (MadeKeyDocument, access.CreateKeyResponse, set(), set()),
    (WhoAmIDocument, access.WhoAmIResponse, set(), set()),
]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _check(model: type[BaseModel], descriptor: Any, without: set[str], more: set[str]) -> None:
    wanted = {field.name for field in descriptor.fields} - {"header", "trace_id"} - without
    assert set(model.model_fields) - more == wanted, model
    for name in wanted:
        inner = _model_in(model.model_fields[name].annotation)
        of_message = descriptor.fields_by_name[name].message_type
        assert (inner is None) == (of_message is None), f"{model.__name__}.{name}"
        if inner is not None:
            _check(inner, of_message, set(), set())


@pytest.mark.parametrize(
    ("model", "message", "without", "more"), PAIRS, ids=lambda value: getattr(value, "__name__", "")
)
def test_documents_have_the_fields_of_their_messages(
    model: type[BaseModel], message: Any, without: set[str], more: set[str]
) -> None:
    _check(model, message.DESCRIPTOR, without, more)


def _names(annotation: Any) -> set[str]:
    return {value for value in get_args(annotation) if isinstance(value, str)} | {
        value for part in get_args(annotation) for value in _names(part)
    }


@pytest.mark.parametrize(("model", "message"), [(pair[0], pair[1]) for pair in PAIRS])
def test_documents_have_the_names_of_their_enums(model: type[BaseModel], message: Any) -> None:
    for name, field in model.model_fields.items():
        known = message.DESCRIPTOR.fields_by_name.get(name)
        if known is not None and known.enum_type is not None:
            names = set(known.enum_type.values_by_name)
            assert names - _names(field.annotation) <= {each for each in names if each.endswith("UNSPECIFIED")}
            assert _names(field.annotation) <= names


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/storages", Page[StorageDocument]),
        ("/v1/storages?with_status=true", Page[StorageDocument]),
        ("/v1/groups", Page[GroupDocument]),
        ("/v1/instances", Page[InstanceDocument]),
        ("/v1/accounts", Page[AccountDocument]),
        ("/v1/tasks", Page[TaskDocument]),
        ("/v1/usage", UsageReportDocument),
        ("/v1/groups/default", GroupDocument),
        ("/v1/storages/nfs_01", StorageDocument),
    ],
)
def test_answers_are_what_their_documents_say(rest: RestClient, path: str, kind: Any) -> None:
    answer = rest.get(path)
    assert answer.status == 200
    TypeAdapter(kind).validate_python(answer.body)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "$ref" else _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _check_whole(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    references = set(_references(document))
    assert references == {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    identities = [operation["operationId"] for operation in operations]
    assert len(identities) == len(set(identities))
    assert all(operation["description"] and operation["tags"] for operation in operations)
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_the_document_of_the_resources_is_whole(rest: RestClient) -> None:
    document = rest.get("/v1/openapi.json").body
    _check_whole(document)
    for path, item in document["paths"].items():
        for operation in item.values():
            parameters = operation.get("parameters", [])
            in_path = {each["name"] for each in parameters if each["in"] == "path"}
            assert in_path == set(re.findall(r"\{(\w+)\}", path))
            assert all(each["description"] for each in parameters)
            errors = {status for status in operation["responses"] if int(status) >= 400}
            assert {"400", "401", "403", "429", "500", "503"} <= errors
            assert "422" not in errors
            assert all(list(operation["responses"][each]["content"]) == ["application/problem+json"] for each in errors)


def test_every_resource_is_in_the_document(rest: RestClient) -> None:
    tags = {op["tags"][0] for item in rest.get("/v1/openapi.json").body["paths"].values() for op in item.values()}
    assert tags >= {"storages", "groups", "instances", "accounts", "usage", "tasks", "pins"}


def test_limits_of_pages_stand_in_the_document(rest: RestClient) -> None:
    parameters = rest.get("/v1/openapi.json").body["paths"]["/v1/groups"]["get"]["parameters"]
    (limit,) = [each["schema"] for each in parameters if each["name"] == "limit"]
    assert (limit["minimum"], limit["maximum"], limit["default"]) == (1, 1000, 100)


def test_each_port_describes_its_calls(server: ManagerProcess) -> None:
    described = []
    for address in (server.address.http, server.address.admin_http):
        client = RestClient(address)
        document = client.get("/openapi.json").body
        client.connection.close()
        _check_whole(document)
        described.append(document)
    data, admin_port = ({path.removeprefix("/api/").lower() for path in document["paths"]} for document in described)
    on_data = {"MetaService", "LeaseService", "PinService", "PoolService"}
    for name, service in SERVICES.items():
        methods = {method.name.lower() for method in service.methods}
        assert methods <= (data if name in on_data else admin_port)
    for document in described:
        for item in document["paths"].values():
            assert {"200", "400", "413", "429", "503"} <= set(item["post"]["responses"])


def test_schemas_of_calls_follow_the_rules_of_their_json(server: ManagerProcess) -> None:
    client = RestClient(server.address.http)
    schemas = client.get("/openapi.json").body["components"]["schemas"]
    client.connection.close()
    meta = "kv_cache_manager.proto.meta"
    asked = schemas[f"{meta}.GetCacheLocationRequest.request"]
    assert "required" not in asked
    key = asked["properties"]["block_keys"]["anyOf"][0]["items"]["anyOf"]
    assert [each["type"] for each in key] == ["integer", "string"]
    assert key[0]["minimum"] == -(2**63)
    assert {"type": "null"} in asked["properties"]["query_type"]["anyOf"]
    mask = schemas[f"{meta}.BlockMask.request"]
    assert mask["allOf"] == [{"not": {"required": ["offset", "bool_masks"]}}]
    answered = schemas[f"{meta}.GetCacheLocationResponse.answer"]
    assert "locations" in answered["required"]
    assert "header" not in answered["required"]
    spec = schemas[f"{meta}.InstanceInfo.answer"]["properties"]["location_spec_infos"]["items"]["$ref"]
    assert schemas[spec.rpartition("/")[2]]["properties"]["size"]["type"] == "string"
