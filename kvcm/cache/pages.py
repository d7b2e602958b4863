"""Large requests are worked on in pages, and give way to other requests after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["PAGE_KEYS", "page_keys", "pages"]

PAGE_KEYS = 1024
"""Blocks that are worked on without a pause: some 10 ms of the event loop at most."""

_PAGE_PARTS = 2048
_LEAST_KEYS = 16

Item = TypeVar("Item")


def page_keys(parts: int) -> int:
    """Return how many blocks of so many parts are worked on without a pause: what they cost grows with their parts."""
    return max(_LEAST_KEYS, min(PAGE_KEYS, _PAGE_PARTS // parts))


def pages(items: Sequence[Item], most: int = PAGE_KEYS) -> Iterator[Sequence[Item]]:
    """Yield the items in order, at most so many at a time; one page is the sequence itself."""
    if len(items) <= most:
        if items:
            yield items
        return
    for start in range(0, len(items), most):
        yield items[start : start + most]
