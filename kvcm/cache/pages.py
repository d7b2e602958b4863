"""Large requests are worked on in pages, and give way to other requests after each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["PAGE_KEYS", "give_way", "page_keys", "pages"]

PAGE_KEYS = 1024
"""Blocks that a shared store is asked for at a time, or that nothing but a lookup is done with."""

_LEAST_KEYS = 16

Item = TypeVar("Item")


def page_keys(parts: int) -> int:
    """Return how many blocks of so many parts are worked on without a pause: some 10 ms of the event loop.

    A block costs about as much as one part of it. Powers of two, so that packed files of a page come out even.
    """
    most = max(_LEAST_KEYS, PAGE_KEYS // (1 + parts))
    return 1 << (most - 1).bit_length()


async def give_way(count: int, page: int) -> None:
    """Let others in between two stages of a request of so many blocks, if these are much for pages of that size. To be
    called where nothing was looked at that has to stay as it is."""
    if 2 * count > page:
        await asyncio.sleep(0)


def pages(items: Sequence[Item], most: int = PAGE_KEYS) -> Iterator[Sequence[Item]]:
    """Yield the items in order, at most so many at a time; one page is the sequence itself."""
    if len(items) <= most:
        if items:
            yield items
        return
    for start in range(0, len(items), most):
        yield items[start : start + most]
