"""Everything that can be looked at without a running manager: what its settings name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from kvcm.config import Settings
from kvcm.doctor.certificates import check_authorities, check_certificate
from kvcm.doctor.findings import Finding, Level
from kvcm.doctor.manager import check_storage
from kvcm.doctor.places import check_metadata_directory
from kvcm.doctor.ports import check_ports
from kvcm.doctor.settings import combinations, redis_settings
from kvcm.doctor.shared_store import check_shared_store
from kvcm.model.errors import InvalidArgumentError
from kvcm.registry.documents import parse_startup_document

__all__ = ["check_settings"]


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Yield what is found of all that settings name."""
    yield from combinations(settings)
    yield from check_metadata_directory(settings)
    yield from check_ports(settings)
    yield from _certificates(settings.described())
    redis = redis_settings(settings)
    if redis is not None:
        yield from check_shared_store(redis)
    yield from _startup_storage(settings)


def _certificates(described: dict[str, str]) -> Iterator[Finding]:
    now = time.time()
    if cert_file := described.get("kvcm.tls.cert_file", ""):
        yield from check_certificate(cert_file, described.get("kvcm.tls.key_file", ""), now)
    if ca_file := described.get("kvcm.tls.client_ca_file", ""):
        yield from check_authorities(ca_file, now)


def _startup_storage(settings: Settings) -> Iterator[Finding]:
    if not settings.startup_config:
        return
    try:
        document = parse_startup_document(Path(settings.startup_config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InvalidArgumentError) as error:
        found = f"kvcm.startup_config {settings.startup_config}: {error}"
        yield Finding(Level.FAIL, "settings", found, "correct it: `kvcm serve` refuses it too")
        return
    yield from check_storage(document.storage)
