"""The table of device slots."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError
from gpu_tier.pools.req_to_token import ReqToTokenPool

CPU = torch.device("cpu")


def test_slots_are_those_that_were_set() -> None:
    pool = ReqToTokenPool(2, 8, CPU)
    first, second = pool.alloc(), pool.alloc()
    pool.set_slots(first, 2, torch.tensor([30, 31, 32]))
    pool.set_slots(second, 0, torch.tensor([7]))
    assert pool.table.dtype is torch.int32
    assert pool.slots(first, 1, 6).tolist() == [-1, 30, 31, 32, -1]
    assert pool.slots(second, 0, 2).tolist() == [7, -1]
    pool.free(first)
    assert (pool.table[first] == -1).all()
    assert pool.slots(second, 0, 1).tolist() == [7]


def test_rows_are_given_out_once() -> None:
    pool = ReqToTokenPool(2, 8, CPU)
    taken = [pool.alloc(), pool.alloc()]
    assert sorted(taken) == [0, 1]
    with pytest.raises(PoolExhaustedError, match="all 2 request rows are taken; raise max_requests"):
        pool.alloc()
    pool.free(0)
    with pytest.raises(AllocationError):
        pool.free(0)
    with pytest.raises(AllocationError):
        pool.set_slots(0, 0, torch.tensor([1]))
    assert pool.available == 1


@pytest.mark.parametrize(("start", "n"), [(6, 3), (-1, 1), (9, 1)])
def test_tokens_beyond_a_row_are_refused(start: int, n: int) -> None:
    pool = ReqToTokenPool(1, 8, CPU)
    pool.alloc()
    with pytest.raises(ConfigError, match="max_tokens"):
        pool.set_slots(0, start, torch.arange(n))
    assert (pool.table == -1).all()
