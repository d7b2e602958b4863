"""The execution buffer: rows own whole pages, one layer, and a table that padding rows fit into."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.manager.execution_buffer import ExecutionBuffer
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime

GEOMETRY = KVGeometry(KVKind.MHA, 3, 2, 4, 4, KVDtype.F32, page_size=8, start_layer=5)


def test_rows_are_whole_pages_of_one_layer() -> None:
    buffer = ExecutionBuffer(GEOMETRY, 3, 17, NullRuntime())
    assert buffer.tokens_per_row == 24
    assert buffer.nbytes == 3 * 24 * GEOMETRY.token_layer_bytes
    assert buffer.table.shape == (3, 2, 24)
    assert buffer.table[2, 1].tolist() == list(range(48, 72))
    assert buffer.layer_kv().k.data.shape[0] == 72
    assert buffer.source().data.data_ptr() == buffer.pool.data.data_ptr()


def test_padding_rows_have_no_slots() -> None:
    buffer = ExecutionBuffer(GEOMETRY, 2, 8, NullRuntime())
    assert torch.equal(buffer.table_of(1), buffer.table[:1])
    table = buffer.table_of(4)
    assert torch.equal(table[:2], buffer.table)
    assert bool((table[2:] == -1).all())
    assert buffer.table_of(4) is table


@pytest.mark.parametrize(("rows", "tokens"), [(0, 8), (1, 0)])
def test_an_empty_buffer_is_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        ExecutionBuffer(GEOMETRY, rows, tokens, NullRuntime())
