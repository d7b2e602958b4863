"""Asks for resources as a plain HTTP client does."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import quote

MERGE = "application/merge-patch+json"


class RestAnswer(NamedTuple):
    """An answer.

    Attributes:
        status: of HTTP.
        headers: by lower-case name.
        body: decoded, None where there is none.
        raw: its bytes.
    """

    status: int
    headers: dict[str, str]
    body: Any
    raw: bytes


class RestClient:
    """A connection to an admin port."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=30)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> RestAnswer:
        """Send a request; a body that is no bytes is sent as JSON. Underscores in header names stand for dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent.setdefault("content-type", MERGE if method == "PATCH" else "application/json")
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request(method, path, body, sent)
        response = self.connection.getresponse()
        raw = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        decoded = json.loads(raw) if "json" in found.get("content-type", "") and raw else None
        return RestAnswer(response.status, found, decoded, raw)

    def get(self, path: str, **headers: str) -> RestAnswer:
        """GET."""
        return self.ask("GET", path, **headers)

    def put(self, path: str, body: Any, **headers: str) -> RestAnswer:
        """PUT."""
        return self.ask("PUT", path, body, **headers)

    def patch(self, path: str, body: Any, **headers: str) -> RestAnswer:
        """PATCH with a merge patch."""
        return self.ask("PATCH", path, body, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> RestAnswer:
        """POST."""
        return self.ask("POST", path, body, **headers)

    def delete(self, path: str, **headers: str) -> RestAnswer:
        """DELETE."""
        return self.ask("DELETE", path, **headers)

    def items(self, path: str) -> list[Any]:
        """Return the entries of all pages of a list."""
        found: list[Any] = []
        token, sign = "", "&" if "?" in path else "?"
        while True:
            page = self.get(f"{path}{sign}limit=1000" + (f"&page_token={token}" if token else ""))
            assert page.status == 200, page
            found += page.body["items"]
            token = page.body["next_page_token"]
            if token is None:
                return found


def component(name: str) -> str:
    """Return a name as one component of a path."""
    return quote(name, safe="")
