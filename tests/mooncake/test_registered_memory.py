"""Which memory moves without a copy, and how the rest shares slots."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.transfer.memory import MemorySpan, RegisteredMemory, StagingMemory, span_of
from kvcm.model.errors import InvalidArgumentError

SPANS = st.builds(MemorySpan, st.integers(1, 60), st.integers(1, 20))


@given(st.lists(SPANS, max_size=8), SPANS)
def test_memory_is_held_when_it_lies_in_one_span(wanted: list[MemorySpan], asked: MemorySpan) -> None:
    memory, taken = RegisteredMemory(), dict[int, int]()
    for number, span in enumerate(wanted):
        covered = range(span.address, span.end)
        if taken.keys() & set(covered):
            with pytest.raises(InvalidArgumentError, match="overlap"):
                memory.add(span)
        else:
            memory.add(span)
            taken |= dict.fromkeys(covered, number)
    owners = {taken.get(address) for address in range(asked.address, asked.end)}
    assert memory.contains(asked) == (len(owners) == 1 and None not in owners)


def test_forgotten_memory_is_not_held_and_can_come_back() -> None:
    memory, span = RegisteredMemory(), MemorySpan(100, 10)
    memory.add(span)
    memory.remove(span)
    assert not memory.contains(span)
    memory.add(span)
    assert memory.contains(MemorySpan(105, 5))


def test_memory_that_is_empty_or_has_gaps_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="0 bytes"):
        RegisteredMemory().add(span_of(memoryview(b"")))
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        span_of(memoryview(bytearray(8))[::2])


def test_spans_report_where_memory_lies_also_when_it_is_read_only() -> None:
    array = bytearray(b"0123456789")
    whole, part = span_of(memoryview(array)), span_of(memoryview(array)[3:7])
    assert part == MemorySpan(whole.address + 3, 4)
    assert span_of(memoryview(b"abc")).size_bytes == 3


@given(st.lists(st.integers(1, 30), max_size=20))
def test_batches_keep_the_order_fit_a_slot_and_leave_out_only_what_never_fits(sizes: list[int]) -> None:
    staging = StagingMemory(80)
    batches = list(staging.batches(sizes, lambda size: size))
    assert [size for batch in batches for size in batch] == [size for size in sizes if size <= 20]
    assert all(0 < sum(batch) <= 20 for batch in batches)


def test_a_slot_is_lent_once_until_it_is_returned() -> None:
    staging = StagingMemory(4096)
    with ExitStack() as lent:
        slots = [lent.enter_context(staging.slot(lambda: 0.0)) for _ in range(4)]
        addresses = {span_of(slot).address for slot in slots if slot is not None}
        assert addresses == {staging.span.address + index * 1024 for index in range(4)}
        assert lent.enter_context(staging.slot(lambda: 0.0)) is None, "there is no fifth"
    with staging.slot(lambda: 0.0) as slot:
        assert slot is not None
