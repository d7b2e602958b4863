"""Where a Redis or Valkey is and how to reach it, as one uri.

::

    redis://[user:password@]host[:port]/[database]?cluster_name=NAME[&…]    one server
    redis+sentinel://[user:password@]host[:port],…/service[/database]?…     the master that sentinels name
    redis+cluster://[user:password@]host[:port],…/?…                        a cluster, found through any of its nodes

`rediss` in the place of `redis` encrypts. User, password and values of parameters are percent-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

__all__ = ["Address", "RedisSettings", "TlsFiles", "parse_redis_uri"]

Kind = Literal["standalone", "sentinel", "cluster"]

_KINDS: Mapping[str, Kind] = {"": "standalone", "sentinel": "sentinel", "cluster": "cluster"}
_DEFAULT_PORTS: Mapping[Kind, int] = {"standalone": 6379, "sentinel": 26379, "cluster": 6379}
_FORMS = "redis://…, rediss://…, redis+cluster://…, rediss+cluster://…, redis+sentinel://… or rediss+sentinel://…"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_MS = 600_000


class Address(NamedTuple):
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TlsFiles(NamedTuple):
    """How connections are encrypted.

    Attributes:
        ca_file: certificates that are trusted; "" for those of the system.
        cert_file: certificate that this side shows, "" for none.
        key_file: its key.
        check_hostname: whether the server's certificate must be of the host that was asked for.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """What a redis uri says.

    Attributes:
        kind: standalone, sentinel or cluster.
        addresses: the server, the sentinels, or some nodes of the cluster.
        cluster_name: name of the deployment; every key begins with it, so that deployments can share servers.
        user: ACL user, "" for the default one.
        password: "" for none.
        database: number; 0 in a cluster.
        service: name of the master that the sentinels watch.
        sentinel_user: ACL user at the sentinels.
        sentinel_password: "" for none.
        timeout_seconds: for one answer, and for a free connection.
        connect_timeout_seconds: for a connection to be made.
        retry_count: how often a read is sent again after its connection was lost.
        pool_size: most connections to one server.
        tls: None for plain text.
    """

    kind: Kind
    addresses: tuple[Address, ...]
    cluster_name: str
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    service: str = ""
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    timeout_seconds: float = 1.0
    connect_timeout_seconds: float = 1.0
    retry_count: int = 1
    pool_size: int = 32
    tls: TlsFiles | None = None


class _Parameter(NamedTuple):
    field: str
    parse: Callable[[str, str], Any]


def parse_redis_uri(uri: str, cluster_name: str = "") -> RedisSettings:
    """Read a uri.

    Args:
        uri: see the forms above.
        cluster_name: what holds when the uri names none.

    Raises:
        ValueError: naming the wrong part, its value and the allowed ones; never a password.
    """
    kind, encrypted = _kind(uri)
    rest, _, query = uri.partition("://")[2].partition("?")
    authority, _, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    service, database = _path(kind, path)
    values: dict[str, Any] = {"cluster_name": cluster_name, **_parameters(kind, encrypted, query)}
    tls = TlsFiles(**{name: values.pop(name) for name in TlsFiles._fields if name in values})
    values.setdefault("connect_timeout_seconds", values.get("timeout_seconds", 1.0))
    if not values["cluster_name"]:
        raise ValueError("redis uri: parameter cluster_name is missing; it is the name of this deployment")
    return RedisSettings(
        kind,
        _addresses(kind, hosts),
        user=unquote(user),
        password=unquote(password),
        database=database,
        service=service,
        tls=tls if encrypted else None,
        **values,
    )


def _kind(uri: str) -> tuple[Kind, bool]:
    scheme, separator, _ = uri.partition("://")
    base, plus, kind = scheme.partition("+")
    if not separator or base not in ("redis", "rediss") or kind not in _KINDS or bool(plus) != bool(kind):
        shown = f"scheme {scheme!r}" if separator else "what was given"
        raise ValueError(f"redis uri: {shown} is not one of {_FORMS}")
    return _KINDS[kind], base == "rediss"


def _addresses(kind: Kind, hosts: str) -> tuple[Address, ...]:
    addresses = tuple(_address(text, _DEFAULT_PORTS[kind]) for text in hosts.split(","))
    if kind == "standalone" and len(addresses) > 1:
        raise ValueError(f"redis uri: hosts {hosts!r} are several; use redis+cluster:// or redis+sentinel://")
    return addresses


def _address(text: str, default_port: int) -> Address:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]@/?#\s]+))(?::([0-9]{1,5}))?", text)
    if match is None:
        raise ValueError(f"redis uri: host {text!r} is not host, host:port or [ipv6]:port")
    port = int(match[3] or default_port)
    if not 1 <= port <= 65535:
        raise ValueError(f"redis uri: port {port} of host {text!r} is not 1 to 65535")
    return Address(match[1] or match[2], port)


def _path(kind: Kind, path: str) -> tuple[str, int]:
    service, database = "", path
    if kind == "sentinel":
        service, _, database = path.partition("/")
        if not _NAME.fullmatch(service):
            raise ValueError(f"redis uri: service {service!r} is not a name of letters, digits, '.', '_' and '-'")
    number = _number(0, 0 if kind == "cluster" else 65535)("database", database or "0")
    return service, number


def _parameters(kind: Kind, encrypted: bool, query: str) -> dict[str, Any]:
    allowed = {
        **_PARAMETERS,
        **(_SENTINEL_PARAMETERS if kind == "sentinel" else {}),
        **(_TLS_PARAMETERS if encrypted else {}),
    }
    values: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in allowed:
            raise ValueError(f"redis uri: parameter {name!r} is not known here; known are {', '.join(sorted(allowed))}")
        field_name, parse = allowed[name]
        if field_name:
            values[field_name] = parse(name, text)
    return values


def _number(least: int, most: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise ValueError(f"redis uri: {name} {text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def _milliseconds(name: str, text: str) -> float:
    return _number(1, _MOST_MS)(name, text) / 1000


def _truth(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"redis uri: {name} {text!r} is not true or false")
    return text == "true"


def _name(name: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"redis uri: {name} {text!r} is not 1 to 64 letters, digits, '.', '_' or '-'")
    return text


def _text(_name: str, text: str) -> str:
    return text


_PARAMETERS = {
    "cluster_name": _Parameter("cluster_name", _name),
    "timeout_ms": _Parameter("timeout_seconds", _milliseconds),
    "connect_timeout_ms": _Parameter("connect_timeout_seconds", _milliseconds),
    "retry_count": _Parameter("retry_count", _number(0, 10)),
    "pool_size": _Parameter("pool_size", _number(1, 10_000)),
    # Names of the original; connections are made when needed, so there is no least number of them.
    "client_max_pool_size": _Parameter("pool_size", _number(1, 10_000)),
    "client_min_pool_size": _Parameter("", _text),
}
_SENTINEL_PARAMETERS = {
    "sentinel_user": _Parameter("sentinel_user", _text),
    "sentinel_password": _Parameter("sentinel_password", _text),
}
_TLS_PARAMETERS = {
    "ca_file": _Parameter("ca_file", _text),
    "cert_file": _Parameter("cert_file", _text),
    "key_file": _Parameter("key_file", _text),
    "check_hostname": _Parameter("check_hostname", _truth),
}
