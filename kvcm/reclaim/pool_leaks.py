"""Memory of a pool that nobody owns: a manager that dies between taking it and storing the blocks leaves it taken, and
so does a pool that is removed and added again. It is few bytes at a time, but memory is dear, and nobody else frees it.

Where more of a pool is taken than blocks account for, the pool is scrubbed, as an operator would do it: only what no
block names and what was taken long ago is freed. Rarely, since that reads every block of every index.

Memory is taken in whole pages, and blocks account for the sizes of their parts. How much more the one is than the other
depends on which blocks lie there. A scrub that leaves nothing in doubt tells; for a day it is expected, in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import NotReadyError
from kvcm.reclaim.scrub import StorageScrubber

__all__ = ["PoolLeaks", "TakenMemory"]

_FIRST_SECONDS: Final = 60.0
_SCRUB_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 60.0
_ROUNDING_SECONDS: Final = 86_400.0

_log = structlog.get_logger("kvcm.reclaim")


class TakenMemory(Protocol):
    """A pool, as far as this is concerned."""

    @property
    def taken_bytes(self) -> int:
        """What is handed out, as this manager saw it last."""


class _Rounding(NamedTuple):
    """What was taken of a pool for what blocks used, when nothing of it was nobody's."""

    taken_bytes: int
    used_bytes: int
    until: float

    def taken_for(self, used_bytes: int) -> int:
        """Return what is taken for as many bytes, rounded up."""
        return -(-used_bytes * self.taken_bytes // self.used_bytes)


class PoolLeaks:
    """Finds leaks.

    Args:
        pools: returns the open pools by name.
        used_bytes: returns what blocks use on a storage, at least.
        scrubber: frees what no block names.
        clock: time source.
    """

    def __init__(
        self,
        pools: Callable[[], Mapping[str, TakenMemory]],
        used_bytes: Callable[[str], int],
        scrubber: StorageScrubber,
        clock: Clock,
    ) -> None:
        self._pools = pools
        self._used_bytes = used_bytes
        self._scrubber = scrubber
        self._clock = clock
        self._next: dict[str, float] = {}
        self._roundings: dict[str, _Rounding] = {}

    async def look(self) -> None:
        """Scrub the pools of which more is taken than blocks use.

        Raises:
            KvcmError: one cannot be scrubbed now; it is tried again later.
        """
        now, pools = self._clock.now(), dict(self._pools())
        self._next = {name: self._next.get(name, now + _FIRST_SECONDS) for name in pools}
        self._roundings = {name: each for name, each in self._roundings.items() if name in pools and now < each.until}
        for name, pool in pools.items():
            if now < self._next[name]:
                continue
            leaked_bytes = pool.taken_bytes - self._accounted_bytes(name)
            self._next[name] = now + (_SCRUB_SECONDS if leaked_bytes > 0 else _LOOK_SECONDS)
            if leaked_bytes > 0:
                await self._scrub(name, pool, leaked_bytes)

    def _accounted_bytes(self, name: str) -> int:
        used_bytes, rounding = self._used_bytes(name), self._roundings.get(name)
        return used_bytes if rounding is None else rounding.taken_for(used_bytes)

    async def _scrub(self, name: str, pool: TakenMemory, leaked_bytes: int) -> None:
        try:
            report = await self._scrubber.scrub(name, dry_run=False)
        except NotReadyError:  # an operator does it right now
            _log.info("pool_scrubbed_already", storage=name, bytes=leaked_bytes)
            return
        used_bytes = self._used_bytes(name)
        if used_bytes and not report.too_young and not report.failed:
            until = self._clock.now() + _ROUNDING_SECONDS
            self._roundings[name] = _Rounding(max(pool.taken_bytes, used_bytes), used_bytes, until)
