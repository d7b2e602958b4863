"""Every list and every text of every request has a limit, and what is beyond it is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from test_transport_drivers import SERVICES, Api
from test_transport_sites import Site

from kvcm.model.errors import InvalidArgumentError
from kvcm.service.limits import RequestLimits
from kvcm.service.request_sizes import (
    MOST_ENTRIES,
    MOST_FREE_TEXT_BYTES,
    MOST_NAME_BYTES,
    MOST_SNAPSHOT_BYTES,
    MOST_TEXT_BYTES,
    RequestSizes,
)

LIMITS = RequestLimits(max_keys=2000, max_tokens=3000)
SIZES = RequestSizes(LIMITS)
LIMIT_OF_LIST = {
    "block_keys": 2000,
    "values": 2000,
    "location_spec_group_names": 2000,
    "locations": 2000,
    "parts": 2000,
    "token_ids": 3000,
}
LIMIT_OF_TEXT = {
    **dict.fromkeys(
        ("instance_id", "node_id", "owner", "location_spec_names", "location_spec_group_names"), MOST_NAME_BYTES
    ),
    **dict.fromkeys(("extra", "user_data", "lora_name"), MOST_FREE_TEXT_BYTES),
    "config_snapshot": MOST_SNAPSHOT_BYTES,
}
READ_BY_HANDLERS = {"locations", "parts"}
REQUESTS = [GetMessageClass(method.input_type) for service in SERVICES.values() for method in service.methods]


def _fields(descriptor: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every field of a message, those of messages inside included."""
    for field in descriptor.fields:
        yield (*path, field)
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.name not in READ_BY_HANDLERS:
            yield from _fields(field.message_type, (*path, field))


def _cases() -> Iterator[Any]:
    for request_type in {request.DESCRIPTOR.full_name: request for request in REQUESTS}.values():
        for path in _fields(request_type.DESCRIPTOR):
            last = path[-1]
            is_text = last.type in {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}
            name = f"{request_type.DESCRIPTOR.name}.{'.'.join(field.name for field in path)}"
            if is_text:
                yield pytest.param(request_type, path, "text", id=f"{name}:text")
            if last.is_repeated:
                yield pytest.param(request_type, path, "entries", id=f"{name}:entries")


def _with(request_type: Any, path: tuple[Any, ...], kind: str, size: int) -> Any:
    """Return a request whose field at the path has so many entries, or bytes."""
    request = part = request_type()
    for field in path[:-1]:
        part = getattr(part, field.name)
        if field.is_repeated:
            part = part.add()
    last = path[-1]
    if kind == "text":
        text: Any = "ü" * (size // 2) + "x" * (size % 2)  # bytes count, not characters
        if last.is_repeated:
            getattr(part, last.name).append(text)
        else:
            setattr(part, last.name, text)
    elif last.type == FieldDescriptor.TYPE_MESSAGE:
        for _ in range(size):
            getattr(part, last.name).add()
    else:
        of_text = last.type == FieldDescriptor.TYPE_STRING
        getattr(part, last.name).extend(["x" if of_text else 1] * size)
    return request


@pytest.mark.parametrize(("request_type", "path", "kind"), list(_cases()))
def test_every_field_has_a_limit(request_type: Any, path: tuple[Any, ...], kind: str) -> None:
    name = path[-1].name
    most = LIMIT_OF_LIST.get(name, MOST_ENTRIES) if kind == "entries" else LIMIT_OF_TEXT.get(name, MOST_TEXT_BYTES)
    SIZES.check(_with(request_type, path, kind, most))
    with pytest.raises(InvalidArgumentError) as refused:
        SIZES.check(_with(request_type, path, kind, most + 1))
    text = str(refused.value)
    assert name in text
    assert f"has {most + 1} " in text
    assert f"at most {most} are allowed" in text


def test_limits_of_keys_and_tokens_follow_the_settings() -> None:
    limits = RequestLimits(max_keys=3, max_tokens=5)
    sizes = RequestSizes(limits)
    request_type = next(request for request in REQUESTS if request.DESCRIPTOR.name == "GetCacheLocationRequest")
    request = request_type(block_keys=range(4), token_ids=range(6))
    with pytest.raises(InvalidArgumentError, match="block_keys has 4 entries, at most 3"):
        sizes.check(request)
    limits.max_keys = 4
    with pytest.raises(InvalidArgumentError, match="token_ids has 6 entries, at most 5"):
        sizes.check(request)
    limits.max_tokens = 6
    sizes.check(request)


def test_a_request_that_is_too_large_is_refused_before_the_instance_is_looked_for(api: Api) -> None:
    for fields, name in (
        ({"block_mask": {"bool_masks": {"values": [True] * 65_537}}}, "block_mask.bool_masks.values"),
        ({"location_spec_names": ["x"] * 1025}, "location_spec_names"),
        ({"location_spec_names": ["x", "y" * 257]}, "location_spec_names[1]"),
        ({"trace_id": "t" * 1025}, "trace_id"),
    ):
        code, message = api.refused("GetCacheLocation", instance_id="nobody", **fields)
        assert (code, message.startswith(f"{name} has ")) == ("INVALID_ARGUMENT", True)


def test_a_uri_that_is_too_long_is_refused(site: Site) -> None:
    fields = {
        "instance_id": site.instance(),
        "parts": [{"block_key": 1}, {"block_key": 1, "uri": "file://s/".ljust(1025)}],
    }
    code, message = site.api.refused("PinService.ReportMissing", **fields)
    assert (code, message) == ("INVALID_ARGUMENT", "parts[1].uri has 1025 bytes of UTF-8, at most 1024 are allowed")
