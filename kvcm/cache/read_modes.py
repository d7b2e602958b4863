"""Which instances are read by prefix match alone: only there a block whose prefix is gone is garbage (invariant 7).

An instance that was read in any other way, even once, is never such an instance again. That is a document, so that it
holds for every manager and after a restart; who reads pays for a look into a set.
"""

from __future__ import annotations

from typing import Final

import structlog

from kvcm.cache.match import MatchMode
from kvcm.model.errors import StorageIOError
from kvcm.store.store import Table

__all__ = ["ReadModes"]

_IN_ORDER: Final = frozenset({MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA})
_READ_OUT_OF_ORDER: Final = b"1"

_log = structlog.get_logger("kvcm.cache")


class ReadModes:
    """Remembers which instances were read out of order.

    Args:
        table: where that is stored, by the number of the registration.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._out_of_order: set[int] = set()

    def is_new(self, uid: int, mode: MatchMode) -> bool:
        """Return whether a read by this mode has to be noted."""
        return mode not in _IN_ORDER and uid not in self._out_of_order

    async def note(self, uid: int) -> None:
        """Note that an instance is read out of order; a store that fails is asked again at the next such read."""
        try:
            if await self._table.get(str(uid)) is None:
                await self._table.replace(str(uid), None, _READ_OUT_OF_ORDER)
        except StorageIOError as error:  # the read itself is not harmed
            _log.warning("read_mode_not_stored", registration=uid, reason=str(error))
        else:
            self._out_of_order.add(uid)

    async def is_in_order(self, uid: int) -> bool:
        """Return whether an instance was read by prefix match alone, through whatever manager.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        if uid not in self._out_of_order and await self._table.get(str(uid)) is not None:
            self._out_of_order.add(uid)
        return uid not in self._out_of_order

    async def forget(self, uid: int) -> None:
        """Drop what is stored of an instance that is gone for good.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._out_of_order.discard(uid)
        await self._table.replace(str(uid), _READ_OUT_OF_ORDER, None)
