"""A stream of events lasts as long as the key that began it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from secured import Tenants
from test_transport_drivers import DEADLINE_SECONDS
from test_transport_sites import unique


class Stream:
    """A client that listens to events.

    Args:
        address: of the admin port.
        key: that it shows.
    """

    def __init__(self, address: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=DEADLINE_SECONDS)
        self._ask(key)

    def _ask(self, key: str) -> None:
        self._connection.request("GET", "/api/events", headers={"authorization": f"Bearer {key}"})
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def write_sessions(self) -> Iterator[str]:
        """Yield the ids of sessions that begin; ends where the body does."""
        while line := self._response.readline():
            event = json.loads(line)
            if event["type"] == "StartWriteCache":
                yield event["write_session_id"]

    def asked_again(self, key: str) -> int:
        """Return the status of another request on the same connection: the body before it ended as bodies do."""
        self._ask(key)
        return self.status

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def listen(tenants: Tenants) -> Iterator[Callable[[str], Stream]]:
    streams: list[Stream] = []

    def begin(key: str) -> Stream:
        streams.append(Stream(tenants.server.process.address.admin_http, key))
        assert streams[-1].status == 200
        return streams[-1]

    yield begin
    for stream in streams:
        stream.close()


_BLOCKS = iter(range(1_000_000))


def start(tenants: Tenants) -> str:
    """Let something happen that streams tell of."""
    with tenants.server.api(key=tenants.keys["engine"]) as api:
        started = api.ok("StartWriteCache", instance_id=tenants.instances["a"], block_keys=[next(_BLOCKS)])
        return str(started.write_session_id)


def _revoked(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    key = tenants.server.key(unique("revoked"), "ROLE_VIEWER")
    return key, lambda: _call(tenants, "AccessService.RevokeKey", key_id=key.split("_")[1])


def _rotated(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    key = tenants.server.key(unique("rotated"), "ROLE_OPERATOR")
    return key, lambda: _call(tenants, "AccessService.RotateKey", key_id=key.split("_")[1])


def _of_a_login(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    name = unique("user")
    _call(tenants, "AdminService.AddAccount", user_name=name, password="old", role="ROLE_USER")
    key = _call(tenants, "AccessService.Login", user_name=name, password="old").secret
    return key, lambda: _call(tenants, "AccessService.SetPassword", user_name=name, password="new")


def _call(tenants: Tenants, rpc: str, **fields: Any) -> Any:
    with tenants.server.api() as api:
        return api.ok(rpc, **fields)


@pytest.mark.parametrize("of", [_revoked, _rotated, _of_a_login])
def test_a_stream_ends_with_its_key_and_others_go_on(
    of: Callable[[Tenants], tuple[str, Callable[[], Any]]], tenants: Tenants, listen: Callable[[str], Stream]
) -> None:
    """What happens after the end of the key it does not tell."""
    key, end = of(tenants)
    ending, lasting = listen(key), listen(tenants.keys["viewer"])
    before = start(tenants)
    told = ending.write_sessions()
    assert next(told) == before
    end()
    after = start(tenants)
    assert list(told) == []
    assert ending.asked_again(key) == 401
    sessions = lasting.write_sessions()
    assert [next(sessions), next(sessions)] == [before, after]
    later = start(tenants)
    assert next(sessions) == later


def test_a_silent_stream_ends_when_its_key_expires(tenants: Tenants, listen: Callable[[str], Stream]) -> None:
    key = tenants.server.key(unique("expiring"), "ROLE_VIEWER", ttl_seconds=1)
    stream, lasting = listen(key), listen(tenants.keys["viewer"])
    assert list(stream.write_sessions()) == []
    assert stream.asked_again(key) == 401
    session = start(tenants)
    assert next(lasting.write_sessions()) == session
