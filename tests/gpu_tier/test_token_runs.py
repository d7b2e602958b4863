"""Plans of single tokens against plain loops, in all implementations."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan, token_runs
from gpu_tier.types import CopyRuns, Source

IMPLEMENTATIONS = ["reference", "triton"]
ROWS_OF_TABLES, SINK, TOKENS = 4, 3, 60


class Problem:
    """Random tables, selections and steady runs."""

    def __init__(self, seed: int, rows: int, heads: int, width: int, unit: int, *, by_head: bool) -> None:
        rng, draw = Random(seed), torch.Generator().manual_seed(seed)
        blocks, places, before = -(-TOKENS // unit), 5, rng.choice([0, 1, 7])

        def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.randint(low, high, shape, generator=draw, dtype=dtype)

        place_of = ints(-places, places, ROWS_OF_TABLES, heads if by_head else 1, blocks).clamp_min(-1)
        host_loc = ints(-20, 5000, ROWS_OF_TABLES, TOKENS, dtype=torch.int64).clamp_min(-1)
        slots = ints(0, 900, ROWS_OF_TABLES, places * unit)
        self.places = TokenPlaces(place_of, slots, host_loc, SINK, unit)
        self.indices = torch.full((rows, heads, width), -1, dtype=torch.int32)
        for row in self.indices.view(rows * heads, width):
            chosen = sorted(rng.sample(range(SINK, TOKENS), rng.randint(0, min(width, TOKENS - SINK))))
            row[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        self.lengths = (self.indices >= 0).sum(-1, dtype=torch.int32)
        self.active = torch.tensor([rng.random() < 0.8 for _ in range(rows)], dtype=torch.bool)
        self.requests = ints(0, ROWS_OF_TABLES, rows, dtype=torch.int64).where(self.active, 10**9)
        lines = (rows, before)
        self.steady = SteadyPlan(
            ints(-1, 1, *lines), ints(0, 900, *lines, dtype=torch.int64), ints(0, 900, *lines), ints(0, 9, *lines),
            ints(0, 900, rows), ints(0, 90, rows),
        )  # fmt: skip

    def plan(self, impl: str) -> TokenPlan:
        device = device_under_test() if impl != "reference" else torch.device("cpu")
        rows, heads, width = self.indices.shape

        def moved(*tensors: Tensor) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        s, p = self.steady, self.places
        out = TokenPlan.empty(rows, heads, s.kind.shape[1] + width, torch.tensor([5, 6, 7], device=device))
        token_runs(
            *moved(self.indices, self.lengths, self.requests, self.active),
            SteadyPlan(*moved(s.kind, s.src, s.dst, s.tokens, s.end, s.total)),
            TokenPlaces(*moved(p.place_of, p.slots, p.host_loc), p.sink, p.unit), out, impl=impl,
        )  # fmt: skip
        return out

    def expected(self, row: int, head: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return (kind, src, dst, tokens) of each run of an active row, and what is counted."""
        s, p = self.steady, self.places
        runs = [
            (int(s.kind[row, i]), int(s.src[row, i]), int(s.dst[row, i]), int(s.tokens[row, i]))
            for i in range(s.kind.shape[1])
        ]
        request, counts = int(self.requests[row]), [0, 0, 0]
        for i, token in enumerate(self.indices[row, head, : int(self.lengths[row, head])].tolist()):
            block, offset = divmod(token - p.sink, p.unit)
            place = int(p.place_of[request, head % p.place_of.shape[1], block])
            kind, src = int(Source.CACHE), int(p.slots[request, place * p.unit + offset])
            if place < 0:
                kind, src = int(Source.HOST), int(p.host_loc[request, token])
            counts = [counts[0] + 1, counts[1] + (place >= 0), counts[2] + (src < 0)]
            runs.append((kind if src >= 0 else -1, src, int(s.end[row]) + i, 1))
        return runs, counts


def lines_of(runs: CopyRuns, line: int) -> list[tuple[int, ...]]:
    tables = (runs.kind, runs.src, runs.dst, runs.tokens)
    return list(zip(*(table[line, : int(runs.count[line])].tolist() for table in tables), strict=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 1 << 30), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1, 9, 20]),
    st.sampled_from([1, 4, 7]), st.booleans(),
)  # fmt: skip
def test_plans_are_those_of_plain_loops(
    impl: str, seed: int, rows: int, heads: int, width: int, unit: int, by_head: bool
) -> None:
    problem = Problem(seed, rows, heads, width, unit, by_head=by_head)
    plan, counted = problem.plan(impl), [5, 6, 7]
    for row in range(rows):
        for head in range(heads):
            line = row * heads + head
            if not problem.active[row]:
                assert plan.runs.count[line] == plan.lens[row, head] == 0
                continue
            runs, counts = problem.expected(row, head)
            assert lines_of(plan.runs, line) == runs
            assert plan.lens[row, head] == problem.steady.total[row] + problem.lengths[row, head]
            counted = [total + count for total, count in zip(counted, counts, strict=True)]
    assert plan.counters.tolist() == counted


def test_a_line_of_several_programs() -> None:
    """More runs than a program of the Triton kernel makes."""
    problem = Problem(1, 2, 2, 40, 4, by_head=False)
    many = 1500
    problem.indices = problem.indices.repeat(1, 1, many // 40 + 1)[..., :many].contiguous()
    problem.indices[:] = torch.randint(SINK, TOKENS, problem.indices.shape)
    problem.lengths = torch.tensor([[many, 1100], [0, 3]], dtype=torch.int32)
    problem.active[:] = True
    problem.requests = torch.tensor([2, 0])
    plans = [problem.plan(impl) for impl in IMPLEMENTATIONS]
    for line in range(4):
        assert lines_of(plans[1].runs, line) == lines_of(plans[0].runs, line)
    assert plans[0].counters.tolist() == plans[1].counters.tolist()


def test_arguments_are_checked() -> None:
    problem = Problem(2, 2, 2, 5, 4, by_head=False)
    p, out = problem.places, problem.plan("reference")
    good = {
        "indices": problem.indices, "lengths": problem.lengths, "requests": problem.requests, "active": problem.active,
        "steady": problem.steady, "places": p, "out": out,
    }  # fmt: skip
    for field, bad in {
        "lengths": {"lengths": problem.lengths[:1]},
        "requests": {"requests": problem.requests[:1]},
        "active": {"active": problem.active.int()},
        "out": {"out": replace(out, lens=out.lens[:1])},
        "places": {"places": replace(p, place_of=p.place_of.repeat(1, 3, 1))},
        "host_loc": {"places": replace(p, host_loc=p.host_loc.T)},
    }.items():
        with pytest.raises(ConfigError, match=field):
            token_runs(**{**good, **bad}, impl="reference")  # type: ignore[arg-type]
