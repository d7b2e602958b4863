"""Clusters to blocks, and blocks to the plan of an execution buffer: against plain loops, in all implementations.

What a plan of the whole policy puts together is checked in `test_wave_gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import device_under_test
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor

from gpu_tier.errors import ConfigError
from gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan, block_runs
from gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks, cluster_expand
from gpu_tier.kernels.token_runs import SteadyPlan
from gpu_tier.types import CopyRuns, Source

IMPLEMENTATIONS = ["reference", "triton"]
REQUESTS, PAGES, PAGE_CLUSTERS, PAGE_BLOCKS = 3, 2, 5, 14


def on(device: torch.device, value: Any) -> Any:
    """Return a dataclass of tensors on a device."""
    tensors = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})


def device_of(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


@dataclass
class Clusters:
    """Random clusters of some requests, and what a step selects of them."""

    seed: int
    rows: int
    heads: int
    picks: int
    block: int

    def __post_init__(self) -> None:
        self.rng, draw = Random(self.seed), torch.Generator().manual_seed(self.seed)
        shape = (REQUESTS * PAGES, self.heads * (2 * PAGE_CLUSTERS + PAGE_BLOCKS))
        widths = [self.heads * width for width in (PAGE_CLUSTERS, PAGE_CLUSTERS, PAGE_BLOCKS)]
        ints = torch.randint(0, 1000, shape, generator=draw, dtype=torch.int32)
        firsts, sizes, hosts = (part.unflatten(1, (self.heads, -1)) for part in ints.split(widths, 1))
        sizes %= 3 * self.block + 2
        firsts %= PAGES * PAGE_BLOCKS - 4
        table = torch.randperm(REQUESTS * PAGES, generator=draw).view(REQUESTS, PAGES).int()
        self.pages = ClusterPages(table, firsts, sizes, hosts, self.block)
        self.ids = torch.full((self.rows, self.heads, self.picks), -1, dtype=torch.int32)
        for line in self.ids.view(self.rows * self.heads, self.picks):
            chosen = self.rng.sample(range(PAGES * PAGE_CLUSTERS), self.rng.randint(0, min(self.picks, 10)))
            line[: len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        self.active = torch.tensor([self.rng.random() < 0.8 for _ in range(self.rows)], dtype=torch.bool)
        drawn = torch.randint(0, REQUESTS, (self.rows,), generator=draw)
        self.requests = drawn.where(self.active, 10**9)

    def of(self, entries: Tensor, row: int, head: int, number: int) -> int:
        page, place = divmod(number, entries.shape[2])
        return int(entries[self.pages.table[self.requests[row], page], head, place])

    def expected(self, row: int, head: int, width: int) -> list[tuple[int, ...]]:
        """Return (id, tokens, host, offset) of each block."""
        blocks, before = [], 0
        for cluster in [c for c in self.ids[row, head].tolist() if c >= 0 and self.active[row]]:
            tokens = self.of(self.pages.sizes, row, head, cluster)
            first = self.of(self.pages.firsts, row, head, cluster)
            for i in range(-(-tokens // self.block)):
                part = min(self.block, tokens - i * self.block)
                host = self.of(self.pages.hosts, row, head, first + i)
                blocks.append((first + i, part, host, before + i * self.block))
            before += tokens
        return blocks[:width]

    def expanded(self, impl: str, width: int) -> SelectedBlocks:
        device = device_of(impl)
        out = SelectedBlocks.empty(self.rows, self.heads, width, device)
        inputs = (self.ids.to(device), self.requests.to(device), self.active.to(device))
        cluster_expand(*inputs, on(device, self.pages), out, impl=impl)
        return out


problems = st.builds(
    Clusters, st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 1, 3, 9]),
    st.sampled_from([1, 4, 6]),
)  # fmt: skip


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(80), deadline=None)
@given(problems, st.sampled_from([0, 5, 40]))
def test_clusters_are_expanded_in_order(impl: str, problem: Clusters, width: int) -> None:
    out = problem.expanded(impl, width)
    for row in range(problem.rows):
        for head in range(problem.heads):
            blocks = problem.expected(row, head, width)
            rest = [(-1, 0, 0, 0)] * (width - len(blocks))
            columns = (out.ids, out.tokens, out.hosts, out.offsets)
            assert list(zip(*(column[row, head].tolist() for column in columns), strict=True)) == blocks + rest
            assert out.lengths[row, head] == len(blocks)
            assert out.totals[row, head] == sum(block[1] for block in blocks)


class Places:
    """Random places of the blocks that were selected, and steady runs."""

    def __init__(self, problem: Clusters, width: int, piece: int) -> None:
        draw = torch.Generator().manual_seed(problem.seed + 1)
        self.problem, self.blocks = problem, problem.expanded("reference", width)
        rows, heads, capacity = problem.rows, problem.heads, width + 2

        def ints(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=draw, dtype=torch.int32)

        place = torch.rand(rows, heads, capacity, generator=draw).argsort(-1)[..., :width].int()
        self.places = BlockPlaces(
            place.where(self.blocks.ids >= 0, -1).contiguous(), ints(2, rows, heads, capacity + 1).byte(),
            ints(9, rows, heads, width) - 1, ints(900, REQUESTS, capacity * problem.block), problem.block, piece,
        )  # fmt: skip
        before = problem.rng.choice([0, 1, 7])
        self.steady = SteadyPlan(
            ints(2, rows, before) - 1, ints(900, rows, before).long(), ints(900, rows, before), ints(9, rows, before),
            ints(900, rows), ints(90, rows),
        )  # fmt: skip

    def plan(self, impl: str) -> BlockPlan:
        device, p = device_of(impl), self.problem
        pieces = self.blocks.ids.shape[2] * (p.block // self.places.piece)
        counters = torch.zeros(6, dtype=torch.int64, device=device)
        out = BlockPlan.empty(p.rows, p.heads, self.steady.kind.shape[1], pieces, counters)
        block_runs(
            on(device, self.blocks), p.requests.to(device), p.active.to(device), on(device, self.steady),
            on(device, self.places), out, impl=impl,
        )  # fmt: skip
        return out

    def expected(self, row: int, head: int) -> list[tuple[int, ...]]:
        """Return (kind, source, target, tokens, slot of the place) of each piece."""
        b, p, pieces = self.blocks, self.places, []
        for i in range(int(b.lengths[row, head])):
            place = int(p.place[row, head, i])
            is_loaded = bool(p.loaded[row, head, place])
            for offset in range(0, p.block_tokens, p.piece):
                tokens = min(max(int(b.tokens[row, head, i]) - offset, 0), p.piece)
                slot = int(p.slots[self.problem.requests[row], place * p.block_tokens + offset])
                host = int(b.hosts[row, head, i]) * p.block_tokens + offset
                kind = (int(Source.HOST) if is_loaded else int(Source.CACHE)) if tokens else -1
                target = int(self.steady.end[row]) + int(b.offsets[row, head, i]) + offset
                pieces.append((kind, host if is_loaded else slot, target, tokens, slot))
        return pieces


def lines_of(runs: CopyRuns, line: int) -> list[tuple[int, ...]]:
    tables = (runs.kind, runs.src, runs.dst, runs.tokens)
    return list(zip(*(table[line, : int(runs.count[line])].tolist() for table in tables), strict=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(80), deadline=None)
@given(problems, st.sampled_from([1, 2]))
def test_plans_of_blocks_are_those_of_plain_loops(impl: str, problem: Clusters, parts: int) -> None:
    piece = problem.block // parts if problem.block % parts == 0 else problem.block
    places = Places(problem, 20, piece)
    plan, steady = places.plan(impl), places.steady
    for row in range(problem.rows):
        for head in range(problem.heads):
            line = row * problem.heads + head
            if not problem.active[row]:
                assert plan.runs.count[line] == plan.admissions.count[line] == plan.lens[row, head] == 0
                continue
            pieces = places.expected(row, head)
            columns = (steady.kind, steady.src, steady.dst, steady.tokens)
            first = list(zip(*(column[row].tolist() for column in columns), strict=True))
            assert lines_of(plan.runs, line) == first + [piece[:4] for piece in pieces]
            admitted = [(0 if kind == Source.HOST else -1, to, slot, n) for kind, _, to, n, slot in pieces]
            assert lines_of(plan.admissions, line) == admitted
            assert plan.lens[row, head] == steady.total[row] + places.blocks.totals[row, head]
    assert plan.counters.tolist() == counted(places)


def counted(places: Places) -> list[int]:
    b, p = places.blocks, places.places
    counts = [0, 0, 0, 0, 0, int((p.evicted >= 0).sum())]
    for row, head, i in (b.ids >= 0).nonzero().tolist():
        cached, tokens = not p.loaded[row, head, p.place[row, head, i]], int(b.tokens[row, head, i])
        for number, amount in enumerate((1, cached, tokens, cached * tokens, not cached)):
            counts[number] += int(amount)
    return counts


def test_lines_of_several_programs() -> None:
    problem = Clusters(3, 2, 2, 9, 4)
    problem.active[:] = True
    problem.requests = torch.tensor([1, 2])
    plans = [Places(Clusters(3, 2, 2, 9, 4), 700, 4).plan(impl) for impl in IMPLEMENTATIONS]
    for line in range(4):
        assert lines_of(plans[0].runs, line) == lines_of(plans[1].runs, line)
        assert lines_of(plans[0].admissions, line) == lines_of(plans[1].admissions, line)


def test_arguments_are_checked() -> None:
    problem = Clusters(1, 2, 2, 3, 4)
    places = Places(problem, 8, 4)
    out, plan = problem.expanded("reference", 8), places.plan("reference")
    pages, active, requests = problem.pages, problem.active, problem.requests
    for field, arguments in {
        "requests": (problem.ids, requests[:1], active, pages, out),
        "active": (problem.ids, requests, active.int(), pages, out),
        "out": (problem.ids[:1], requests[:1], active[:1], pages, out),
        "pages": (problem.ids, requests, active, replace(pages, firsts=pages.firsts.contiguous()), out),
    }.items():
        with pytest.raises(ConfigError, match=field):
            cluster_expand(*arguments, impl="reference")
    for field, changed in {
        "piece": (requests, active, places.steady, replace(places.places, piece=3), plan),
        "out": (requests, active, places.steady, replace(places.places, piece=2), plan),
        "requests": (requests[:1], active, places.steady, places.places, plan),
        "places": (requests, active, places.steady, replace(places.places, place=places.places.place[:1]), plan),
    }.items():
        with pytest.raises(ConfigError, match=field):
            block_runs(places.blocks, *changed, impl="reference")
