"""What a Mooncake client is asked for a batch of items, and what its answers mean for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from connectors.transfer.mover import Direction, Failure, TransferItem, TransferResult, moved, not_moved
from connectors.transfer.registered import Span, span_of
from connectors.transfer.vectored import writable_views
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.mooncake import MooncakeClient, MooncakeCode, explain

__all__ = [
    "Call",
    "Plan",
    "bounded",
    "call_pieces",
    "call_ranges",
    "call_whole",
    "loaded",
    "plan_of",
    "saved",
]

# The client queues some 2000 transfers to one peer. More of them fail, and were seen to break the connection for later
# ones too.
_PIECES_PER_CALL = 512
_LOST = {MooncakeCode.MISSING, MooncakeCode.NOT_READY, MooncakeCode.INVALID}


class Plan(NamedTuple):
    """An item with its memory, in as few pieces as there can be.

    Attributes:
        position: of the item among the results.
        key: name of the object.
        size_bytes: to move.
        views: the item's memory.
        spans: the same as the client wants it.
        start: as in the item.
    """

    position: int
    key: str
    size_bytes: int
    views: list[memoryview]
    spans: list[Span]
    start: int | None


Call = Callable[[MooncakeClient, Direction, Sequence[Plan]], list[int]]
"""Moves objects; returns the client's answers in the order of the plans: a load's bytes, or what is below 0."""


def call_whole(client: MooncakeClient, direction: Direction, plans: Sequence[Plan]) -> list[int]:
    """Move whole objects that lie in one piece each, which is the fastest way."""
    keys = [plan.key for plan in plans]
    addresses = [plan.spans[0].address for plan in plans]
    sizes = [plan.size_bytes for plan in plans]
    if direction is Direction.LOAD:
        return client.batch_get_into(keys, addresses, sizes)
    return client.batch_put_from(keys, addresses, sizes)


def call_pieces(client: MooncakeClient, direction: Direction, plans: Sequence[Plan]) -> list[int]:
    """Move whole objects from or to several pieces of memory each."""
    keys = [plan.key for plan in plans]
    addresses = [[span.address for span in plan.spans] for plan in plans]
    sizes = [[span.size_bytes for span in plan.spans] for plan in plans]
    if direction is Direction.LOAD:
        return client.batch_get_into_multi_buffers(keys, addresses, sizes)
    return client.batch_put_from_multi_buffers(keys, addresses, sizes)


def call_ranges(client: MooncakeClient, _: Direction, plans: Sequence[Plan]) -> list[int]:
    """Load parts of objects; where an object ends before, the store says that the size does not fit."""
    keys = list(dict.fromkeys(plan.key for plan in plans))
    codes = dict(zip(keys, client.batch_get_session_start(keys), strict=True))
    there = [plan for plan in plans if codes[plan.key] == MooncakeCode.OK]
    try:
        counts = iter(_ranges_of(client, there) if there else ())
        return [next(counts) if codes[plan.key] == MooncakeCode.OK else codes[plan.key] for plan in plans]
    finally:
        client.batch_get_session_end(keys)


def _ranges_of(client: MooncakeClient, plans: Sequence[Plan]) -> list[int]:
    addresses = [[span.address for span in plan.spans] for plan in plans]
    sizes = [[span.size_bytes for span in plan.spans] for plan in plans]
    starts = [
        list(accumulate(lengths[:-1], initial=plan.start or 0)) for plan, lengths in zip(plans, sizes, strict=True)
    ]
    return client.batch_get_into_multi_buffer_ranges([plan.key for plan in plans], addresses, sizes, starts)


def plan_of(position: int, item: TransferItem, direction: Direction) -> Plan:
    """Return what to ask for an item; `position` is its place among the results.

    Raises:
        InvalidArgumentError: uri, memory and range do not fit each other, or memory to load into is read-only.
        TypeError: memory is not contiguous.
    """
    uri = item.uri
    if uri.scheme != "mooncake" or not uri.key:
        raise InvalidArgumentError(f"uri {str(uri)!r} is not mooncake://<storage>/?key=<name>&size=<bytes>")
    views = writable_views(item, direction)
    spans = [span_of(views[0])] if len(views) == 1 else _joined([span_of(view) for view in views])
    return Plan(position, uri.key, item.size_bytes, views, spans, item.start)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Make one of spans that follow each other in memory."""
    joined = [spans[0]]
    for span in spans[1:]:
        last = joined[-1]
        if last.end == span.address:
            joined[-1] = Span(last.address, last.size_bytes + span.size_bytes)
        else:
            joined.append(span)
    return joined


def bounded(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    """Yield the plans in order, in groups of few enough pieces for one call."""
    group: list[Plan] = []
    count = 0
    for plan in plans:
        if group and count + len(plan.spans) > _PIECES_PER_CALL:
            yield group
            group, count = [], 0
        group.append(plan)
        count += len(plan.spans)
    if group:
        yield group


def loaded(plan: Plan, code: int) -> TransferResult:
    """Return the result of a load."""
    if code == plan.size_bytes:
        return moved(code)
    if code >= 0:
        return not_moved(Failure.LOST, f"{plan.key} has {code} bytes, must have {plan.size_bytes}", code)
    return not_moved(Failure.LOST if code in _LOST else Failure.ERROR, f"{plan.key}: {explain(code)}")


def saved(plan: Plan, code: int, absent: set[str]) -> TransferResult:
    """Return the result of a save; `absent` has the names that are not there afterwards."""
    if code < 0:
        return not_moved(
            Failure.REFUSED if code == MooncakeCode.INVALID else Failure.ERROR, f"{plan.key}: {explain(code)}"
        )
    if plan.key in absent:
        return not_moved(Failure.ERROR, f"{plan.key}: an earlier try to store it has not ended")
    return moved(plan.size_bytes)
