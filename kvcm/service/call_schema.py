"""The calls of a port as an OpenAPI document, made of the contract's descriptors: POST /api/<call> with JSON bodies.

It is the promise. The server accepts more: names in lowerCamelCase, and unknown fields, which it ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from kvcm import __version__
from kvcm.service.calls import Call
from kvcm.service.http_server import Page, PageRequest
from kvcm.service.json_codec import INT64_VALUE, is_own

__all__ = ["OPENAPI_PATH", "CallsPage", "document_of"]

OPENAPI_PATH: Final = "/openapi.json"
_Json = dict[str, Any]
_NON_FINITE: Final = ["NaN", "Infinity", "-Infinity"]
_REFUSALS: Final = {
    "400": "The body is not the JSON form of the request.",
    "401": "Credentials are missing or not valid.",
    "403": "The credentials do not allow this, or it comes from a web page.",
    "413": "The body is too large.",
    "415": "The body has a content-encoding.",
    "429": "The client asks for more than it may.",
    "503": "The manager is starting, stopping or overloaded.",
}
_RETRY: Final = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
_REASON: Final = {"x-kvcm-error": {"description": "What is wrong.", "schema": {"type": "string"}}}
_DESCRIPTION: Final = (
    "The calls of this port. Whatever their outcome, the status is 200: it stands in `header.status`. Integers of 64 "
    "bits are texts in answers, and texts or numbers in requests; enums are names, and also numbers in requests. null "
    "is the default. Unknown fields and names of enums are ignored where a schema does not refuse them."
)


class CallsPage:
    """The document as a page, made when it is asked for first.

    Args:
        calls: of the port.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = tuple(calls)
        self._body = b""

    async def __call__(self, _request: PageRequest) -> Page:
        """Answer."""
        if not self._body:
            self._body = json.dumps(document_of(self._calls)).encode()
        return Page(200, self._body, [(b"content-type", b"application/json")])


def document_of(calls: Iterable[Call]) -> _Json:
    """Return the OpenAPI document of some calls."""
    schemas: dict[str, _Json] = {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "KVCM calls", "version": __version__, "description": _DESCRIPTION},
        "paths": {call.path: {"post": _operation(call, schemas)} for call in calls},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Where keys are required."}
            },
        },
        "security": [{"bearer": []}, {}],
    }


def _operation(call: Call, schemas: dict[str, _Json]) -> _Json:
    asked: Any = call.request_type.DESCRIPTOR
    answered = {"schema": _ResponseSchemas(schemas).reference(call.response_type.DESCRIPTOR)}
    return {
        "operationId": _operation_id(call),
        "tags": [call.service],
        "description": f"{call.service}.{call.name}",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _RequestSchemas(schemas).reference(asked)}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": answered}},
            **{status: _refusal(status, text) for status, text in _REFUSALS.items()},
        },
    }


def _operation_id(call: Call) -> str:
    """Return a name that no other call of the port has, which services may have in common."""
    last = call.path.rpartition("/")[2]
    return f"{last[0].upper()}{last[1:]}"


def _refusal(status: str, text: str) -> _Json:
    return {"description": text, "headers": {**_REASON, **(_RETRY if status in {"429", "503"} else {})}}


