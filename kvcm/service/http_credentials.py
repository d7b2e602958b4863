"""What the client of an HTTP request shows of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvcm.service.access import Credentials

__all__ = ["CERTIFICATE_NAMES", "credentials_of"]

CERTIFICATE_NAMES: Final = "kvcm.certificate_names"
"""Key of a scope: subject alternative names of the client's certificate, where it showed one that was verified."""


def credentials_of(scope: Mapping[str, Any]) -> Credentials:
    """Return the credentials in the scope of a request. Of two authorizations none counts: which one was meant?"""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    authorization = given[0].decode("latin-1") if len(given) == 1 else "twice" if given else ""
    return Credentials(authorization, scope.get(CERTIFICATE_NAMES, ()))
