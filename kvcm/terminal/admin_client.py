"""The client with which commands call a running manager: JSON over HTTP, as scripts of operators do.

It follows neither redirects nor proxies of the environment: the given address is that of the manager.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from google.protobuf import json_format
from google.protobuf.message import Message

from kvcm.model.errors import ErrorCode, InvalidArgumentError, KvcmError, NotReadyError
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.terminal.exit_codes import NotAllowedError

__all__ = ["AdminClient", "Page"]

Answer = TypeVar("Answer", bound=Message)
_ERRORS: dict[str, type[KvcmError]] = {error.code.name: error for error in KvcmError.__subclasses__()}
_SCHEMES = {"http", "https"}
_NOT_ALLOWED = {http.client.UNAUTHORIZED, http.client.FORBIDDEN}


class Page(NamedTuple):
    """An answer.

    Attributes:
        status: of HTTP.
        body: its bytes.
        error: the manager's reason for a status other than 200.
    """

    status: int
    body: bytes
    error: str


class _Parts(NamedTuple):
    scheme: str
    host: str
    port: int


class AdminClient:
    """One manager.

    Args:
        url: of one of its HTTP ports, as in `http://127.0.0.1:6492`.
        key: API key, "" for none.
        tls: trusted authorities, and the client certificate; None for the system's authorities.

    Raises:
        InvalidArgumentError: the url is malformed, or the key cannot be sent.
    """

    def __init__(self, url: str, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        parts = _parts(url)
        if parts is None:
            raise InvalidArgumentError(f"manager {url!r} must be an url of host and port: http://127.0.0.1:6492")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise InvalidArgumentError("the key has characters that no key has: it is the text kvcm_<id>_<secret>")
        self.url = url
        self._parts = parts
        self._tls = tls
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def call(self, name: str, request: Message, answer_type: type[Answer], seconds: float = 30.0) -> Answer:
        """Return the answer to a request.

        Args:
            name: of the rpc.
            request: of the rpc.
            answer_type: class of the answer.
            seconds: timeout.

        Raises:
            NotReadyError: no manager answers there.
            NotAllowedError: the key is not valid, or lacks the permission.
            KvcmError: the manager refuses the request; the class is that of its code.
        """
        return self._read(name, self._answered(name, request, seconds), answer_type)

    def groups(self, seconds: float = 30.0) -> list[admin_pb.InstanceGroup]:
        """Return the instance groups, ordered by name.

        Args:
            seconds: timeout.

        Raises:
            KvcmError, NotAllowedError: as `call`.
        """
        name = "ListInstanceGroup"
        answered = self._answered(name, admin_pb.ListInstanceGroupRequest(), seconds)
        if "instance_groups" in answered:  # of a release in which our own call had the path
            return list(self._read(name, answered, group_pb.ListInstanceGroupResponse).instance_groups)
        return list(self._read(name, answered, admin_pb.ListInstanceGroupResponse).instance_group)

    def _answered(self, name: str, request: Message, seconds: float) -> dict[str, Any]:
        """Return a successful answer as JSON has it."""
        body = json_format.MessageToJson(request, preserving_proto_field_name=True, indent=None).encode()
        answered = self._decode(name, body, seconds)
        _check(answered.get("header", {}).get("status", {}))
        return answered

    def _read(self, name: str, answered: dict[str, Any], answer_type: type[Answer]) -> Answer:
        answer = answer_type()
        try:
            json_format.ParseDict(answered, answer, ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise NotReadyError(f"the answer of {self.url} to {name} is not understood: {error}") from error
        return answer

    def _decode(self, name: str, body: bytes, seconds: float) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        found = self._send("POST", f"/api/{name[0].lower()}{name[1:]}", body, headers, seconds)
        if found.status in _NOT_ALLOWED:
            raise NotAllowedError(self._not_allowed(name, found))
        if found.status != http.client.OK:
            raise NotReadyError(f"{self.url} answers {name} with HTTP {found.status}: {found.error}")
        return self._object(name, found.body)

    def page(self, path: str, seconds: float = 5.0) -> Page:
        """Return the answer to a GET of a path, of any status.

        Raises:
            NotReadyError: no manager answers there.
        """
        return self._send(method="GET", path=path, body=None, headers={}, seconds=seconds)

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str], seconds: float) -> Page:
        connection = self._connection(seconds)
        try:
            connection.request(method, path, body, {**headers, **self._headers})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError(f"no manager answers at {self.url}: {_reason(error, seconds)}") from error
        finally:
            connection.close()
        return Page(response.status, answer, response.getheader("x-kvcm-error") or response.reason)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        _, host, port = self._parts
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _not_allowed(self, name: str, found: Page) -> str:
        if found.status == http.client.FORBIDDEN:
            return f"{self.url} does not allow this key {name}: {found.error}; `kvcm whoami` shows its permissions"
        if name == "Login":
            return f"{self.url} refuses the login: {found.error}"
        if not self._headers:
            return (
                f"{self.url} asks for a key: give --key-file, or set KVCM_KEY_FILE or KVCM_KEY; `kvcm login` makes one"
            )
        return f"{self.url} does not know the key: {found.error}; it may have ended: ask for a new one, or `kvcm login`"

    def _object(self, name: str, answer: bytes) -> dict[str, Any]:
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NotReadyError(f"{self.url} does not answer {name} as a manager does; is it the right port?")
        return found


def _parts(url: str) -> _Parts | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in _SCHEMES or not host or port is None or more:
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
