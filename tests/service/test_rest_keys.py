"""/v1/keys, /v1/login, /v1/whoami: which calls they make, whatever answers those."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest

from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.service.calls import Arrival, Call, Caller, Plane, Reply
from kvcm.service.http_server import ARRIVAL
from kvcm.service.rest.app import RestApp

KEYS = [
    pb.Key(key_id="k1", name="a", role="ROLE_ENGINE", instance_groups=["g"], verbs=["MATCH", "PIN"], created_at_ms=5),
    pb.Key(key_id="k2", name="a", role="ROLE_ADMIN", created_at_ms=4),
]
NAMES = ["CreateKey", "ListKeys", "RotateKey", "RevokeKey", "Login", "Logout", "WhoAmI"]
SECRETS = dict.fromkeys(["CreateKey", "RotateKey", "Login"], pb.CreateKeyResponse)
ANSWERS = {**SECRETS, "ListKeys": pb.ListKeysResponse, "WhoAmI": pb.WhoAmIResponse}


class Answering:
    """Resources whose calls are answered here."""

    def __init__(self, names: Sequence[str] = NAMES, admission: Any = None) -> None:
        self.requests: list[Any] = []
        self.refusals: dict[str, Exception] = {}
        calls = [self._call(name) for name in names]
        self.app = RestApp(calls, Caller(None, lambda _plane: None, lambda _instance: {}, admission=admission), "1")

    def _call(self, name: str) -> Call:
        response = ANSWERS.get(name, admin.CommonResponse)

        async def answer(request: Any) -> Reply:
            self.requests.append(request)
            if name in self.refusals:
                raise self.refusals[name]
            message = response()
            if name in SECRETS:
                message.key.CopyFrom(KEYS[0])
                message.secret = "kvcm_k1_x"
            if name == "ListKeys":
                message.keys.extend(KEYS)
            return Reply(message)

        request_type = getattr(pb, f"{name}Request")
        return Call("kvcm.v1.AccessService", name, Plane.ADMIN, request_type, response, answer)

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        """Send a request; returns status, body and headers."""
        sent: list[MutableMapping[str, Any]] = []
        raw, _, query = path.encode().partition(b"?")
        headers = [(b"content-type", b"application/json")] if body is not None else []
        scope = {"type": "http", "method": method, "path": path, "raw_path": raw, "query_string": query}
        scope |= {"headers": headers, "client": ("10.0.0.9", 1), "server": ("h", 1), "scheme": "http"}
        scope |= {"http_version": "1.1", "state": {}, "root_path": "", ARRIVAL: Arrival("http", "10.0.0.9")}

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}

        async def send(event: MutableMapping[str, Any]) -> None:
            sent.append(event)

        await self.app(scope, receive, send)
        text = b"".join(event.get("body", b"") for event in sent[1:])
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], json.loads(text) if text else None, found


@pytest.fixture(scope="module")
def shared() -> Answering:
    return Answering()


@pytest.fixture
def keys(shared: Answering) -> Answering:
    shared.requests.clear()
    shared.refusals.clear()
    return shared


async def test_a_key_is_made_with_what_the_document_says(keys: Answering) -> None:
    doc = {"name": "a", "role": "ROLE_ENGINE", "instance_groups": ["g"], "verbs": ["MATCH", "PIN"], "ttl_seconds": 9}
    status, body, headers = await keys.ask("POST", "/v1/keys", doc)
    assert (status, body["secret"], headers["location"]) == (201, "kvcm_k1_x", "/v1/keys/k1")
    assert headers["cache-control"] == "no-store"
    assert body["key"]["verbs"] == ["MATCH", "PIN"]
    wanted = pb.CreateKeyRequest(trace_id="rest", name="a", role="ROLE_ENGINE", instance_groups=["g"], ttl_seconds=9)
    wanted.verbs.extend([pb.MATCH, pb.PIN])
    assert keys.requests == [wanted]


async def test_keys_are_listed_by_name_and_time(keys: Answering) -> None:
    status, body, _ = await keys.ask("GET", "/v1/keys?with_logins=true&limit=1")
    assert (status, [key["key_id"] for key in body["items"]]) == (200, ["k2"])
    assert keys.requests[0].with_logins
    _, body, _ = await keys.ask("GET", f"/v1/keys?page_token={body['next_page_token']}")
    assert ([key["key_id"] for key in body["items"]], body["next_page_token"]) == (["k1"], None)


async def test_one_key_is_found_by_its_id(keys: Answering) -> None:
    assert (await keys.ask("GET", "/v1/keys/k2"))[1]["role"] == "ROLE_ADMIN"
    assert (await keys.ask("GET", "/v1/keys/k3"))[0] == 404


async def test_a_key_is_rotated_and_revoked(keys: Answering) -> None:
    status, body, _ = await keys.ask("POST", "/v1/keys/k1/rotate", {"overlap_seconds": 60})
    assert (status, body["secret"]) == (201, "kvcm_k1_x")
    assert keys.requests[-1] == pb.RotateKeyRequest(trace_id="rest", key_id="k1", overlap_seconds=60)
    keys.refusals["RotateKey"] = keys.refusals["RevokeKey"] = InvalidArgumentError("no")
    assert (await keys.ask("POST", "/v1/keys/k9/rotate", {}))[0] == 404
    assert (await keys.ask("DELETE", "/v1/keys/k9"))[0] == 404
    assert [(await keys.ask("POST", "/v1/keys/k1/rotate", {}))[0], (await keys.ask("DELETE", "/v1/keys/k1"))[0]] == [
        400
    ] * 2
    keys.refusals.clear()
    assert (await keys.ask("DELETE", "/v1/keys/k1"))[0] == 204
    assert keys.requests[-1] == pb.RevokeKeyRequest(trace_id="rest", key_id="k1")


async def test_a_login_is_ended(keys: Answering) -> None:
    assert (await keys.ask("DELETE", "/v1/login"))[0] == 204
    assert [type(request) for request in keys.requests] == [pb.LogoutRequest]


async def test_a_login_and_its_principal(keys: Answering) -> None:
    status, body, _ = await keys.ask("POST", "/v1/login", {"user_name": "u", "password": "swordfish"})
    assert (status, body["secret"], "swordfish" in json.dumps(body)) == (201, "kvcm_k1_x", False)
    assert keys.requests == [pb.LoginRequest(trace_id="rest", user_name="u", password="swordfish")]
    assert (await keys.ask("GET", "/v1/whoami"))[1] == {"is_required": False}
    status, body, _ = await keys.ask("POST", "/v1/login", {"user_name": "u", "password": {"a": "swordfish"}})
    assert (status, "swordfish" in json.dumps(body)) == (400, False)


async def test_a_handler_that_breaks_is_a_500_problem(keys: Answering) -> None:
    keys.refusals["WhoAmI"] = RuntimeError("a secret of the inside")
    status, body, _ = await keys.ask("GET", "/v1/whoami")
    assert (status, body["code"], "secret" in body["detail"]) == (500, "INTERNAL_ERROR", False)


@pytest.mark.parametrize(
    ("error", "status"),
    [(kind, kind.http_status) for kind in (KvcmError, *KvcmError.__subclasses__())],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_outcomes_of_calls_have_their_statuses(keys: Answering, error: type[KvcmError], status: int) -> None:
    keys.refusals["WhoAmI"] = error("the reason")
    found, body, headers = await keys.ask("GET", "/v1/whoami")
    assert (found, body["code"], body["detail"]) == (status, error.code.name, "the reason")
    assert headers.get("retry-after") == ("1" if status == 503 else None)


async def test_calls_that_are_not_served_have_no_resources() -> None:
    assert (await Answering([]).ask("GET", "/v1/keys"))[0] == 404
    status, _, headers = await Answering(["ListKeys"]).ask("POST", "/v1/keys", {})
    assert (status, headers["allow"]) == (405, "GET, HEAD")
