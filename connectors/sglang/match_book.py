"""Where the pages lie that were found, until they are loaded.

SGLang asks first how many pages of a prompt are there and loads them a little later, 128 at a time and perhaps not all:
ranks agree on the shortest prefix, and the host pool may be full. In between a read lease keeps them readable. Rules:

1. A lease is given back when no page under it is left in the book and no load of its pages is under way.
2. What is not loaded is dropped when the lease is about to end, or when there are too many pages in the book.
3. A page that is found again is under the newer lease.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.results import Location
from kvcm.model.keys import BlockKey

__all__ = ["Found", "Lease", "MatchBook"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A read lease.

    Attributes:
        id: of the manager; "" for none.
        ends_at: of the book's clock.
    """

    id: str
    ends_at: float


@dataclass(frozen=True, slots=True)
class Found:
    """Pages that were taken out of the book; give them to `done` when they are loaded.

    Attributes:
        locations: of the leading pages that were asked for.
        leases: that they are under, with the number of pages.
        ends_at: when the first of the leases ends.
    """

    locations: tuple[Location, ...]
    leases: Counter[Lease]
    ends_at: float


class MatchBook:
    """Keeps what was found; safe to use from several threads.

    Args:
        release: gives a lease back; is called without the lock and must not block.
        clock: seconds of a clock that never runs backwards.
        most: pages to keep.
    """

    def __init__(self, release: Callable[[str], None], clock: Callable[[], float], most: int = 65_536) -> None:
        self._release = release
        self._clock = clock
        self._most = most
        self._pages: OrderedDict[BlockKey, tuple[Location, Lease]] = OrderedDict()
        self._uses: Counter[Lease] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def enter(self, keys: Sequence[BlockKey], locations: Sequence[Location], lease: Lease) -> None:
        """Note where pages lie.

        Args:
            keys: of the pages.
            locations: of them; there are as many or fewer.
            lease: that they are under.
        """
        dropped: Counter[Lease] = Counter()
        with self._lock:
            for key, location in zip(keys, locations, strict=False):
                before = self._pages.pop(key, None)
                if before is not None:
                    dropped[before[1]] += 1
                self._pages[key] = (location, lease)
                self._uses[lease] += 1
            dropped += self._outdated()
            unused = self._put_down(dropped)
        self._give_back(unused)

    def take(self, keys: Sequence[BlockKey]) -> Found:
        """Take the leading pages that are known out of the book."""
        now = self._clock()
        locations: list[Location] = []
        leases: Counter[Lease] = Counter()
        with self._lock:
            for key in keys:
                known = self._pages.get(key)
                if known is None or known[1].ends_at <= now:
                    break
                del self._pages[key]
                locations.append(known[0])
                leases[known[1]] += 1
        return Found(tuple(locations), leases, min((lease.ends_at for lease in leases), default=now))

    def done(self, found: Found) -> None:
        """Hear that pages that were taken are loaded, or will not be."""
        with self._lock:
            unused = self._put_down(found.leases)
        self._give_back(unused)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            dropped = Counter(lease for _, lease in self._pages.values())
            self._pages.clear()
            unused = self._put_down(dropped)
        self._give_back(unused)

    def _outdated(self) -> Counter[Lease]:
        """Drop pages whose lease has ended, and the oldest ones that are too many; those come first."""
        now = self._clock()
        dropped: Counter[Lease] = Counter()
        while self._pages:
            key, (_, lease) = next(iter(self._pages.items()))
            if len(self._pages) <= self._most and lease.ends_at > now:
                break
            del self._pages[key]
            dropped[lease] += 1
        return dropped

    def _put_down(self, dropped: Counter[Lease]) -> list[Lease]:
        """Count fewer uses, and return the leases that have none left."""
        self._uses -= dropped  # keeps what is positive
        return [lease for lease in dropped if lease not in self._uses]

    def _give_back(self, leases: Sequence[Lease]) -> None:
        now = self._clock()
        for lease in leases:
            if lease.id and lease.ends_at > now:
                self._release(lease.id)
