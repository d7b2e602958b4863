"""`python -m kvcm.probe`: the health check of a container, every few seconds: is the manager ready?

It needs neither curl nor the command line's imports, which take ten times as long as the request.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

__all__ = ["main", "probe"]

_ADDRESS = "http://127.0.0.1:6492"
_PAGES = ("readyz", "livez", "startupz")
_SECONDS = 4.0


def probe(address: str, page: str, environment: Mapping[str, str]) -> str:
    """Request a health page of a manager.

    Args:
        address: of one of its HTTP ports, as in http://127.0.0.1:6492.
        page: readyz, livez or startupz.
        environment: KVCM_CERT_FILE and KVCM_CERT_KEY_FILE name the certificate for a manager that requires one.

    Returns:
        "" if it answers 200, else the reason.
    """
    try:
        connection = _connection(address, environment)
        connection.request("GET", f"/{page}")
        response = connection.getresponse()
        said = response.read().decode(errors="replace").strip()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no manager answers at {address}: {error or type(error).__name__}"
    return "" if response.status == http.client.OK else f"{address}/{page}: {response.status} {said}"


def main() -> int:
    """Request the page that is named, else /readyz, at KVCM_MANAGER; 0 is yes, 1 no, 2 a wrong command line."""
    page = sys.argv[1] if len(sys.argv) > 1 else _PAGES[0]
    if page not in _PAGES or len(sys.argv) > 2:
        sys.stderr.write(f"python -m kvcm.probe [{' | '.join(_PAGES)}], not {' '.join(sys.argv[1:])!r}\n")
        return 2
    reason = probe(os.environ.get("KVCM_MANAGER", _ADDRESS), page, os.environ)
    sys.stderr.write(f"{reason}\n" if reason else "")
    return 1 if reason else 0


def _connection(address: str, environment: Mapping[str, str]) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port is None:
        raise ValueError("it must be an url of host and port, as in http://127.0.0.1:6492")
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_SECONDS)
    # As probes of Kubernetes do it: nothing secret is sent, and the certificate need not name the loopback address.
    context = ssl._create_unverified_context()  # noqa: S323
    if certificate := environment.get("KVCM_CERT_FILE"):
        context.load_cert_chain(certificate, environment.get("KVCM_CERT_KEY_FILE"))
    return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_SECONDS, context=context)


if __name__ == "__main__":
    sys.exit(main())
