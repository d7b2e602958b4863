"""Clusters are ranked, estimated and expanded, and execution buffers planned, as plain loops do it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import device_under_test
from cluster_cases import Clusters, Shape, random_clusters
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import each_is_refused
from thoroughness import examples
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels.block_runs import BlockPlaces, BlockPlan, block_runs
from kvcm.gpu_tier.kernels.centroid_score import centroid_score
from kvcm.gpu_tier.kernels.cluster_expand import ClusterPages, SelectedBlocks, cluster_expand
from kvcm.gpu_tier.kernels.token_runs import SteadyPlan, TokenPlaces, TokenPlan, token_runs
from kvcm.gpu_tier.kernels.weighted_attn import weighted_attn
from kvcm.gpu_tier.types import CopyRuns, Source

IMPLEMENTATIONS = ["reference", "triton"]


SHAPES = [
    Shape(2, 4, 64, 64), Shape(1, 20, 144, 128), Shape(3, 3, 80, 8), Shape(2, 1, 8, 20),
]  # fmt: skip


COUNTS = [150, 0, 1, 64, 192]


def where(impl: str) -> torch.device:
    return device_under_test() if impl != "reference" else torch.device("cpu")


def query(shape: Shape, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, shape.q_heads, shape.dims, generator=torch.Generator().manual_seed(1)).to(dtype)


def near(dtype: torch.dtype) -> dict[str, float]:
    # On a GPU the weights of bf16 queries are rounded to bf16.
    exact = dtype is torch.float32 or not torch.cuda.is_available()
    return {"rtol": 1e-5, "atol": 1e-4} if exact else {"rtol": 2**-7, "atol": 2**-7}


# centroid_score ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_dot_products_with_the_centroids_that_exist(impl: str, shape: Shape, dtype: torch.dtype) -> None:
    clusters, q = random_clusters(shape, COUNTS, 3), query(shape, len(COUNTS), dtype)
    here, device = clusters.to(where(impl)), where(impl)
    for width in (192, 130):
        out = torch.full((len(COUNTS), shape.q_heads, width + 3), torch.nan, device=device)[..., :width]
        centroid_score(
            q.to(device), here.views.centroids, here.views.log_size, here.page_table, here.n_clusters, 0.3, out,
            impl=impl,
        )  # fmt: skip
        torch.testing.assert_close(out.double().cpu(), direct_scores(q, clusters, 0.3)[..., :width], **near(dtype))


def direct_scores(q: Tensor, clusters: Clusters, scale: float) -> Tensor:
    rows = []
    for row, count in enumerate(clusters.n_clusters.tolist()):
        heads = []
        for head in range(q.shape[1]):
            kv_head = head * clusters.views.centroids.shape[1] // q.shape[1]
            centroids, _, _, exists = clusters.of(row, kv_head)
            exists = exists & (torch.arange(len(exists)) < count)
            heads.append((centroids @ q[row, head].double() * scale).masked_fill(~exists, -torch.inf))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def test_every_tiling_scores_the_same() -> None:
    kernel = import_module("kvcm.gpu_tier.kernels.centroid_score.triton_impl").kernel
    shape = Shape(2, 4, 64, 64)
    clusters, q = random_clusters(shape, COUNTS, 4), query(shape, len(COUNTS))
    want, here, device = direct_scores(q, clusters, 1.0), clusters.to(where("triton")), where("triton")
    for tiling in kernel.tilings:
        kernel.forced = tiling
        out = torch.full(want.shape, torch.nan, device=device)
        pages = here.views.centroids, here.views.log_size, here.page_table
        centroid_score(q.to(device), *pages, here.n_clusters, 1.0, out, impl="triton")
        kernel.forced = None
        torch.testing.assert_close(out.double().cpu(), want, rtol=1e-5, atol=1e-4)


# weighted_attn -------------------------------------------------------------------------------------------------------
def estimate(
    q: Tensor, clusters: Clusters, ids: Tensor, lengths: Tensor, scale: float, impl: str
) -> tuple[Tensor, Tensor]:
    device, views = where(impl), clusters.to(where(impl)).views
    o = torch.full((*q.shape[:2], views.value_sums.shape[3]), torch.nan, device=device)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    pages, ids, lengths = clusters.page_table.to(device), ids.to(device), lengths.to(device)
    weighted_attn(
        q.to(device), views.centroids, views.value_sums, views.log_size, pages, ids, lengths, scale, o, lse, impl=impl
    )
    return o.double().cpu(), lse.double().cpu()


def direct_estimate(q: Tensor, clusters: Clusters, ids: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return Σ exp(q·C·scale - ℓ)·VS and ℓ, head by head."""
    group = q.shape[1] // ids.shape[1]
    o = torch.zeros(*q.shape[:2], clusters.views.value_sums.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row in range(q.shape[0]):
        for j in range(q.shape[1]):
            centroids, sums, size, exists = clusters.of(row, j // group)
            listed = ids[row, j // group, : int(lengths[row, j // group])].long()
            listed = listed[listed >= 0]
            listed = listed[exists[listed]]
            dots = centroids[listed] @ q[row, j].double() * scale
            lse[row, j] = (dots + size[listed].log()).logsumexp(0)
            if len(listed):
                o[row, j] = (dots - lse[row, j]).exp() @ sums[listed]
    return o, lse


def random_lists(shape: Shape, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return lists of clusters with gaps, and how much of each counts: nothing, some or all."""
    g = torch.Generator().manual_seed(seed)
    rows = len(COUNTS)
    ids = torch.stack([torch.randperm(192, generator=g)[:width] for _ in range(rows * shape.heads)]).int()
    ids[torch.rand(ids.shape, generator=g) < 0.05] = -1
    lengths = torch.randint(0, width + 1, (rows, shape.heads), generator=g, dtype=torch.int32)
    lengths[0], lengths[1], lengths[2] = width, 0, 1
    return ids.view(rows, shape.heads, width), lengths


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(1, torch.float32), (150, torch.float32), (40, torch.bfloat16)])
def test_estimates_are_sums_over_the_listed_clusters(impl: str, shape: Shape, width: int, dtype: torch.dtype) -> None:
    clusters, q = random_clusters(shape, COUNTS, 5), query(shape, len(COUNTS), dtype)
    ids, lengths = random_lists(shape, width, width)
    scale = shape.dims**-0.5
    o, lse = estimate(q, clusters, ids, lengths, scale, impl)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, scale)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else near(dtype)
    torch.testing.assert_close(lse, want_lse, **tolerance)
    torch.testing.assert_close(o, want_o, **tolerance)
    assert bool((lse[1] == -torch.inf).all())
    assert not o[1].any()


def test_every_tiling_estimates_the_same() -> None:
    kernel = import_module("kvcm.gpu_tier.kernels.weighted_attn.triton_impl").kernel
    shape = Shape(1, 20, 64, 16)
    clusters, q = random_clusters(shape, COUNTS, 7), query(shape, len(COUNTS))
    ids, lengths = random_lists(shape, 100, 7)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, 0.2)
    for tiling in kernel.tilings:
        kernel.forced = tiling
        o, lse = estimate(q, clusters, ids, lengths, 0.2, "triton")
        kernel.forced = None
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(o, want_o, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sums_beyond_f16_and_scores_far_apart_stay_finite(impl: str) -> None:
    shape = Shape(1, 4, 16, 16)
    clusters, q = random_clusters(shape, COUNTS, 8), query(shape, len(COUNTS)) * 40
    clusters.views.value_sums.mul_(1e6)
    ids, lengths = random_lists(shape, 90, 8)
    o, lse = estimate(q, clusters, ids, lengths, 1.0, impl)
    want_o, want_lse = direct_estimate(q, clusters, ids, lengths, 1.0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(o, want_o, rtol=1e-3, atol=1e-3 * float(want_o.abs().max()))


def test_arguments_are_checked() -> None:
    shape = Shape(2, 2, 8, 4)
    clusters, q = random_clusters(shape, [10, 20], 9), query(shape, 2)
    v, table, counts = clusters.views, clusters.page_table, clusters.n_clusters
    good = {"q": q, "centroids": v.centroids, "log_size": v.log_size, "page_table": table, "sm_scale": 1.0}
    each_is_refused(
        centroid_score, good | {"n_clusters": counts, "out": torch.zeros(2, 4, 192)}, centroids=v.centroids.float(),
        q=q[:, :3].contiguous(), log_size=v.log_size[:, :1], page_table=table[:1], n_clusters=counts[:1],
        out=torch.zeros(2, 4, 193),
    )  # fmt: skip
    ids, o = torch.zeros(2, 2, 5, dtype=torch.int32), torch.zeros(2, 4, 4)
    good |= {"value_sums": v.value_sums, "ids": ids, "lengths": torch.zeros(2, 2, dtype=torch.int32), "out_o": o}
    good["out_lse"] = torch.zeros(2, 4)
    each_is_refused(weighted_attn, good, value_sums=v.value_sums.float(), ids=ids[:, :1], out_o=o[..., :2])


REQUESTS, PAGES, PAGE_CLUSTERS, PAGE_BLOCKS = 3, 2, 5, 14


def on(device: torch.device, value: Any) -> Any:
    """Return a dataclass of tensors on a device."""
    tensors = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})


@dataclass
class BlockClusters:
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
        device = where(impl)
        out = SelectedBlocks.empty(self.rows, self.heads, width, device)
        inputs = (x.to(device) for x in (self.ids, self.requests, self.active))
        cluster_expand(*inputs, on(device, self.pages), out, impl=impl)
        return out


problems = st.builds(
    BlockClusters, st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 1, 3, 9]),
    st.sampled_from([1, 4, 6]),
)  # fmt: skip


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=examples(80), deadline=None)
@given(problems, st.sampled_from([0, 5, 40]))
def test_clusters_are_expanded_in_order(impl: str, problem: BlockClusters, width: int) -> None:
    out = problem.expanded(impl, width)
    for row in range(problem.rows):
        for head in range(problem.heads):
            blocks = problem.expected(row, head, width)
            rest = [(-1, 0, 0, 0)] * (width - len(blocks))
            columns = (out.ids, out.tokens, out.hosts, out.offsets)
            assert list(zip(*(column[row, head].tolist() for column in columns), strict=True)) == blocks + rest
            assert out.lengths[row, head] == len(blocks)
            assert out.totals[row, head] == sum(block[1] for block in blocks)


def random_steady(draw: torch.Generator, rows: int, before: int) -> SteadyPlan:
    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw, dtype=torch.int32)

    kind, src, dst, tokens = (ints(high, rows, before) for high in (2, 900, 900, 9))
    return SteadyPlan(kind - 1, src.long(), dst, tokens, ints(900, rows), ints(90, rows))


class Places:
    """Random places of the blocks that were selected, and steady runs."""

    def __init__(self, problem: BlockClusters, width: int, piece: int) -> None:
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
        self.steady = random_steady(draw, rows, before)

    def plan(self, impl: str) -> BlockPlan:
        device, p = where(impl), self.problem
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
def test_plans_of_blocks_are_those_of_plain_loops(impl: str, problem: BlockClusters, parts: int) -> None:
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
    plans = [Places(BlockClusters(3, 2, 2, 9, 4), 700, 4).plan(impl) for impl in IMPLEMENTATIONS]
    for line in range(4):
        assert lines_of(plans[0].runs, line) == lines_of(plans[1].runs, line)
        assert lines_of(plans[0].admissions, line) == lines_of(plans[1].admissions, line)


def test_arguments_of_expansion_and_block_plans_are_checked() -> None:
    problem = BlockClusters(1, 2, 2, 3, 4)
    drawn = Places(problem, 8, 4)
    pages, places, out = problem.pages, drawn.places, problem.expanded("reference", 8)
    good = {"requests": problem.requests, "active": problem.active, "impl": "reference"}
    each_is_refused(
        cluster_expand, good | {"ids": problem.ids, "pages": pages, "out": out}, requests=problem.requests[:1],
        active=problem.active.int(), pages=replace(pages, firsts=pages.firsts.contiguous()),
        out=SelectedBlocks.empty(1, 2, 8, out.ids.device),
    )  # fmt: skip
    good |= {"blocks": drawn.blocks, "steady": drawn.steady, "places": places, "out": drawn.plan("reference")}
    wrong = {"requests": problem.requests[:1], "places": replace(places, place=places.place[:1])}
    each_is_refused(block_runs, good, **wrong)
    for field, piece in (("piece", 3), ("out", 2)):
        with pytest.raises(ConfigError, match=field):
            block_runs(**{**good, "places": replace(places, piece=piece)})  # type: ignore[arg-type]


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
        self.steady = random_steady(draw, rows, before)

    def plan(self, impl: str) -> TokenPlan:
        device, (rows, heads, width) = where(impl), self.indices.shape
        counters = torch.tensor([5, 6, 7], device=device)
        out = TokenPlan.empty(rows, heads, self.steady.kind.shape[1] + width, counters)
        inputs = (x.to(device) for x in (self.indices, self.lengths, self.requests, self.active))
        token_runs(*inputs, on(device, self.steady), on(device, self.places), out, impl=impl)
        return out

    def expected(self, row: int, head: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return (kind, src, dst, tokens) of each run of an active row, and the counters."""
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


def test_arguments_of_token_plans_are_checked() -> None:
    problem = Problem(2, 2, 2, 5, 4, by_head=False)
    p, out = problem.places, problem.plan("reference")
    good = {name: getattr(problem, name) for name in ("indices", "lengths", "requests", "active", "steady", "places")}
    good |= {"out": out, "impl": "reference"}
    each_is_refused(
        token_runs, good, lengths=problem.lengths[:1], requests=problem.requests[:1], active=problem.active.int(),
        out=replace(out, lens=out.lens[:1]), places=replace(p, place_of=p.place_of.repeat(1, 3, 1)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="host_loc"):
        token_runs(**{**good, "places": replace(p, host_loc=p.host_loc.T)})
