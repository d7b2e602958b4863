"""/livez, /readyz and /startupz, as Kubernetes and load balancers ask them.

The body is `ok` or `not ready`; on the admin port `?verbose` adds the reasons, in the format of Kubernetes' own probes.
A probe touches nothing: whether the metadata store answers is found out in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

import structlog

from kvcm.model.errors import KvcmError
from kvcm.model.principals import Verb
from kvcm.service.admission import Phase, ServingGate
from kvcm.service.http_server import Page, PageRequest, PageRoute

__all__ = ["Probes"]

_STORE_SECONDS = 1.0  # within which the store has to answer, and between two questions

_log = structlog.get_logger("kvcm.service")


class _Check(NamedTuple):
    """Part of a probe; `reason` says why it failed, "" for that it did not."""

    name: str
    reason: str


class Probes:
    """The health of this manager.

    Args:
        gate: the phase of the manager's life.
        on_change: awaited when readiness may have changed.
    """

    def __init__(self, gate: ServingGate, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._gate = gate
        self._on_change = on_change
        self._store_failure = ""
        self._rows = (0, 0)
        gate.on_phase_change(self._report_change)

    @property
    def is_ready(self) -> bool:
        """Whether requests are to be sent here."""
        return not any(check.reason for check in self._readyz())

    def set_loaded_rows(self, loaded: int, estimated: int) -> None:
        """Take note of how many rows of metadata are loaded, and about how many there are. Callable from any thread."""
        self._rows = (loaded, estimated)

    async def watch_store(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask the metadata store again and again, for good.

        Args:
            ask: asks it something small.
        """
        while True:
            failure = await _failure(ask)
            if failure != self._store_failure:
                self._store_failure = failure
                log = _log.warning if failure else _log.info
                log("metadata_store", is_reachable=not failure, reason=failure)
                await self._report_change()
            await asyncio.sleep(_STORE_SECONDS)

    def pages(self, *, has_detail: bool) -> Mapping[str, PageRoute]:
        """Return the pages of one port.

        Args:
            has_detail: whether `verbose` shows the reasons to principals with the permission to view.
        """

        def page(name: str, check: Callable[[], list[_Check]]) -> PageRoute:
            async def answer(request: PageRequest) -> Page:
                may_see = has_detail and Verb.VIEW in request.principal.verbs
                is_verbose = may_see and b"verbose" in parse_qs(request.query, keep_blank_values=True)
                return _page(name, check(), is_verbose=is_verbose)

            return answer

        checks = {"livez": self._livez, "readyz": self._readyz, "startupz": self._startupz}
        return {f"/{name}": page(name, check) for name, check in checks.items()}

    async def _report_change(self) -> None:
        await self._on_change(self.is_ready)

    def _livez(self) -> list[_Check]:
        return [_Check("loop", "")]  # it answers

    def _startupz(self) -> list[_Check]:
        if self._gate.phase is not Phase.STARTING:
            return [_Check("started", "")]
        loaded, estimated = self._rows
        progress = f", {loaded} of about {max(loaded, estimated)} rows are there" if loaded else ""
        return [_Check("started", f"loading metadata{progress}")]

    def _readyz(self) -> list[_Check]:
        is_starting = self._gate.phase is Phase.STARTING
        return [
            _Check("started", "the manager is starting" if is_starting else ""),
            _Check("metadata-store", self._store_failure),
            _Check("staying", "the manager is stopping" if self._gate.is_draining else ""),
        ]


async def _failure(ask: Callable[[], Awaitable[object]]) -> str:
    try:
        async with asyncio.timeout(_STORE_SECONDS):
            await ask()
    except TimeoutError:
        return f"no answer within {_STORE_SECONDS:g} s"
    except KvcmError as error:
        return str(error)
    return ""


def _page(name: str, checks: list[_Check], *, is_verbose: bool) -> Page:
    passed = not any(check.reason for check in checks)
    status = 200 if passed else 503
    if not is_verbose:
        return Page(status, b"ok" if passed else b"not ready")
    lines = [f"[-]{check.name} failed: {check.reason}" if check.reason else f"[+]{check.name} ok" for check in checks]
    lines.append(f"{name} check {'passed' if passed else 'failed'}\n")
    return Page(status, "\n".join(lines).encode())
