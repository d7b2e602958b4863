"""Which requests of browsers are let in.

A page of another site must neither act here nor listen: what changes something comes from a page of this site, which
browsers say in the header `Origin`. While nobody is asked who he is, a page of another site must also not become one
of this site by pointing its name to this address: names that anybody can own are refused then.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

__all__ = ["foreign_request", "is_encrypted"]

_SAFE: Final = {"GET", "HEAD"}
_OWN: Final = {"same-origin", "none", ""}


def foreign_request(method: str, headers: Mapping[str, str], *, is_open: bool) -> str:
    """Return why a request may be the doing of a page of another site, "" where it is not.

    Args:
        method: of HTTP.
        headers: by lower-case name.
        is_open: whether nobody is asked who he is.
    """
    host = headers.get("host", "")
    if is_open and not _is_nobodys_domain(host):
        return f"host is {host[:80]!r}: while no keys are required, open the console by an address or as localhost"
    if not host or _netloc(f"//{host}") != host.lower():
        return f"host is {host[:80]!r}: must be a name or an address, and a port"
    if method in _SAFE:
        return ""
    origin = headers.get("origin", "")
    if _netloc(origin) != host.lower() or headers.get("sec-fetch-site", "") not in _OWN:
        return "what changes something has to come from a page of the console"
    return ""


def is_encrypted(scheme: str, headers: Mapping[str, str]) -> bool:
    """Return whether the browser speaks TLS, be it with a proxy in between: only then it keeps secure cookies."""
    return scheme == "https" or headers.get("origin", "").startswith("https://")


def _netloc(address: str) -> str:
    """Return the host and the port of an address, "" where it has none or is malformed."""
    try:
        return urlsplit(address).netloc.lower()
    except ValueError:
        return ""


def _is_nobodys_domain(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "." not in name and ":" not in name:
        return bool(name)  # localhost, or the name of a host or service of the own network
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(".localhost") or name == socket.gethostname().lower()
    return True
