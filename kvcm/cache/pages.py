"""Large requests are worked on in pages, and give way to other requests after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["PAGE_KEYS", "pages"]

PAGE_KEYS = 1024
"""Blocks that are worked on without a pause: some 10 ms of the event loop at most."""

Item = TypeVar("Item")


def pages(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield the items in order, `PAGE_KEYS` at a time; one page is the sequence itself."""
    if len(items) <= PAGE_KEYS:
        if items:
            yield items
        return
    for start in range(0, len(items), PAGE_KEYS):
        yield items[start : start + PAGE_KEYS]
