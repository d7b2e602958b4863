"""An engine's own metadata: it stays as it was, and it is used as it is when no row is sparse."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_traffic import Shape, Traffic
from torch import Tensor

from gpu_tier.backend.adaptor import BackendAdaptor, DenseRows
from gpu_tier.backend.engine_metadata import EngineMetadata
from gpu_tier.backend.flash_adaptor import FlashAdaptor
from gpu_tier.backend.token_adaptor import TokenAdaptor
from gpu_tier.errors import StateError
from gpu_tier.types import PagedMeta, ResidencyPlan, Selection, TokenMeta

CASES: dict[str, dict[str, Any]] = {
    "quest": {"algorithm": "quest", "algo": {"page": 4, "token_budget": 24, "skip_layers": 1}},
    "quest per head": {
        "algorithm": "quest",
        "algo": {"page": 4, "token_budget": 24, "skip_layers": 1, "heads": "per_head"},
    },
    "dsa": {"algorithm": "dsa", "top_k": 16, "algo": {"index_heads": 4, "index_dim": 16}},
    "snapkv": {"algorithm": "snapkv", "algo": {"w_obs": 4, "cap": 16, "kernel": 3}},
    "full_offload": {"algorithm": "full_offload", "algo": {"chunk_tokens": 24}},
}
FIELDS = ("page_table", "cache_seqlens_int32", "cu_seqlens_k", "max_seq_len_k")


def engine_metadata() -> SimpleNamespace:
    lengths = torch.tensor([9, 30, 0], dtype=torch.int32)
    return SimpleNamespace(
        page_table=torch.arange(15, dtype=torch.int32).view(3, 5),
        cache_seqlens_int32=lengths,
        cu_seqlens_k=torch.tensor([0, 9, 39, 39], dtype=torch.int32),
        max_seq_len_k=30,
        something_else=object(),
    )


def test_an_engine_finds_its_metadata_as_it_was_bit_for_bit() -> None:
    meta, before, swaps = engine_metadata(), engine_metadata(), EngineMetadata()
    given = dict(vars(meta))
    for layer in range(3):
        swaps.save_original_metadata(meta)  # each layer may say so
        table = torch.full((3, 2), layer, dtype=torch.int32)
        swaps.apply(meta, PagedMeta(None, table, torch.tensor([3, 0, 8], dtype=torch.int32), 4))  # type: ignore[arg-type]
        assert meta.page_table is table
        assert meta.cu_seqlens_k.tolist() == [0, 3, 3, 11]
        assert meta.cu_seqlens_k.dtype is torch.int32
        assert meta.max_seq_len_k == 8
    swaps.restore(meta)
    swaps.restore(meta)
    assert all(getattr(meta, name) is value for name, value in given.items())
    assert all(torch.equal(getattr(meta, name), getattr(before, name)) for name in FIELDS[:3])
    assert meta.max_seq_len_k == before.max_seq_len_k
    with pytest.raises(StateError, match="save_original_metadata"):
        swaps.apply(meta, PagedMeta(None, meta.page_table, meta.cache_seqlens_int32, 4))  # type: ignore[arg-type]


def test_names_of_an_engines_fields_may_differ() -> None:
    meta = SimpleNamespace(**{name: torch.tensor([1]) for name in "abc"}, d=1)
    swaps = EngineMetadata("a", "b", "c", "d")
    given = dict(vars(meta))
    swaps.save_original_metadata(meta)
    swaps.apply(meta, PagedMeta(None, torch.zeros(2, 3), torch.tensor([5, 6]), 8))  # type: ignore[arg-type]
    assert (meta.b.tolist(), meta.c.tolist(), meta.d) == ([5, 6], [0, 5, 11], 24)
    swaps.restore(meta)
    assert vars(meta) == given


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))


def inputs(heads: int, unit: int, traffic: Traffic) -> tuple[Selection, ResidencyPlan, Tensor, DenseRows]:
    requests = [traffic.begin(n, seed=n) for n in (30, 11)]
    traffic.prompt(requests)
    batch = traffic.coordinator.plan_decode(requests, 3)
    ids = torch.tensor([[0, 2, 30 // unit], [-1, -1, -1], [-1, -1, -1]], dtype=torch.int32)[:, None].repeat(1, heads, 1)
    lengths = torch.tensor([3, 0, 0], dtype=torch.int32)[:, None].repeat(1, heads)
    selection = Selection(traffic.coordinator.algorithm.unit, unit, ids, lengths)
    plan = ResidencyPlan(torch.where(ids >= 0, ids * unit + 40, -1))
    return (
        selection,
        plan,
        torch.tensor([True, False, False]),
        DenseRows(batch, traffic.coordinator.manager.tables.table, 12),
    )


@pytest.mark.parametrize(
    ("adaptor", "heads", "unit"),
    [(FlashAdaptor(4), 1, 4), (TokenAdaptor(1), 1, 4), (TokenAdaptor(2), 2, 4), (TokenAdaptor(1), 1, 1)],
)
def test_adaptors_change_nothing_and_leave_padding_empty(adaptor: BackendAdaptor, heads: int, unit: int) -> None:
    traffic = Traffic(Shape(), {"algorithm": "full"})
    selection, plan, mask, dense = inputs(heads, unit, traffic)
    kv = traffic.coordinator.manager.device.layer(0)
    given = [tensor for value in (selection, plan, mask, dense.batch, dense.table) for tensor in tensors_of(value)]
    copies = [tensor.clone() for tensor in given]
    first, second = (
        adaptor.adapt_for_attn_metadata(selection, plan, mask, dense.batch, kv, dense) for _ in range(2)
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(first), tensors_of(second), strict=True))
    last = 31 - 30 // unit * unit  # tokens of the item that is being written
    lens = first.lens if isinstance(first, TokenMeta) else first.cache_seqlens[:, None].expand(-1, heads)
    assert lens.tolist() == [[2 * unit + min(last, unit)] * heads, [12] * heads, [0] * heads]
    shape = first.token_table.shape if isinstance(first, TokenMeta) else first.page_table[:, None].shape
    assert shape[:2] == (3, heads)


@pytest.mark.parametrize("name", CASES)
def test_without_a_sparse_row_an_engine_gets_its_own_metadata_in_every_layer(name: str) -> None:
    traffic = Traffic(Shape(), {**CASES[name], "min_sparse_prompt_len": 200, "device_buffer_size": 48})
    c = traffic.coordinator
    request = traffic.begin(30, seed=1)
    traffic.prompt([request])
    while c.trackers[request].seq_len < 40:
        batch = c.plan_decode([request])
        c.forward_begin(batch)
        for layer in range(3):
            q, k, v, extra = traffic._inputs(batch, layer)
            c.write_kv(layer, batch, k, v)
            own = PagedMeta(c.manager.device.layer(layer), torch.zeros(1, 1), torch.ones(1), 8)
            meta, partials = c.attention_begin(q, k, v, layer, batch, own, **extra)
            assert meta is own
            assert not partials
            c.attention_end(q, layer, batch)
        c.forward_end(batch)
    # What was decoded so is represented: what is selected later is right, which every step checks.
    other = Traffic(Shape(), {**CASES[name], "min_sparse_prompt_len": 200, "device_buffer_size": 48})
    same = other.begin(30, seed=1)
    other.prompt([same])
    for _ in range(10):
        other.decode([same])
    for _ in range(15):
        assert torch.equal(traffic.decode([request]), other.decode([same]))
