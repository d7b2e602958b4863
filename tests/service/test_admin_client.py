"""How commands reach a manager, and what they say when they do not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvcm.admin_client import AdminClient
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as pb

OK = {"header": {"status": {"code": "OK"}}}


@contextlib.contextmanager
def _answering(status: int, body: bytes, **headers: str) -> Iterator[tuple[AdminClient, list[tuple[str, Any]]]]:
    """Answer every request the same way; yields a client and what was asked."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the server calls it by this name
            length = int(self.headers["content-length"])
            asked.append((self.path, json.loads(self.rfile.read(length))))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield AdminClient(f"http://127.0.0.1:{server.server_port}"), asked
        finally:
            server.shutdown()
            thread.join()


def _ask(client: AdminClient, seconds: float = 10.0) -> pb.CollectGarbageResponse:
    request = pb.CollectGarbageRequest(instance_id="i", check_bytes=True)
    return client.call("CollectGarbage", request, pb.CollectGarbageResponse, seconds)


def test_a_call_is_the_json_of_the_contract_and_int64_may_be_text() -> None:
    body = json.dumps({**OK, "freed_bytes": "9007199254740993", "blocks": 3, "later_field": [1]}).encode()
    with _answering(200, body) as (client, asked):
        answer = _ask(client)
    assert asked == [("/api/collectGarbage", {"instance_id": "i", "check_bytes": True})]
    assert (answer.freed_bytes, answer.blocks) == (2**53 + 1, 3)


@pytest.mark.parametrize(
    ("code", "error"),
    [("REACH_MAX_ENTITY_CAPACITY", CapacityError), ("INTERNAL_ERROR", KvcmError), ("NEVER_HEARD_OF", KvcmError)],
)
def test_a_refusal_is_the_error_of_its_code_with_the_managers_words(code: str, error: type[KvcmError]) -> None:
    body = json.dumps({"header": {"status": {"code": code, "message": "no room"}}}).encode()
    with _answering(200, body) as (client, _), pytest.raises(KvcmError, match=r"^no room$") as raised:
        _ask(client)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"404 Not Found", "HTTP 404: Not Found"),
        (200, b"<html>", "does not answer CollectGarbage as a manager does"),
        (200, b"[]", "does not answer CollectGarbage as a manager does"),
        (200, json.dumps({**OK, "blocks": []}).encode(), "is not understood"),
        (302, b"", "HTTP 302"),
    ],
)
def test_what_is_no_manager_is_said_in_one_line(status: int, body: bytes, reason: str) -> None:
    with _answering(status, body, location="http://127.0.0.1:1/") as (client, _):
        with pytest.raises(NotReadyError, match=reason) as raised:
            _ask(client)
    assert "\n" not in str(raised.value)


def test_the_reason_that_a_manager_gives_for_a_bad_body_is_passed_on() -> None:
    with _answering(400, b"{}", x_kvcm_error="name: must be a string") as (client, _):
        with pytest.raises(NotReadyError, match="HTTP 400: name: must be a string"):
            _ask(client)


def test_nobody_there_and_nobody_who_answers_are_told_apart() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NotReadyError, match=f"no manager answers at {url}: Connection refused"):
            _ask(AdminClient(url))
        silent.listen()
        with pytest.raises(NotReadyError, match=f"no manager answers at {url}: nothing came within 0.1 s"):
            _ask(AdminClient(url), 0.1)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6492", "http://127.0.0.1", "http://:1", "ftp://h:1", "http://h:99999", "http://h:x",
     "http://h:1/api", "http://h:1?x=1", "http://[::1", "http://user:secret@h:1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be an url of host and port"):
        AdminClient(url)
