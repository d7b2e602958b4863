"""The REST reference: paths, parameters and documents of /v1, of the OpenAPI document that a manager serves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from markdown_text import anchor, cell, page, table
from served import Served

__all__ = ["rest_page"]

_Json = dict[str, Any]
_EVERYWHERE = {"X-Request-Id"}
_USUAL = {"400", "401", "403", "413", "415", "429", "500", "502", "503"}
_LIMITS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
}


def rest_page(served: Served) -> str:
    """Return the page."""
    document = served.resources
    schemas: _Json = document["components"]["schemas"]
    lines = [
        "Made of the document that a manager serves at `/v1/openapi.json` (OpenAPI 3.1). How resources behave, with a",
        "tour: [rest.md](../rest.md). The calls (`POST /api/…`) have a document of their own on each HTTP port,",
        "`/openapi.json`, and stand in [grpc.md](grpc.md).",
        "",
        document["info"]["description"],
        "",
        "Every request may have `X-Request-Id`. Every one may be answered with 400, 401, 403, 429, 500 or 503, and one",
        "with a body with 413 or 415, as [`Problem`](#problem).",
        "",
        "## Paths",
        "",
    ]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    lines += ["## Documents", ""]
    for name in sorted(schemas):
        lines += _schema(name, schemas[name])
    return page("REST paths and schemas", lines)


def _operation(title: str, operation: _Json) -> list[str]:
    lines = [f"### {title}", "", operation.get("description", ""), ""]
    parameters = [each for each in operation.get("parameters", []) if each["name"] not in _EVERYWHERE]
    lines += table(
        ("parameter", "in", "type", "meaning"),
        (
            (
                f"`{each['name']}`",
                each["in"],
                _type(each["schema"]),
                _about(each["schema"], each.get("description", "")),
            )
            for each in parameters
        ),
    )
    body = operation.get("requestBody")
    if body is not None:
        kinds = {kind: _type(content["schema"]) for kind, content in body["content"].items()}
        lines += ["Body: " + "; ".join(f"`{kind}`, {of}" for kind, of in kinds.items()) + ".", ""]
    return [*lines, "Answers: " + "; ".join(_answers(operation["responses"])) + ".", ""]


def _answers(responses: _Json) -> Iterator[str]:
    for status in sorted(set(responses) - _USUAL):
        said = responses[status]
        kinds = [_type(content["schema"]) for content in said.get("content", {}).values() if content.get("schema")]
        own = [kind for kind in kinds if "#problem" not in kind]
        yield f"**{status}** {cell(said['description']).rstrip('.')}{f', {own[0]}' if own else ''}"


def _schema(name: str, schema: _Json) -> list[str]:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{field}`{' (required)' if field in required else ''}", _type(of), _about(of, of.get("description", "")))
        for field, of in schema.get("properties", {}).items()
    ]
    values = ", ".join(f"`{value}`" for value in schema.get("enum", ()))
    lines = [f"### {name}", "", cell(schema.get("description", "")), "", *([f"One of {values}.", ""] if values else [])]
    return lines + table(("field", "type", "meaning"), rows)


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{anchor(name)})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[several]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    if "const" in schema:
        return f"`{schema['const']}`"
    return f"`{schema['type']}`" if "type" in schema else "anything"


def _about(schema: Mapping[str, Any], description: str) -> str:
    limits = ", ".join(text.format(f"{schema[key]:,}") for key, text in _LIMITS.items() if key in schema)
    values = ", ".join(f"`{value}`" for value in schema.get("enum", ()))
    default = schema.get("default")
    parts = [
        cell(description),
        f"One of {values}." if values else "",
        f"{limits[0].upper()}{limits[1:]}." if limits else "",
        f"Default `{json.dumps(default)}`." if default not in (None, "", [], {}) else "",
    ]
    return " ".join(part for part in parts if part)
