"""A manager's calls and resources as JSON over HTTP, which stay the same from release to release."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from manager_site import Manager

_SECONDS = 30.0


class JsonApi:
    """Asks one manager.

    Args:
        manager: runs.
        key: to show, "" for none.
    """

    def __init__(self, manager: Manager, key: str = "") -> None:
        self._ports = {
            plane: manager.settings[f"kvcm.service.{name}"]
            for plane, name in (("data", "http_port"), ("admin", "admin_http_port"))
        }
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def data(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the answer of a call of engines, which has to be OK."""
        return self._call("data", name, fields)

    def admin(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the answer of a call of operators, which has to be OK."""
        return self._call("admin", name, fields)

    def rest(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the document that a resource answers with; the status has to be one of success."""
        status, answer = self._ask("admin", method, f"/v1/{path}", body)
        assert status < 300, (method, path, status, answer)
        return answer

    def _call(self, plane: str, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        status, answer = self._ask(plane, "POST", f"/api/{name[0].lower()}{name[1:]}", fields)
        assert (status, answer["header"]["status"]["code"]) == (200, "OK"), (name, status, answer)
        return answer

    def _ask(self, plane: str, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        url = f"http://127.0.0.1:{self._ports[plane]}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text.startswith(b"{") else {}
