"""What a write costs several managers: which of them writers use, and what is compared with what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from managers import BLOCKS, INSTANCES, WRITERS, Case, Cost, Fleet, Running, cases_of, rows_of

ONE, FOUR = Case(Fleet(1), True, 64), Case(Fleet(4), True, 64)


def _fleet(count: int) -> Running:
    fleet = Running([SimpleNamespace(pid=number) for number in range(count)])  # type: ignore[misc]
    fleet.stubs = [[(number, own) for own in range(WRITERS // count)] for number in range(count)]
    return fleet


def test_separate_instances_have_one_manager_each_and_shared_ones_all() -> None:
    for count in (1, 2, 4):
        fleet = _fleet(count)
        separate = {(stub[0], instance) for stub, instances in fleet.writers(False) for instance in instances}
        shared = {(stub[0], instance) for stub, instances in fleet.writers(True) for instance in instances}
        assert len(separate) == len(INSTANCES)
        assert len(shared) == count * len(INSTANCES)
        assert len({stub for stub, _ in fleet.writers(False)}) == WRITERS


def test_four_managers_are_compared_with_one_and_at_once_with_four_that_are_apart() -> None:
    assert FOUR.baseline == ONE
    assert FOUR._replace(is_at_once=True).baseline.fleet == Fleet(4, is_apart=True)
    assert len(cases_of([1, 2, 4], is_quick=False)) == 3 * 2 * len(BLOCKS) + 2
    assert not any(case.is_at_once for case in cases_of([1, 4], is_quick=True))


def test_the_ratio_is_that_of_a_round() -> None:
    """The machine was twice as slow in the second round."""

    def judged(*, four_us: float) -> Any:
        costs = {case: [Cost(us, 50, 0, 1), Cost(2 * us, 100, 0, 1)] for case, us in ((ONE, 50.0), (FOUR, four_us))}
        (row,) = [row for row in rows_of(costs) if row.target]
        return row

    assert judged(four_us=60).ratio == 1.1
    assert judged(four_us=60).ok
    assert not judged(four_us=70).ok
