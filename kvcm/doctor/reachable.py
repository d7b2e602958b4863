"""Whether anybody listens at an address."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from kvcm.doctor.findings import Finding, fail, ok

__all__ = ["check_reachable"]

_SECONDS = 2.0


def check_reachable(check: str, what: str, address: str) -> Finding:
    """Return whether something listens.

    Args:
        check: what is looked at.
        what: the part that lies there.
        address: host:port.
    """
    parts = urlsplit(f"//{address}")
    try:
        if parts.port is None:
            return ok(check, f"{what} {address} names no port: it was not tried")
        with socket.create_connection((parts.hostname or "", parts.port), _SECONDS):
            return ok(check, f"{what} {address} can be reached")
    except (OSError, ValueError) as error:
        return fail(
            check, f"{what} {address} cannot be reached: {error}", "start it, or correct the storage's settings"
        )
