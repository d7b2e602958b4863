"""Who counts what is asked of the cache: lookups and write sessions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from kvcm.cache.match import Match, MatchMode, MatchQuery
from kvcm.model.instances import Instance

__all__ = ["UNOBSERVED", "CacheObserver", "Reader", "WithReader", "WriteEnd"]


class WriteEnd(Enum):
    """How a write session ended: with all its blocks, some, none, or by its deadline."""

    COMMITTED = "committed"
    PARTIAL = "partial"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @classmethod
    def of(cls, decision: Sequence[bool]) -> WriteEnd:
        """Return how a session ended whose client told which blocks succeeded; one without blocks is committed."""
        if all(decision):
            return cls.COMMITTED
        return cls.PARTIAL if any(decision) else cls.ABORTED


class CacheObserver(Protocol):
    """Is told what happens, on the path of every request: it does little and never waits or raises."""

    def looked_up(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """A lookup that counts as an access was answered."""

    def lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        """A lookup could not be answered."""

    def revisited(self, instance: Instance, seconds: float) -> None:
        """A block was read again so long after its last read; told of some blocks, after a while."""

    def write_started(self, masked_keys: int) -> None:
        """A write session was opened; so many keys of the request need not be written."""

    def write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        """A write session was ended by this manager, once; seconds since its start if it was started here."""


class Reader(Protocol):
    """Is told which chains are asked for, on the path of every request."""

    def read(self, group_name: str, keys: Sequence[int], block_bytes: int) -> None:
        """A prefix match for blocks of so many bytes each was answered."""


class WithReader:
    """An observer, and a reader beside it.

    Args:
        observer: told of everything.
        reader: told of prefix matches, without what they leave out.
    """

    def __init__(self, observer: CacheObserver, reader: Reader) -> None:
        self._reader = reader
        self._observer = observer
        self.lookup_failed = observer.lookup_failed
        self.revisited = observer.revisited
        self.write_started = observer.write_started
        self.write_ended = observer.write_ended

    def looked_up(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        """Tell both."""
        self._observer.looked_up(instance, query, found)
        if query.mode in _PREFIX_MODES:
            positions = query.mask.unmasked(len(query.keys))
            is_masked = len(positions) < len(query.keys)
            keys = [query.keys[position] for position in positions] if is_masked else query.keys
            self._reader.read(instance.instance_group_name, keys, instance.block_bytes)


_PREFIX_MODES = (MatchMode.PREFIX_MATCH, MatchMode.PREFIX_MATCH_WITH_MAMBA)


class _Nobody:
    def looked_up(self, instance: Instance, query: MatchQuery, found: Match) -> None:
        pass

    def lookup_failed(self, instance: Instance, query: MatchQuery) -> None:
        pass

    def revisited(self, instance: Instance, seconds: float) -> None:
        pass

    def write_started(self, masked_keys: int) -> None:
        pass

    def write_ended(self, end: WriteEnd, seconds: float | None) -> None:
        pass


UNOBSERVED: CacheObserver = _Nobody()
