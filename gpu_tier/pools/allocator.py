"""Pages of a pool and their reference counts.

Invariants:
1. A page is free or has a reference count of at least one, never both.
2. `free` is all or nothing: a page that is not held makes the call fail and changes nothing, so that a double free is
   found where it happens and not where the page was given out twice.
3. `alloc` is all or nothing too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcm.gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError

__all__ = ["PagedAllocator"]


class PagedAllocator:
    """Reference-counted pages, O(1) each.

    Args:
        num_pages: pages of the pool; ids are 0 to num_pages - 1.
        page_size: tokens of a page.
        name: of the pool, for messages.
        knob: the setting that makes the pool larger, for messages.
    """

    def __init__(self, num_pages: int, page_size: int, name: str = "pool", knob: str = "num_pages") -> None:
        if num_pages < 1:
            raise ConfigError(knob, num_pages, f"the {name} needs at least one page")
        self.num_pages = num_pages
        self.page_size = page_size
        self._name = name
        self._knob = knob
        # Low ids are given out first, and a page that was just freed before one that was never used.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def available(self) -> int:
        """Pages that `alloc` can give out."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that are held."""
        return self.num_pages - self.available

    def alloc(self, n: int) -> list[int]:
        """Take `n` pages, one reference each.

        Raises:
            PoolExhaustedError: fewer are available; none was taken.
        """
        if n < 0:
            raise ConfigError("n", n, "must not be negative")
        if n > self.available:
            raise PoolExhaustedError(
                f"the {self._name} has {self.available} of {self.num_pages} pages left, {n} were asked for; "
                f"raise {self._knob} or run fewer or shorter requests"
            )
        self._evict(n)
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
            self._on_alloc(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page.

        Raises:
            AllocationError: one of them is not held; nothing was changed.
        """
        pages = list(pages)
        for page in pages:
            if not self._is_held(page):
                raise AllocationError(f"page {page} of the {self._name} cannot be shared: it is not held")
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; one without references is available again, those given first last.

        Raises:
            AllocationError: a page has fewer references than are dropped; nothing was changed.
        """
        dropped = Counter(pages)
        for page, times in dropped.items():
            if not self._is_held(page) or self._references[page] < times:
                raise AllocationError(f"page {page} of the {self._name} is freed {times} times, held less often")
            self._check_free(page, self._references[page] - times)
        # Pages often hold a chain of blocks; the last is to go first, since it is of no use without those before.
        for page, times in reversed(dropped.items()):
            self._references[page] -= times
            if not self._references[page]:
                self._on_release(page)

    def refcount(self, page: int) -> int:
        """Return the references of a page."""
        return self._references[page]

    def _is_held(self, page: int) -> bool:
        return 0 <= page < self.num_pages and self._references[page] > 0

    def _evict(self, n: int) -> None:
        """Put pages on the free list until it has `n`; `available` says that this is possible."""

    def _on_alloc(self, page: int) -> None:
        """Take note that a free page was given out."""

    def _check_free(self, page: int, left: int) -> None:
        """Raise when the page must not go down to `left` references."""

    def _on_release(self, page: int) -> None:
        """Put a page without references back."""
        self._free.append(page)