class _ResponseSchemas:
    """Schemas of messages as answers have them: every field without presence is there."""

    suffix = "answer"

    def __init__(self, schemas: dict[str, _Json]) -> None:
        self._schemas = schemas

    def reference(self, descriptor: Descriptor) -> _Json:
        """Return a reference to the schema of a message, which is made where there is none yet."""
        name = f"{descriptor.full_name}.{self.suffix}"
        if name not in self._schemas:
            self._schemas[name] = {}  # of messages that hold themselves, once
            self._schemas[name] = self._object(descriptor)
        return {"$ref": f"#/components/schemas/{name}"}

    def _object(self, descriptor: Descriptor) -> _Json:
        always = [field.name for field in descriptor.fields if not field.has_presence]
        properties = {field.name: self._field(field) for field in descriptor.fields}
        return {"type": "object", "properties": properties, **({"required": always} if always else {})}

    def _field(self, field: FieldDescriptor) -> _Json:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return {"type": "object", "additionalProperties": self._single(field.message_type.fields_by_name["value"])}
        single = self._single(field)
        return {"type": "array", "items": single} if field.is_repeated else single

    def _single(self, field: FieldDescriptor) -> _Json:
        if field.message_type is not None and field.message_type.full_name == INT64_VALUE:
            return self._scalar(FieldDescriptor.TYPE_INT64)
        if field.message_type is not None:
            return self.reference(field.message_type)
        if field.enum_type is not None:
            return self._enum(field.enum_type, is_own(field.containing_type))
        return self._scalar(field.type)

    def _enum(self, enum: EnumDescriptor, is_strict: bool) -> _Json:
        return {"anyOf": [{"type": "string", "enum": [value.name for value in enum.values]}, {"type": "integer"}]}

    def _scalar(self, kind: int) -> _Json:
        match kind:
            case FieldDescriptor.TYPE_INT32:
                return _integer(32)
            case FieldDescriptor.TYPE_INT64 | FieldDescriptor.TYPE_SFIXED64:
                return {"type": "string", "format": "int64", "pattern": "^-?(0|[1-9][0-9]{0,18})$"}
            case FieldDescriptor.TYPE_FIXED64 | FieldDescriptor.TYPE_UINT64:
                return {"type": "string", "format": "uint64", "pattern": "^(0|[1-9][0-9]{0,19})$"}
            case FieldDescriptor.TYPE_DOUBLE:
                return {"anyOf": [{"type": "number"}, {"type": "string", "enum": _NON_FINITE}]}
            case FieldDescriptor.TYPE_BOOL:
                return {"type": "boolean"}
            case FieldDescriptor.TYPE_BYTES:
                return {"type": "string", "contentEncoding": "base64"}
        return {"type": "string"}


class _RequestSchemas(_ResponseSchemas):
    """Schemas of messages as requests may have them: any field may be left out or null."""

    suffix = "request"

    def _object(self, descriptor: Descriptor) -> _Json:
        found = {**super()._object(descriptor)}
        found.pop("required", None)
        pairs = [pair for oneof in descriptor.oneofs for pair in combinations([each.name for each in oneof.fields], 2)]
        if is_own(descriptor):
            found["additionalProperties"] = False
        if pairs:
            found["allOf"] = [{"not": {"required": list(pair)}} for pair in pairs]
        return found

    def _field(self, field: FieldDescriptor) -> _Json:
        return {"anyOf": [super()._field(field), {"type": "null"}]}

    def _enum(self, enum: EnumDescriptor, is_strict: bool) -> _Json:
        kind = "enum" if is_strict else "examples"
        return {"anyOf": [{"type": "string", kind: [value.name for value in enum.values]}, _integer(32)]}

    def _scalar(self, kind: int) -> _Json:
        match kind:
            case FieldDescriptor.TYPE_INT32:
                return {"anyOf": [_integer(32), {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,8})$"}]}
            case FieldDescriptor.TYPE_INT64 | FieldDescriptor.TYPE_SFIXED64:
                return {"anyOf": [_integer(64), {"type": "string", "pattern": "^-?(0|[1-9][0-9]{0,17})$"}]}
            case FieldDescriptor.TYPE_FIXED64 | FieldDescriptor.TYPE_UINT64:
                number = {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}
                return {"anyOf": [number, {"type": "string", "pattern": "^(0|[1-9][0-9]{0,17})$"}]}
        return super()._scalar(kind)


def _integer(bits: int) -> _Json:
    most = 1 << (bits - 1)
    return {"type": "integer", "format": f"int{bits}", "minimum": -most, "maximum": most - 1}
