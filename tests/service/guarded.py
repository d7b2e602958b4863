"""A manager that asks for keys, with something in it, and what shows that hostile requests did it no harm."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raw_connections import connected
from secured import Secured, secured_over
from test_transport_drivers import Api, eventually
from test_transport_sites import Site

__all__ = ["Guarded", "guarded_over"]

_MOST_GROWTH_BYTES = 64 << 20
_KEYS = [1, 2, 3]


@dataclass(frozen=True)
class Guarded:
    """A running manager.

    Attributes:
        server: it.
        instance: of which blocks are stored.
        begin_bytes: memory that it had when that was done.
    """

    server: Secured
    instance: str
    begin_bytes: int

    @property
    def context(self) -> ssl.SSLContext | None:
        """How clients speak TLS, where they do."""
        return None if self.server.tls is None else self.server.tls.context()

    def http(self, port: str = "http") -> contextlib.AbstractContextManager:  # type: ignore[type-arg]
        """Connect to a port of HTTP."""
        return connected(getattr(self.server.process.address, port), self.context)

    def grpc(self, port: str = "rpc") -> contextlib.AbstractContextManager:  # type: ignore[type-arg]
        """Connect to a port of gRPC."""
        return connected(getattr(self.server.process.address, port), self.context, "h2")

    def changes(self) -> int:
        """Return how many changes there have been."""
        return len(self.server.process.events("audit"))

    def counted(self, metric: str) -> int:
        """Return the sum of the series of a metric whose names begin so."""
        _, text = self.server.page("/metrics", self.server.admin_key)
        return sum(int(float(value)) for value in re.findall(rf"^{re.escape(metric)}.* (\S+)$", text, re.MULTILINE))

    @contextlib.contextmanager
    def all_turned_away(self, count: int) -> Iterator[None]:
        """Inside the block so many requests come of which each is refused for its credentials, and none is read."""
        refused, read = 'kvcm_rpc_rejected_total{reason="unauthenticated"}', "kvcm_rpc_requests_total"
        before = self.counted(refused), self.counted(read)
        yield
        assert (self.counted(refused), self.counted(read)) == (before[0] + count, before[1])

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Whatever happens inside the block, the manager is afterwards as it was before."""
        changes = self.changes()
        yield
        assert self.server.process.process.poll() is None
        for transport in ("grpc", "http"):
            assert eventually(lambda transport=transport: self._is_served(transport))
        log = self.server.process.log_text()
        assert "Traceback" not in log
        assert not self.server.process.events("failed")
        assert self.server.admin_key not in log
        assert self.changes() == changes
        assert _memory_bytes(self.server) - self.begin_bytes < _MOST_GROWTH_BYTES

    def _is_served(self, transport: str) -> bool:
        with self.server.api(transport) as api:
            return _hits(api, self.instance) == _KEYS


def _hits(api: Api, instance: str) -> list[int]:
    return list(Site(api).hits(instance, _KEYS))


def _memory_bytes(server: Secured) -> int:
    pages = Path(f"/proc/{server.process.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def guarded_over(mode: str, directory: Path, *settings: str) -> Iterator[Guarded]:
    """Run one, `plain` or over `tls`."""
    with secured_over(mode, directory, *settings) as server:
        with server.api() as api:
            site = Site(api)
            instance = site.instance(site.group())
            site.write(instance, _KEYS)
            assert _hits(api, instance) == _KEYS
        yield Guarded(server, instance, _memory_bytes(server))
