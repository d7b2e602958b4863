"""Bytes in flight: never more than the limit, and never one storage at the cost of all others."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.transfer.budget import ByteBudget
from connectors.transfer.gate import Gate
from connectors.transfer.mover import Direction
from kvcm.model.errors import InvalidArgumentError

STORAGES = ["a", "b", "c"]
pieces = st.tuples(st.sampled_from(STORAGES), st.sampled_from(list(Direction)), st.integers(1, 150))


@given(limit=st.integers(1, 100), wanted=st.lists(pieces, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_budget_is_never_exceeded_and_everything_gets_in(
    limit: int, wanted: list[tuple[str, Direction, int]], data: st.DataObject
) -> None:
    """Whoever is turned away gets in once there is room; only a piece larger than the budget goes beyond it, alone."""
    gate = Gate(ByteBudget(limit, STORAGES))
    condition = threading.Condition(gate.lock)
    inside: list[tuple[str, int]] = []
    while wanted or inside:
        with gate.lock:
            for piece in list(wanted):
                if gate.enter(*piece, condition):
                    wanted.remove(piece)
                    inside.append((piece[0], piece[2]))
                    total = sum(size for _, size in inside)
                    assert total == gate.budget.total_bytes
                    assert total <= limit or len(inside) == 1
                    held = [size for storage, size in inside if storage == piece[0]]
                    assert sum(held) <= max(1, limit // len(STORAGES)) or len(held) == 1
            assert inside, "something always gets in when nothing is in flight"
            gate.leave(*inside.pop(data.draw(st.integers(0, len(inside) - 1))))
    assert gate.budget.total_bytes == 0


def test_no_save_begins_while_a_load_waits_for_room() -> None:
    gate = Gate(ByteBudget(100, ["a", "b"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.enter("a", Direction.LOAD, 60, condition)
        assert not gate.enter("b", Direction.LOAD, 50, condition)
        assert not gate.enter("b", Direction.SAVE, 10, condition)
        gate.leave("a", 60)
        assert not gate.enter("a", Direction.SAVE, 10, condition)
        assert gate.enter("b", Direction.LOAD, 50, condition)
        assert gate.enter("a", Direction.SAVE, 10, condition)


class Bell(threading.Condition):
    """Counts how often it was rung."""

    rung = 0

    def notify_all(self) -> None:
        self.rung += 1
        super().notify_all()


def test_a_load_that_waits_for_its_own_share_holds_up_no_save() -> None:
    gate = Gate(ByteBudget(100, ["a", "b"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.enter("a", Direction.LOAD, 50, condition)
        assert gate.enter("b", Direction.LOAD, 50, condition)
        assert not gate.enter("a", Direction.LOAD, 40, condition)
        gate.leave("b", 50)
        assert gate.enter("b", Direction.SAVE, 8, condition)


def test_saves_are_woken_when_a_load_that_room_would_help_gives_way_to_one_that_it_would_not() -> None:
    gate = Gate(ByteBudget(99, ["a", "b", "c"]))
    condition, bell = threading.Condition(gate.lock), Bell(gate.lock)
    with gate.lock:
        assert gate.enter("b", Direction.LOAD, 70, condition)
        assert gate.enter("a", Direction.LOAD, 20, condition)
        assert not gate.enter("a", Direction.LOAD, 12, condition)
        assert not gate.enter("c", Direction.SAVE, 5, bell)
        assert not gate.enter("a", Direction.LOAD, 20, condition)
        assert bell.rung == 1
        assert gate.enter("c", Direction.SAVE, 5, bell)


def test_a_storage_that_keeps_its_share_leaves_the_rest_to_the_others() -> None:
    gate = Gate(ByteBudget(100, ["hung", "well"]))
    condition = threading.Condition(gate.lock)
    with gate.lock:
        assert gate.enter("hung", Direction.LOAD, 50, condition)
        assert not gate.enter("hung", Direction.LOAD, 10, condition)
        for _ in range(10):
            assert gate.enter("well", Direction.LOAD, 50, condition)
            gate.leave("well", 50)
            assert gate.enter("well", Direction.SAVE, 50, condition)
            gate.leave("well", 50)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(InvalidArgumentError, match="limit_bytes"):
        ByteBudget(limit, ["a"])
