"""P1: the Triton kernel is bit-exact with the reference in everything it writes, at every block size."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from lru_model import World, clone_state, random_case
from lru_states import RandomSteps, copied, outputs_equal, random_state, states_equal
from thoroughness import examples

from gpu_tier.kernels.lru_diff import DiffOutputs, DiffScratch, lru_diff, ref

pytest.importorskip("triton")


def both_worlds_agree(seed: int) -> None:
    case = random_case(seed)
    # The interpreter takes about 10 ms for a row and head.
    case = replace(case, steps=min(case.steps, 4), requests=2, layers=1)
    reference, ours = World(case, kernels="reference"), World(case, kernels="triton")
    for _ in range(case.steps):
        assert reference.admit_another() == ours.admit_another()
        for theirs, mine in zip(reference.step(), ours.step(), strict=True):
            assert theirs.selected == mine.selected
            first, second = theirs.plan, mine.plan
            assert torch.equal(first.device_slot, second.device_slot)
            for name in ("src_host", "dst_dev", "count"):
                assert torch.equal(getattr(first.misses, name), getattr(second.misses, name)), name
            for name in ("src", "dst") if case.promote else ():
                assert torch.equal(getattr(first.promotion, name), getattr(second.promotion, name)), name
            assert first.evicted_items is not None
            assert second.evicted_items is not None
            assert torch.equal(first.evicted_items, second.evicted_items)
            state, other = clone_state(reference.policy, theirs.layer), clone_state(ours.policy, mine.layer)
            for name, rows in state.items():
                assert torch.equal(rows, other[name]), name
    assert reference.policy.errors == ours.policy.errors
    assert reference.policy.counters == ours.policy.counters


@pytest.mark.parametrize("part", range(5))
def test_random_histories_equal_the_reference(part: int) -> None:
    each = examples(100) // 5
    for seed in range(part * each, (part + 1) * each):
        both_worlds_agree(seed)


@pytest.mark.parametrize(
    ("width", "capacity", "n_items", "block"),
    [
        (1, 1, 4, 16), (16, 16, 100, 16), (17, 33, 100, 16), (31, 64, 500, 32), (128, 256, 4096, 64),
        (100, 300, 4096, 128), (512, 1024, 8192, 1024),
    ],
)  # fmt: skip
def test_larger_shapes_equal_the_reference(width: int, capacity: int, n_items: int, block: int) -> None:
    from gpu_tier.kernels.lru_diff import triton_impl

    rng = torch.Generator().manual_seed(width + capacity + block)
    theirs = random_state(capacity, n_items, rng)
    mine = copied(theirs)
    counters, errors = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    first = DiffOutputs.empty(3, 2, width, counters, errors)
    second = DiffOutputs.empty(3, 2, width, counters.clone(), errors.clone())
    scratch = DiffScratch(3, 2, n_items, capacity, torch.device("cpu"))
    requests, num_real = torch.tensor([1, 0, 7]), torch.tensor([2], dtype=torch.int32)
    mask = torch.ones(3, dtype=torch.bool)
    for step in range(2):
        items = torch.full((3, 2, width), -1, dtype=torch.int32)
        for row in range(2):
            for head in range(2):
                held = mine.slot_item[1 - row, head]
                picked = torch.cat([held[: width // 2], torch.randperm(n_items, generator=rng)[:width]])
                picked = torch.tensor(list(dict.fromkeys(picked.tolist()))[:width], dtype=torch.int32)
                items[row, head] = picked[torch.randperm(width, generator=rng)]
        seq_lens = torch.tensor([n_items - 1 + step, n_items, 1], dtype=torch.int32)
        options = {"unit_tokens": 1, "promote_newest": True, "loads_hottest": bool(step)}
        arguments = (items, requests, seq_lens, mask, num_real)
        ref.run(*arguments, theirs, first, scratch, **options)
        triton_impl.run(*arguments, mine, second, scratch, **options, block=block)
        outputs_equal(second, first)
        states_equal(mine, theirs)
        assert (scratch.item_slot == -1).all(), "the direct map has to be empty between calls"
    assert counters.sum() > 0


@pytest.mark.parametrize(("block", "warps"), [(16, 1), (32, 1), (64, 2), (128, 4), (1024, 4)])
def test_no_two_warps_hold_the_same_numbers(block: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_tier.kernels.lru_diff import triton_impl

    launches: list[dict[str, Any]] = []

    class Launched:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda *_args, **options: launches.append(options)

    monkeypatch.setattr(triton_impl, "_diff", Launched())
    state = random_state(8, 40, torch.Generator().manual_seed(0))
    out = DiffOutputs.empty(1, 2, 2, torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    numbers = (torch.tensor([value], dtype=torch.int32) for value in (0, 40, 1, 1))
    triton_impl.run(
        torch.zeros(1, 2, 2, dtype=torch.int32), *numbers, state, out, DiffScratch(1, 2, 40, 8, torch.device("cpu")),
        unit_tokens=1, promote_newest=True, loads_hottest=True, block=block,
    )  # fmt: skip
    assert [options["num_warps"] for options in launches] == [warps]


def test_ids_beyond_the_request_are_reported_and_touch_nothing() -> None:
    state = random_state(8, 40, torch.Generator().manual_seed(0))
    errors = []
    for impl in ("reference", "triton"):
        out = DiffOutputs.empty(1, 2, 2, torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
        scratch = DiffScratch(1, 2, 40, 8, torch.device("cpu"))
        items = torch.tensor([[[40, -1], [10**9, 3]]], dtype=torch.int32)
        lru_diff(
            items, torch.tensor([0]), torch.tensor([40], dtype=torch.int32), torch.tensor([True]),
            torch.tensor([1], dtype=torch.int32), copied(state), out, scratch, unit_tokens=1, impl=impl,
        )  # fmt: skip
        assert out.device_slot[0, :, 0].tolist() == [-1, -1]
        errors.append(int(out.errors) & 4)
    assert errors == [4, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("seed", range(40))
def test_on_the_gpu_random_states_equal_the_reference(impl: str, seed: int) -> None:
    steps = RandomSteps(seed, most_capacity=4096)
    theirs, first = steps.state, steps.outputs()
    mine, second = on_gpu(theirs), on_gpu(first)
    items = theirs.host_loc.shape[1]
    scratch = DiffScratch(3, 2, items, steps.capacity, torch.device("cuda"))
    for number in range(4):
        arguments = steps.step(number)
        lru_diff(*arguments, theirs, first, scratch, **steps.options, impl="reference")
        lru_diff(*(a.cuda() for a in arguments), mine, second, scratch, **steps.options, impl=impl)
        outputs_equal(on_cpu(second), first)
        states_equal(on_cpu(mine), theirs)


def on_gpu(values: Any) -> Any:
    return replace(values, **{field.name: getattr(values, field.name).cuda() for field in fields(values)})


def on_cpu(values: Any) -> Any:
    return replace(values, **{field.name: getattr(values, field.name).cpu() for field in fields(values)})
