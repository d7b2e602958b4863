"""Calls of a running manager from the command line: JSON over HTTP, as scripts of operators do it.

Neither proxies of the environment nor redirects are followed: the address given is the manager that is asked.
"""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from google.protobuf import json_format
from google.protobuf.message import Message

from kvcm.model.errors import ErrorCode, InvalidArgumentError, KvcmError, NotReadyError

__all__ = ["AdminClient"]

Answer = TypeVar("Answer", bound=Message)

_ERRORS: dict[str, type[KvcmError]] = {error.code.name: error for error in KvcmError.__subclasses__()}
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class _Parts(NamedTuple):
    scheme: str
    host: str
    port: int


class AdminClient:
    """One manager.

    Args:
        url: where it serves HTTP, as in `http://127.0.0.1:6492`.

    Raises:
        InvalidArgumentError: the url is none.
    """

    def __init__(self, url: str) -> None:
        parts = _parts(url)
        if parts is None:
            raise InvalidArgumentError(f"manager {url!r} must be an url of host and port: http://127.0.0.1:6492")
        self._url = url
        self._connect = _CONNECTIONS[parts.scheme]
        self._host, self._port = parts.host, parts.port

    def call(self, name: str, request: Message, answer_type: type[Answer], seconds: float = 30.0) -> Answer:
        """Return the answer to a request.

        Args:
            name: of the rpc.
            request: what to send.
            answer_type: class of the answer.
            seconds: how long to wait for it.

        Raises:
            NotReadyError: no manager answers there.
            KvcmError: it refuses; the class is that of its code.
        """
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None).encode()
        answer = answer_type()
        answered = self._answered(name, body, seconds)
        _check(answered.get("header", {}).get("status", {}))
        try:
            json_format.ParseDict(answered, answer, ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise NotReadyError(f"what {self._url} answers to {name} is not understood: {error}") from error
        return answer

    def _answered(self, name: str, body: bytes, seconds: float) -> dict[str, Any]:
        connection = self._connect(self._host, self._port, timeout=seconds)
        path = f"/api/{name[0].lower()}{name[1:]}"
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError(f"no manager answers at {self._url}: {_reason(error, seconds)}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            said = response.getheader("x-kvcm-error") or response.reason
            raise NotReadyError(f"{self._url} answers {name} with HTTP {response.status}: {said}")
        return self._object(name, answer)

    def _object(self, name: str, answer: bytes) -> dict[str, Any]:
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NotReadyError(f"{self._url} does not answer {name} as a manager does; is it the right port?")
        return found


def _parts(url: str) -> _Parts | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in _CONNECTIONS or not host or port is None or more:
        return None
    return _Parts(parts.scheme, host, port)


def _reason(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _check(status: dict[str, Any]) -> None:
    code = status.get("code")
    if code != ErrorCode.OK.name:
        raise _ERRORS.get(str(code), KvcmError)(
            status.get("message") or f"the manager answered {code} without a reason"
        )
